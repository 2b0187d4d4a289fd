#pragma once

#include "cuda/kernels/gemm/gemm_tile.cuh"

namespace glint::cuda {

constexpr int kPersistentTokens = 128;
constexpr int kStagedRows = 32;
constexpr int kStagedBoxes = kGemmTileRows / kStagedRows;

struct TensorTokens {
  static constexpr bool kIsGathered = false;
  static constexpr int kLoadRegisters = 40;
  static constexpr int kMultiplyRegisters = 232;
  static constexpr uint64_t kWeightPolicy = ptx::kEvictNormal;

  CUtensorMap map;
};

struct GatheredTokens {
  static constexpr bool kIsGathered = true;
  static constexpr int kLoadRegisters = 72;
  static constexpr int kMultiplyRegisters = 216;
  static constexpr uint64_t kWeightPolicy = ptx::kEvictFirst;
};

template <Multiply kMultiply>
struct PersistentTeams;

template <>
struct PersistentTeams<Multiply::kWgmma> {
  static constexpr int kThreads = kGemmThreads;
  static constexpr int kLoadThreads = 128;
  static constexpr int kGatherArrivals = kLoadThreads / 32;
  static constexpr int kTeamThreads = 128;
  static constexpr int kTokenWarps = 1;
  static constexpr int kFixedCostTokens = 160;
  static constexpr bool kKeepsTotals = false;
};

template <>
struct PersistentTeams<Multiply::kMmaSync> {
  static constexpr int kThreads = kConsumerWarps * 32;
  static constexpr int kLoadThreads = 32;
  static constexpr int kGatherArrivals = kLoadThreads;
  static constexpr int kTeamThreads = 64;
  static constexpr int kTokenWarps = 2;
  static constexpr int kFixedCostTokens = 32;
  static constexpr bool kKeepsTotals = true;
};

template <Multiply kMultiplyValue, GemmElement kElementValue, class TokensValue, bool kIsStagedValue>
struct PersistentShape : PersistentTeams<kMultiplyValue> {
  using Teams = PersistentTeams<kMultiplyValue>;
  using Tokens = TokensValue;
  static constexpr Multiply kMultiply = kMultiplyValue;
  static constexpr GemmElement kElement = kElementValue;
  static constexpr bool kIsStaged = kIsStagedValue;
  static constexpr bool kHasValues = kIsStaged || Teams::kKeepsTotals;
  static constexpr int kStages = kHasValues ? 5 : 7;
  static constexpr int kArrivals = 1 + (Tokens::kIsGathered ? Teams::kGatherArrivals : 0);
  static constexpr int kTeamRows = kGemmTileRows * Teams::kTeamThreads / (kConsumerWarps * 32);
  static constexpr int kTeamBoxes = kTeamRows / kStagedRows;

  static constexpr bool kHasRowOffsets = Tokens::kIsGathered && kMultiply == Multiply::kMmaSync;

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 - (Teams::kThreads / 32 - kConsumerWarps); }
  static __device__ __forceinline__ int team() {
    return threadIdx.x / Teams::kTeamThreads - (Teams::kThreads / 32 - kConsumerWarps) * 32 / Teams::kTeamThreads;
  }
};

template <class Shape, int kTokens>
struct ThreadTile {
  static constexpr int kGroups = kTokens / Shape::kTokenWarps / kFragmentTokens;
  static constexpr int kFragments = kGemmTileRows * Shape::kTokenWarps / (kConsumerWarps * kFragmentRows);
  static constexpr int kRegisters = kFragments * kGroups * 4;

  static __device__ __forceinline__ int fragment_first() { return Shape::warp() / Shape::kTokenWarps * kFragments; }
  static __device__ __forceinline__ int group_first() { return threadIdx.x / 32 % Shape::kTokenWarps * kGroups; }
};

template <bool kHasValues>
struct TileValues {};

template <>
struct TileValues<true> {
  alignas(1024) float boxes[kStagedBoxes][kPersistentTokens * kStagedRows];
};

template <bool kHasRowOffsets>
struct GatheredRowOffsets {};

template <>
struct GatheredRowOffsets<true> {
  static constexpr int kQuarterRows = kPersistentTokens / 4 + 4;

  alignas(16) uint32_t lists[2][4][kQuarterRows];

