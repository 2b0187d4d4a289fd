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
    const int last = num_tiles / num_row_tiles - 1;
    const int place = last - index / num_row_tiles;
    return {even_tile(load(place), load(max(place - 1, 0)), load(min(place + 1, last))), index % num_row_tiles};
  }

  __device__ __forceinline__ int64_t weight_tile(const GemmTile& tile) const {
    return int64_t{tile.tokens.expert} * num_row_tiles + tile.row_tile;
  }

 private:
  __device__ __forceinline__ TokenTile load(int place) const {
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(token_tiles) + place);
    return {tile.x, tile.y, tile.z, tile.w};
  }

  static __device__ __forceinline__ int first_share(int count) { return ((count + 1) / 2 + 7) / 8 * 8; }

  static __device__ __forceinline__ TokenTile even_tile(TokenTile tile, const TokenTile& before,
                                                        const TokenTile& after) {
    const int last = tile.row_first + tile.row_count;
    if (before.expert == tile.expert && before.row_first < tile.row_first && tile.row_count < kPersistentTokens) {
      tile.row_first = before.row_first + first_share(last - before.row_first);
      tile.row_count = last - tile.row_first;
    } else if (after.expert == tile.expert && after.row_first > tile.row_first && after.row_count < kPersistentTokens) {
      tile.row_count = first_share(tile.row_count + after.row_count);
    }
    return tile;
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

template <class Tile, class Epilogue>
struct TokenScales {
  static constexpr int kParts = (Tile::kGroups + 3) / 4;

  float r_scales[kParts];

  __device__ __forceinline__ TokenScales(const Epilogue& epilogue, const GemmTile& tile) {
    const int first = Tile::group_first() * kFragmentTokens + static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int part = 0; part < kParts; ++part) r_scales[part] = epilogue.token_scale(tile, first + part * 32);
  }

  __device__ __forceinline__ float2 of_group(int group) const {
    const int lane = group % 4 * kFragmentTokens + threadIdx.x % 4 * 2;
    return {__shfl_sync(~0U, r_scales[group / 4], lane), __shfl_sync(~0U, r_scales[group / 4], lane + 1)};
  }
};

template <class Tile, class Epilogue>
struct RowsMetadata {
  typename Epilogue::RowMetadata of_fragment[Tile::kFragments];

  __device__ __forceinline__ RowsMetadata(const Epilogue& epilogue, const GemmTile& tile) {
#pragma unroll
    for (int fragment = 0; fragment < Tile::kFragments; ++fragment) {
      of_fragment[fragment] = epilogue.row_metadata(tile, Tile::fragment_first() + fragment);
    }
  }
};

template <class Shape>
__device__ __forceinline__ bool is_storing_thread() {
  return threadIdx.x % Shape::kTeamThreads == 0;
}

template <class Shape>
__device__ __forceinline__ void sync_team() {
  ptx::bar_sync(2 + Shape::team(), Shape::kTeamThreads);
}

template <class Shape>
__device__ __forceinline__ void wait_until_boxes_are_stored() {
  if (is_storing_thread<Shape>()) ptx::cp_async_bulk_wait_group_read();
  sync_team<Shape>();
}

template <class Shape, class Tile, class Epilogue>
__device__ __forceinline__ void stage_values(PersistentStorage<Shape>& s_storage, const Epilogue& epilogue,
                                             const float (&r_total)[Tile::kRegisters],
                                             const RowsMetadata<Tile, Epilogue>& rows,
                                             const TokenScales<Tile, Epilogue>& scales) {
  const int lane = threadIdx.x % 32;
  const int token = lane % 4 * 2;
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group) {
    const float2 pair = scales.of_group(group);
#pragma unroll
    for (int fragment = 0; fragment < Tile::kFragments; ++fragment) {
      const uint32_t place = Tile::fragment_first() + fragment;
      float* s_group = s_storage.values.boxes[place / 2] +
                       (Tile::group_first() + group) * kFragmentTokens * kStagedRows + lane / 4 % 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = static_cast<int>(place % 2) * 4 + half * 2 + lane / 16;
        const float* r_sums = r_total + (fragment * Tile::kGroups + group) * 4 + half * 2;
        const auto& metadata = rows.of_fragment[fragment];
        s_group[token * kStagedRows + (chunk ^ token) * 4] = epilogue.value(r_sums[0], pair.x, metadata, half);
        s_group[(token + 1) * kStagedRows + (chunk ^ (token + 1)) * 4] =
            epilogue.value(r_sums[1], pair.y, metadata, half);
      }
    }
  }
}

