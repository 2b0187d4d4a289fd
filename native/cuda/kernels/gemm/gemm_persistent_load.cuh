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
  static constexpr int kLoadThreads = kThreads;
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

template <class Shape>
struct PersistentStorage {
  alignas(1024) uint8_t weights[Shape::kStages][kGemmTileBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][kPersistentTokens * kGemmTileK];
  [[no_unique_address]] TileValues<Shape::kHasValues> values;
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
struct LoadCursor {
  static constexpr int kAhead = Shape::kStages - 2;

  PersistentStorage<Shape>& s_storage;
  const Scheduler& scheduler;
  int num_steps;
  int num_tiles = scheduler.num_tiles();
  int index = static_cast<int>(blockIdx.x);
  int k_step = 0;
  PipelineState<Shape::kStages> ring;

  __device__ __forceinline__ bool has_stage() const { return index < num_tiles; }

  __device__ __forceinline__ GemmTile tile_after(int distance) const {
    return scheduler.tile(min(index + distance * static_cast<int>(gridDim.x), num_tiles - 1), num_tiles);
  }

  __device__ __forceinline__ void wait_until_released() const {
    ptx::mbarrier_wait_suspended(s_storage.stage_released[ring.stage], ring.phase ^ 1U);
  }

  __device__ __forceinline__ bool advance_to_next_tile() {
    ring.advance();
    if (++k_step < num_steps) return false;
    k_step = 0;
    index += static_cast<int>(gridDim.x);
    return true;
  }
};

template <class Shape, class Scheduler, bool kIsGathered = Shape::Tokens::kIsGathered>
struct StageLoader;

template <class Shape, class Scheduler>
struct StageLoader<Shape, Scheduler, false> {
  using Cursor = LoadCursor<Shape, Scheduler>;

  const CUtensorMap& map;
  Cursor cursor;
  PersistentWeights<Shape> weights;
  GemmTile tile;
  int num_early;

  __device__ __forceinline__ StageLoader(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                         const TensorTokens& tokens, const Scheduler& scheduler)
      : map(tokens.map),
        cursor{s_storage, scheduler, inputs.split_steps * inputs.num_splits},
        weights{inputs.weights, cursor.num_steps, static_cast<uint32_t>(scheduler.max_tokens * kGemmTileK)},
        tile(cursor.tile_after(0)),
        num_early(min(cursor.num_steps, Cursor::kAhead)) {
    for (int k_step = 0; threadIdx.x == 0 && k_step < num_early; ++k_step) {
      weights.load(s_storage, tile.row_tile, k_step, k_step);
    }
    ptx::griddepcontrol_wait();
  }

  __device__ __forceinline__ void load_next() {
    if (threadIdx.x == 0 && cursor.has_stage()) {
      const int stage = cursor.ring.stage;
      cursor.wait_until_released();
      if (num_early <= 0) weights.load(cursor.s_storage, tile.row_tile, cursor.k_step, stage);
      --num_early;
      ptx::cp_async_bulk_tensor_load(cursor.s_storage.tokens[stage], map, cursor.k_step * kGemmTileK,
                                     tile.tokens.row_first, cursor.s_storage.stage_arrived[stage], ptx::kEvictNormal);
      if (cursor.advance_to_next_tile()) tile = cursor.tile_after(0);
    }
    __syncwarp();
  }
};

template <class Shape, class Scheduler>
struct StageLoader<Shape, Scheduler, true> {
  using Cursor = LoadCursor<Shape, Scheduler>;

  const GemmInputs& inputs;
  Cursor cursor;
  PersistentWeights<Shape> weights;
  int64_t weight_tile;
  RowPasses<Shape> next_rows;
  RowGather<Shape> gather;
  GemmTile next_tile;

  __device__ __forceinline__ StageLoader(PersistentStorage<Shape>& s_storage, const GemmInputs& call_inputs,
                                         const GatheredTokens&, const Scheduler& scheduler)
      : inputs(call_inputs),
        cursor{s_storage, scheduler, inputs.split_steps * inputs.num_splits},
        weights{inputs.weights, cursor.num_steps, 0},
        weight_tile(scheduler.weight_tile(cursor.tile_after(0))),
        next_rows(inputs, cursor.tile_after(0).tokens),
        gather(inputs, next_rows),
        next_tile(cursor.tile_after(1)) {}

  __device__ __forceinline__ void load_next() {
    if (!cursor.has_stage()) return;
    const int stage = cursor.ring.stage;
    cursor.wait_until_released();
    if (threadIdx.x == 0) weights.load(cursor.s_storage, weight_tile, cursor.k_step, stage);
    gather.load(cursor.s_storage.tokens[stage], cursor.k_step);
    ptx::cp_async_mbarrier_arrive(cursor.s_storage.stage_arrived[stage]);
    if (cursor.k_step == 0) next_rows.find(inputs, next_tile.tokens);
    if (cursor.advance_to_next_tile()) {
      weight_tile = cursor.scheduler.weight_tile(next_tile);
      gather = RowGather<Shape>(inputs, next_rows);
      next_tile = cursor.tile_after(1);
    }
    __syncwarp();
  }
};

}