  __device__ __forceinline__ void store(int list, int row, uint32_t offset) { lists[list][row % 4][row / 4] = offset; }
};

template <class Shape>
struct PersistentStorage {
  alignas(1024) uint8_t weights[Shape::kStages][kGemmTileBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][kPersistentTokens * kGemmTileK];
  [[no_unique_address]] TileValues<Shape::kHasValues> values;
  [[no_unique_address]] GatheredRowOffsets<Shape::kHasRowOffsets> row_offsets;
  alignas(8) uint64_t stage_arrived[Shape::kStages];
  alignas(8) uint64_t stage_released[Shape::kStages];
};

template <class Shape>
__device__ __forceinline__ void prepare(PersistentStorage<Shape>& s_storage) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(s_storage.stage_arrived[stage], Shape::kArrivals);
      ptx::mbarrier_init(s_storage.stage_released[stage], kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

struct PersistentExpertScheduler {
  static constexpr bool kIsKnownEarly = false;

  int32_t num_row_tiles;
  const TokenTile* token_tiles;
  const int32_t* num_token_tiles;

  __device__ __forceinline__ int num_tiles() const { return num_row_tiles * __ldcg(num_token_tiles); }

  __device__ __forceinline__ GemmTile tile(int index, int num_tiles) const {
    const int place = in_serpentine_order(index, num_tiles);
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(token_tiles) + place / num_row_tiles);
    return {{tile.x, tile.y, tile.z, tile.w}, place % num_row_tiles};
  }

  __device__ __forceinline__ int64_t weight_tile(const GemmTile& tile) const {
    return int64_t{tile.tokens.expert} * num_row_tiles + tile.row_tile;
  }

 private:
  static __device__ __forceinline__ int in_serpentine_order(int index, int num_tiles) {
    const auto rounds_left = (static_cast<uint32_t>(num_tiles - 1 - index) + blockIdx.x) / gridDim.x;
    return rounds_left % 2 == 0 ? index : index + static_cast<int>(gridDim.x - 1 - 2 * blockIdx.x);
  }
};

template <class Shape>
struct PersistentWeights {
  const uint8_t* g_weights;
  int num_steps;
  uint32_t token_bytes;

  __device__ __forceinline__ void load(PersistentStorage<Shape>& s_storage, int64_t weight_tile, int k_step,
                                       int stage) const {
    const uint8_t* g_tile = g_weights + (weight_tile * num_steps + k_step) * kGemmTileBytes;
    ptx::mbarrier_arrive_expect_tx(s_storage.stage_arrived[stage], kGemmTileBytes + token_bytes);
    ptx::cp_async_bulk(s_storage.weights[stage], g_tile, kGemmTileBytes, s_storage.stage_arrived[stage],
                       Shape::Tokens::kWeightPolicy);
  }
};

template <class Shape, class Scheduler>
__device__ __forceinline__ void load_boxes(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                           const TensorTokens& tokens, const Scheduler& scheduler) {
  const int num_steps = inputs.split_steps * inputs.num_splits;
  const auto token_bytes = static_cast<uint32_t>(scheduler.max_tokens * kGemmTileK);
  const PersistentWeights<Shape> weights = {inputs.weights, num_steps, token_bytes};
  const int num_tiles = scheduler.num_tiles();
  const int first_tile = scheduler.tile(blockIdx.x, num_tiles).row_tile;
  int num_early = min(num_steps, Shape::kStages);
  for (int k_step = 0; k_step < num_early; ++k_step) weights.load(s_storage, first_tile, k_step, k_step);
  ptx::griddepcontrol_wait();
  PipelineState<Shape::kStages> ring;
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const GemmTile tile = scheduler.tile(index, num_tiles);
    for (int k_step = 0; k_step < num_steps; ++k_step) {
      ptx::mbarrier_wait_suspended(s_storage.stage_released[ring.stage], ring.phase ^ 1U);
      if (num_early <= 0) weights.load(s_storage, tile.row_tile, k_step, ring.stage);
      --num_early;
      ptx::cp_async_bulk_tensor_load(s_storage.tokens[ring.stage], tokens.map, k_step * kGemmTileK,
                                     tile.tokens.row_first, s_storage.stage_arrived[ring.stage], ptx::kEvictNormal);
      ring.advance();
    }
  }
}