template <class Shape, class Tile, class Epilogue>
__device__ __forceinline__ void store_staged(PersistentStorage<Shape>& s_storage, const Epilogue& epilogue,
                                             const GemmTile& tile, const float (&r_total)[Tile::kRegisters],
                                             const RowsMetadata<Tile, Epilogue>& rows,
                                             const TokenScales<Tile, Epilogue>& scales) {
  wait_until_boxes_are_stored<Shape>();
  stage_values<Shape, Tile>(s_storage, epilogue, r_total, rows, scales);
  ptx::fence_proxy_async();
  sync_team<Shape>();
  if (is_storing_thread<Shape>()) {
    const int first = Shape::team() * Shape::kTeamBoxes;
    const int row = tile.row_tile * kGemmTileRows + first * kStagedRows;
#pragma unroll
    for (int box = 0; box < Shape::kTeamBoxes; ++box) {
      ptx::cp_async_bulk_tensor_store(epilogue.out_map, s_storage.values.boxes[first + box], row + box * kStagedRows,
                                      tile.tokens.row_first);
    }
    ptx::cp_async_bulk_commit_group();
  }
}

template <class Tile, class Epilogue>
__device__ __forceinline__ void store_direct(const Epilogue& epilogue, const GemmTile& tile,
                                             const float (&r_total)[Tile::kRegisters],
                                             const RowsMetadata<Tile, Epilogue>& rows,
                                             const TokenScales<Tile, Epilogue>& scales) {
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group) {
    const int column = (Tile::group_first() + group) * kFragmentTokens + threadIdx.x % 4 * 2;
    const float2 pair = scales.of_group(group);
#pragma unroll
    for (int fragment = 0; fragment < Tile::kFragments; ++fragment) {
      epilogue.store_group(tile, Tile::fragment_first() + fragment, column,
                           r_total + (fragment * Tile::kGroups + group) * 4, rows.of_fragment[fragment], pair);
    }
  }
}

struct NoLoader {};

template <class Shape, int kTokens, Multiply kMultiply = Shape::kMultiply>
struct PersistentMultiply;

template <class Shape, int kTokens>
struct PersistentMultiply<Shape, kTokens, Multiply::kWgmma> {
  using Tile = ThreadTile<Shape, kTokens>;
  using Step = StepMultiply<Multiply::kWgmma, Shape::kElement, kTokens>;

  PersistentStorage<Shape>& s_storage;
  PipelineState<Shape::kStages>& ring;

  __device__ __forceinline__ void add_split(float (&r_split)[Tile::kRegisters], int num_steps) const {
    clear_registers(r_split);
    for (int k_step = 0; k_step < num_steps; ++k_step) {
      float r_stage[Tile::kRegisters];
      ptx::mbarrier_wait_suspended(s_storage.stage_arrived[ring.stage], ring.phase);
      Step::start(r_stage, s_storage.weights[ring.stage] + Shape::team() * kWarpgroupBytes,
                  s_storage.tokens[ring.stage]);
      Step::template wait<0>(r_stage);
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_storage.stage_released[ring.stage]);
      ring.advance();
      add_registers(r_split, r_stage);
    }
  }

  __device__ __forceinline__ void sum_splits(float (&r_total)[Tile::kRegisters], const GemmInputs& inputs,
                                             NoLoader&) const {
    add_split(r_total, inputs.split_steps);
    for (int split = 1; split < inputs.num_splits; ++split) {
      float r_split[Tile::kRegisters];
      add_split(r_split, inputs.split_steps);
      add_registers(r_total, r_split);
    }
  }
};

template <class Shape, int kTokens>
struct PersistentMultiply<Shape, kTokens, Multiply::kMmaSync> {
  using Tile = ThreadTile<Shape, kTokens>;
  using Pair = MmaChunkPair<Shape::kElement, Tile::kFragments, Tile::kGroups>;
  static constexpr int kPairBytes = 2 * kChunkBytes;
  static constexpr int kPairs = kGemmTileK / kPairBytes;
  static constexpr int kChunkStride = kWarpgroupBytes / (kGemmTileK / kChunkBytes);
  static_assert(kPairs % 2 == 0, "the first pair of the next stage takes the registers of an even pair");

  PersistentStorage<Shape>& s_storage;
  PipelineState<Shape::kStages>& ring;
  Pair r_pairs[2];

  __device__ __forceinline__ PersistentMultiply(PersistentStorage<Shape>& storage, PipelineState<Shape::kStages>& state)
      : s_storage(storage), ring(state) {}