template <class Shape>
struct RowPasses {
  static constexpr int kRowsPerPass = Shape::kLoadThreads / 8;
  static constexpr int kPasses = kPersistentTokens / kRowsPerPass;
  static_assert(kRowsPerPass % 8 == 0, "every pass has the same swizzle");

  int r_tokens[kPasses];
  int count;

  __device__ __forceinline__ RowPasses(const GemmInputs& inputs, const TokenTile& tile) { find(inputs, tile); }

  __device__ __forceinline__ void find(const GemmInputs& inputs, const TokenTile& tile) {
    count = tile.row_count;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int place = min(static_cast<int>(threadIdx.x) / 8 + pass * kRowsPerPass, count - 1);
      r_tokens[pass] = __ldcg(inputs.row_tokens + tile.row_first + place);
    }
  }
};

template <class Shape>
struct RowGather {
  using Passes = RowPasses<Shape>;

  const uint8_t* g_chunk;
  uint32_t r_offsets[Passes::kPasses];
  int num_passes;

  __device__ __forceinline__ RowGather(const GemmInputs& inputs, const Passes& rows)
      : g_chunk(inputs.activations + threadIdx.x % 8 * 16),
        num_passes((rows.count - static_cast<int>(threadIdx.x) / 8 + Passes::kRowsPerPass - 1) / Passes::kRowsPerPass) {
#pragma unroll
    for (int pass = 0; pass < Passes::kPasses; ++pass) {
      r_offsets[pass] = static_cast<uint32_t>(rows.r_tokens[pass]) * static_cast<uint32_t>(inputs.activation_stride);
    }
  }

  __device__ __forceinline__ void load(const uint8_t* s_tokens, int k_step) const {
    const uint32_t row = threadIdx.x / 8;
    const uint32_t target = ptx::shared_address(s_tokens) + row * kGemmTileK + ((threadIdx.x % 8) ^ (row % 8)) * 16;
    const uint8_t* g_source = g_chunk + k_step * kGemmTileK;
#pragma unroll
    for (int pass = 0; pass < Passes::kPasses; ++pass) {
      if (pass >= num_passes) continue;
      ptx::cp_async(target + pass * Passes::kRowsPerPass * kGemmTileK, g_source + r_offsets[pass]);
    }
  }
};

template <class Shape>
struct GatherSignal {
  static constexpr int kInFlight = 3;

  PipelineState<Shape::kStages> place;
  int num_issued = 0;

  __device__ __forceinline__ void issue(PersistentStorage<Shape>& s_storage) {
    ptx::cp_async_commit_group();
    if (++num_issued <= kInFlight) return;
    ptx::cp_async_wait_group<kInFlight>();
    signal_arrived(s_storage, 1);
  }

  __device__ __forceinline__ void flush(PersistentStorage<Shape>& s_storage) {
    ptx::cp_async_wait_group<0>();
    signal_arrived(s_storage, min(num_issued, kInFlight));
  }

 private:
  __device__ __forceinline__ void signal_arrived(PersistentStorage<Shape>& s_storage, int count) {
    ptx::fence_proxy_async();
    __syncwarp();
    for (int index = 0; index < count; ++index) {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_storage.stage_arrived[place.stage]);
      place.advance();
    }
  }
};

template <class Shape, class Scheduler>
__device__ __forceinline__ void gather_tiles(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                             const Scheduler& scheduler) {
  const int num_steps = inputs.split_steps * inputs.num_splits;
  const PersistentWeights<Shape> weights = {inputs.weights, num_steps, 0};
  const int num_tiles = scheduler.num_tiles();
  if (blockIdx.x >= num_tiles) return;
  PipelineState<Shape::kStages> ring;
  GatherSignal<Shape> signal;
  GemmTile next_tile = scheduler.tile(blockIdx.x, num_tiles);
  RowPasses<Shape> next_rows(inputs, next_tile.tokens);
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const int64_t weight_tile = scheduler.weight_tile(next_tile);
    const RowGather<Shape> gather(inputs, next_rows);
    next_tile = scheduler.tile(min(index + static_cast<int>(gridDim.x), num_tiles - 1), num_tiles);
    for (int k_step = 0; k_step < num_steps; ++k_step) {
      ptx::mbarrier_wait_suspended(s_storage.stage_released[ring.stage], ring.phase ^ 1U);
      if (threadIdx.x == 0) weights.load(s_storage, weight_tile, k_step, ring.stage);
      gather.load(s_storage.tokens[ring.stage], k_step);
      signal.issue(s_storage);
      ring.advance();
      if (k_step == 0) next_rows.find(inputs, next_tile.tokens);
    }
  }
  signal.flush(s_storage);
}

template <class Shape, class Scheduler>
struct LoadTurns {
  static constexpr int kAhead = Shape::kStages - 2;
  static_assert(kAhead < kConsumerWarps, "a warp loads at most one of the first stages");

  PersistentStorage<Shape>& s_storage;
  const Scheduler& scheduler;
  PersistentWeights<Shape> weights;
  int num_tiles;
  int index;
  int k_step;
  int stages_to_turn;
  int list = 0;
  GemmTile tile;
  PipelineState<Shape::kStages> ring;

  __device__ __forceinline__ LoadTurns(PersistentStorage<Shape>& storage, const GemmInputs& inputs,
                                       const Scheduler& tile_scheduler, uint32_t token_bytes)
      : s_storage(storage),
        scheduler(tile_scheduler),
        weights{inputs.weights, inputs.split_steps * inputs.num_splits, token_bytes},
        num_tiles(scheduler.num_tiles()),
        index(static_cast<int>(blockIdx.x)),
        k_step(Shape::warp()),
        stages_to_turn((Shape::warp() + kConsumerWarps - kAhead) % kConsumerWarps + 1),
        tile(scheduler.tile(index, num_tiles)) {
    ring.advance_by(Shape::warp());
    find_tile();
  }

  __device__ __forceinline__ bool loads_a_first_stage() const { return Shape::warp() < kAhead; }

  __device__ __forceinline__ bool has_stage() const { return index < num_tiles; }

  __device__ __forceinline__ bool take_turn() {
    if (--stages_to_turn > 0) return false;
    stages_to_turn = kConsumerWarps;
    return has_stage();
  }

  __device__ __forceinline__ GemmTile tile_behind() const {
    return scheduler.tile(min(index + static_cast<int>(gridDim.x), num_tiles - 1), num_tiles);
  }

  __device__ __forceinline__ void wait_until_released() const {
    ptx::mbarrier_wait_suspended(s_storage.stage_released[ring.stage], ring.phase ^ 1U);
  }

  __device__ __forceinline__ void load_weights() const {
    weights.load(s_storage, scheduler.weight_tile(tile), k_step, ring.stage);
  }

  __device__ __forceinline__ void advance() {
    ring.advance_by(kConsumerWarps);
    k_step += kConsumerWarps;
    find_tile();
  }

 private:
  __device__ __forceinline__ void find_tile() {
    if (k_step < weights.num_steps) return;
    const int passed = k_step / weights.num_steps;
    k_step -= passed * weights.num_steps;
    index += passed * static_cast<int>(gridDim.x);
    list ^= passed & 1;
    tile = scheduler.tile(min(index, num_tiles - 1), num_tiles);
  }
};

template <class Shape, class Scheduler, bool kIsGathered = Shape::Tokens::kIsGathered>
struct StageLoader;

template <class Shape, class Scheduler>
struct StageLoader<Shape, Scheduler, false> {
  const CUtensorMap& map;
  LoadTurns<Shape, Scheduler> turns;
  bool has_early_weights;

  __device__ __forceinline__ StageLoader(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                         const TensorTokens& tokens, const Scheduler& scheduler)
      : map(tokens.map),
        turns(s_storage, inputs, scheduler, static_cast<uint32_t>(scheduler.max_tokens * kGemmTileK)),
        has_early_weights(turns.loads_a_first_stage() && turns.has_stage()) {
    if (has_early_weights && threadIdx.x % 32 == 0) turns.load_weights();
    ptx::griddepcontrol_wait();
    if (has_early_weights) load_stage();
    has_early_weights = false;
  }

  __device__ __forceinline__ void load_next() {
    if (turns.take_turn()) load_stage();
  }