  __device__ __forceinline__ void load_pair(int pair) {
    const int row = Tile::fragment_first() * kFragmentRows;
    const int token = Tile::group_first() * kFragmentTokens;
    const uint32_t rows = ptx::shared_address(s_storage.weights[ring.stage]) + row / 64 * kWarpgroupBytes +
                          row % 64 / 8 * kCoreMatrixBytes + pair * 2 * kChunkStride;
    const uint32_t tokens = ptx::shared_address(s_storage.tokens[ring.stage]) + token * kGemmTileK;
    r_pairs[pair % 2].load(MmaOperands<Shape::kElement>::lane_of_rows(rows, kChunkStride),
                           Pair::lane_of_tokens(tokens) ^ pair * kPairBytes);
  }

  __device__ __forceinline__ void begin_stage() {
    ptx::mbarrier_wait_suspended(s_storage.stage_arrived[ring.stage], ring.phase);
    load_pair(0);
  }

  template <class Loader>
  __device__ __forceinline__ void end_stage(Loader& loader, bool has_next) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_storage.stage_released[ring.stage]);
    ring.advance();
    if (has_next) begin_stage();
    loader.load_next();
  }

  template <class Loader>
  __device__ __forceinline__ void add_stage(float (&r_split)[Tile::kRegisters], Loader& loader, bool has_next) {
    float r_stage[Tile::kRegisters];
    clear_registers(r_stage);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair + 1 < kPairs) load_pair(pair + 1);
#pragma unroll
      for (int step = 0; step < Pair::kSteps; ++step) {
        if (pair + 1 == kPairs && step + 1 == Pair::kSteps) end_stage(loader, has_next);
        r_pairs[pair % 2].add_step(r_stage, step);
      }
    }
    add_registers(r_split, r_stage);
  }

  __device__ __forceinline__ float4* shared_totals() const {
    return reinterpret_cast<float4*>(s_storage.values.boxes[Shape::team()]) + threadIdx.x % Shape::kTeamThreads;
  }

  __device__ __forceinline__ void keep_total(const float (&r_total)[Tile::kRegisters]) const {
    float4* s_totals = shared_totals();
#pragma unroll
    for (int index = 0; index < Tile::kRegisters; index += 4) {
      s_totals[index / 4 * Shape::kTeamThreads] = {r_total[index], r_total[index + 1], r_total[index + 2],
                                                   r_total[index + 3]};
    }
  }

  __device__ __forceinline__ void add_kept_total(float (&r_split)[Tile::kRegisters]) const {
    const float4* s_totals = shared_totals();
#pragma unroll
    for (int index = 0; index < Tile::kRegisters; index += 4) {
      const float4 total = s_totals[index / 4 * Shape::kTeamThreads];
      r_split[index] = __fadd_rn(total.x, r_split[index]);
      r_split[index + 1] = __fadd_rn(total.y, r_split[index + 1]);
      r_split[index + 2] = __fadd_rn(total.z, r_split[index + 2]);
      r_split[index + 3] = __fadd_rn(total.w, r_split[index + 3]);
    }
  }

  template <class Loader>
  __device__ __forceinline__ void sum_splits(float (&r_total)[Tile::kRegisters], const GemmInputs& inputs,
                                             Loader& loader) {
    int num_left = inputs.split_steps * inputs.num_splits;
    begin_stage();
    for (int split = 0;; ++split) {
      clear_registers(r_total);
      for (int k_step = 0; k_step < inputs.split_steps; ++k_step) add_stage(r_total, loader, --num_left > 0);
      if (split > 0) add_kept_total(r_total);
      if (num_left == 0) return;
      if (Shape::kIsStaged && split == 0) wait_until_boxes_are_stored<Shape>();
      keep_total(r_total);
    }
  }
};

template <class Shape, int kTokens, class Loader, class Epilogue>
__device__ __forceinline__ void multiply_persistent_tile(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                                         const Epilogue& epilogue, const GemmTile& tile,
                                                         PipelineState<Shape::kStages>& ring, Loader& loader) {
  using Tile = ThreadTile<Shape, kTokens>;
  const TokenScales<Tile, Epilogue> scales(epilogue, tile);
  float r_total[Tile::kRegisters];
  PersistentMultiply<Shape, kTokens>{s_storage, ring}.sum_splits(r_total, inputs, loader);
  const RowsMetadata<Tile, Epilogue> rows(epilogue, tile);
  if constexpr (Shape::kIsStaged) {
    store_staged<Shape, Tile>(s_storage, epilogue, tile, r_total, rows, scales);
  } else {
    store_direct<Tile>(epilogue, tile, r_total, rows, scales);
  }
}