 private:
  __device__ __forceinline__ void load_stage() {
    if (threadIdx.x % 32 == 0) {
      const int stage = turns.ring.stage;
      turns.wait_until_released();
      if (!has_early_weights) turns.load_weights();
      ptx::cp_async_bulk_tensor_load(turns.s_storage.tokens[stage], map, turns.k_step * kGemmTileK,
                                     turns.tile.tokens.row_first, turns.s_storage.stage_arrived[stage],
                                     ptx::kEvictNormal);
    }
    __syncwarp();
    turns.advance();
  }
};

template <class Shape, class Scheduler>
struct StageLoader<Shape, Scheduler, true> {
  static constexpr int kRowsPerLane = kPersistentTokens / 32;

  const GemmInputs& inputs;
  LoadTurns<Shape, Scheduler> turns;
  TokenTile next_tokens;
  int32_t r_next_rows[kRowsPerLane] = {};

  __device__ __forceinline__ StageLoader(PersistentStorage<Shape>& s_storage, const GemmInputs& call_inputs,
                                         const GatheredTokens&, const Scheduler& scheduler)
      : inputs(call_inputs), turns(s_storage, inputs, scheduler, 0), next_tokens(turns.tile.tokens) {
    if (Shape::warp() == 0) {
      find_next_rows();
      store_next_offsets(turns.list);
    }
    __syncthreads();
    if (turns.loads_a_first_stage() && turns.has_stage()) load_stage();
  }

  __device__ __forceinline__ void load_next() {
    if (turns.take_turn()) load_stage();
  }

 private:
  __device__ __forceinline__ void find_next_rows() {
#pragma unroll
    for (int next = 0; next < kRowsPerLane; ++next) {
      const int row = min(static_cast<int>(threadIdx.x) % 32 + next * 32, next_tokens.row_count - 1);
      r_next_rows[next] = __ldcg(inputs.row_tokens + next_tokens.row_first + row);
    }
  }

  __device__ __forceinline__ void store_next_offsets(int list) {
#pragma unroll
    for (int next = 0; next < kRowsPerLane; ++next) {
      const auto token = static_cast<uint32_t>(r_next_rows[next]);
      turns.s_storage.row_offsets.store(list, static_cast<int>(threadIdx.x) % 32 + next * 32,
                                        token * static_cast<uint32_t>(inputs.activation_stride));
    }
  }

  __device__ __forceinline__ void prepare_next_tile() {
    if (turns.k_step == 0) {
      next_tokens = turns.tile_behind().tokens;
    } else if (turns.k_step == kConsumerWarps) {
      find_next_rows();
    } else if (turns.k_step == 2 * kConsumerWarps) {
      store_next_offsets(turns.list ^ 1);
    }
  }

  __device__ __forceinline__ void gather_rows() const {
    constexpr uint32_t kFourBytes = 16 * kGemmTileK;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t quarter = lane / 8;
    const uint32_t target = ptx::shared_address(turns.s_storage.tokens[turns.ring.stage]) + quarter * kGemmTileK;
    uint32_t even = target + (lane % 8 ^ quarter) * kChunkBytes;
    uint32_t odd = target + 4 * kGemmTileK + (lane % 8 ^ (quarter + 4)) * kChunkBytes;
    const uint32_t last = even + (turns.tile.tokens.row_count - 1) / 16 * kFourBytes;
    const uint8_t* g_source =
        ptx::kept_address(inputs.activations + turns.k_step * kGemmTileK + lane % 8 * kChunkBytes);
    const auto* s_offsets = reinterpret_cast<const uint4*>(turns.s_storage.row_offsets.lists[turns.list][quarter]);
    for (; even <= last; even += kFourBytes, odd += kFourBytes, ++s_offsets) {
      const uint4 offsets = *s_offsets;
      ptx::cp_async(even, g_source + offsets.x);
      ptx::cp_async(odd, g_source + offsets.y);
      ptx::cp_async(even + kFourBytes / 2, g_source + offsets.z);
      ptx::cp_async(odd + kFourBytes / 2, g_source + offsets.w);
    }
  }

  __device__ __forceinline__ void load_stage() {
    turns.wait_until_released();
    if (threadIdx.x % 32 == 0) turns.load_weights();
    gather_rows();
    ptx::cp_async_mbarrier_arrive(turns.s_storage.stage_arrived[turns.ring.stage]);
    prepare_next_tile();
    __syncwarp();
    turns.advance();
  }
};

}