template <class Shape, class Scheduler, class Epilogue, class Loader>
__device__ __forceinline__ void multiply_persistent_tiles(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                                          const Scheduler& scheduler, const Epilogue& epilogue,
                                                          Loader& loader) {
  const int num_tiles = scheduler.num_tiles();
  if (blockIdx.x >= num_tiles) return;
  PipelineState<Shape::kStages> ring;
  GemmTile next_tile = scheduler.tile(blockIdx.x, num_tiles);
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const GemmTile tile = next_tile;
    next_tile = scheduler.tile(min(index + static_cast<int>(gridDim.x), num_tiles - 1), num_tiles);
    const int count = tile.tokens.row_count;
    if (count > 112) {
      multiply_persistent_tile<Shape, 128>(s_storage, inputs, epilogue, tile, ring, loader);
    } else if (count > 96) {
      multiply_persistent_tile<Shape, 112>(s_storage, inputs, epilogue, tile, ring, loader);
    } else if (count > 64) {
      multiply_persistent_tile<Shape, 96>(s_storage, inputs, epilogue, tile, ring, loader);
    } else if (count > 32) {
      multiply_persistent_tile<Shape, 64>(s_storage, inputs, epilogue, tile, ring, loader);
    } else {
      multiply_persistent_tile<Shape, 32>(s_storage, inputs, epilogue, tile, ring, loader);
    }
  }
  if constexpr (Shape::kIsStaged) ptx::cp_async_bulk_wait_group();
}

template <class Shape, class Scheduler, class Epilogue>
__device__ __forceinline__ void play_roles(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                           const typename Shape::Tokens& tokens, const Scheduler& scheduler,
                                           const Epilogue& epilogue) {
  if (!Scheduler::kIsKnownEarly || threadIdx.x >= Shape::kLoadThreads) ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < Shape::kLoadThreads) {
    ptx::setmaxnreg_dec<Shape::Tokens::kLoadRegisters>();
    if constexpr (Shape::Tokens::kIsGathered) {
      gather_tiles(s_storage, inputs, scheduler);
    } else if (threadIdx.x == 0) {
      load_boxes(s_storage, inputs, tokens, scheduler);
    }
  } else {
    ptx::setmaxnreg_inc<Shape::Tokens::kMultiplyRegisters>();
    NoLoader loader;
    multiply_persistent_tiles(s_storage, inputs, scheduler, epilogue, loader);
  }
}

template <class Shape, class Scheduler, class Epilogue>
__device__ __forceinline__ void load_and_multiply(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                                  const typename Shape::Tokens& tokens, const Scheduler& scheduler,
                                                  const Epilogue& epilogue) {
  if (!Scheduler::kIsKnownEarly) ptx::griddepcontrol_wait();
  if (blockIdx.x >= scheduler.num_tiles()) return;
  StageLoader<Shape, Scheduler> loader(s_storage, inputs, tokens, scheduler);
  ptx::griddepcontrol_launch_dependents();
  for (int stage = 0; stage < loader.cursor.kAhead; ++stage) loader.load_next();
  multiply_persistent_tiles(s_storage, inputs, scheduler, epilogue, loader);
}

template <class Shape, class Scheduler, class Epilogue>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    gemm_persistent_kernel(const __grid_constant__ GemmInputs inputs,
                           const __grid_constant__ typename Shape::Tokens tokens,
                           const __grid_constant__ Scheduler scheduler, const __grid_constant__ Epilogue epilogue) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_storage = *reinterpret_cast<PersistentStorage<Shape>*>(s_bytes);
  prepare(s_storage);
  if constexpr (Shape::kMultiply == Multiply::kWgmma) {
    play_roles(s_storage, inputs, tokens, scheduler, epilogue);
  } else {
    load_and_multiply(s_storage, inputs, tokens, scheduler, epilogue);
  }
}

template <class Shape, class Scheduler, class Epilogue>
void launch_gemm_persistent(const GemmInputs& inputs, const typename Shape::Tokens& tokens, const Scheduler& scheduler,
                            const Epilogue& epilogue, int64_t max_tiles, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PersistentStorage<Shape>);
  static_assert(kBytes <= kSharedLimitBytes, "the shared storage is larger than one thread block may have");
  const auto kernel = gemm_persistent_kernel<Shape, Scheduler, Epilogue>;
  static PerDevice thread_blocks;
  const int most = thread_blocks.get([kernel] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return device_multiprocessors();
  });
  launch_dependent(kernel, {static_cast<unsigned>(max_tiles < most ? max_tiles : most), Shape::kThreads, kBytes},
                   stream, inputs, tokens, scheduler, epilogue);
}

}
