#pragma once

#include "cuda/kernels/moe/packed_tiles.cuh"

namespace glint::cuda {

constexpr int kMostDownStages = 12;

template <Multiply kMultiplyValue, class TileType, int kMaxTokensValue, int kBlockTokensValue, bool kIsStreamedValue,
          bool kIsOneStep>
struct DownShape {
  using Tile = TileType;
  static constexpr Multiply kMultiply = kMultiplyValue;
  static constexpr int kMaxTokens = kMaxTokensValue;
  static constexpr int kBlockTokens = kBlockTokensValue;
  static constexpr bool kIsStreamed = kIsStreamedValue;
  static constexpr int kRings = 4;
  static constexpr int kConsumerThreads = kRings * 128;
  static constexpr int kThreads = 128 + kConsumerThreads;
  static constexpr int kPackedTileBytes = PackedTileShape{kMaxTokens, Tile::kK}.bytes();
  static constexpr int kSumStride = Tile::kRows % 32 == 0 ? Tile::kRows + 8 : Tile::kRows;
  static constexpr int kSumFloats = kBlockTokens * kSumStride;
  static constexpr int kScaleBytes = Tile::kRows * 4;
  static constexpr int kStageBytes = Tile::kBytes + kPackedTileBytes + kScaleBytes + 16;
  static constexpr int kFittingBytes = kSharedLimitBytes - kSharedReserveBytes - kSumFloats * 4;
  static constexpr int kFittingStages = kFittingBytes / kStageBytes;
  static constexpr int kRingStages = (kFittingStages < kMostDownStages ? kFittingStages : kMostDownStages) / kRings;
  static constexpr int kStages = kRingStages * kRings;
  static_assert(kRingStages >= 2, "a ring needs two stages");

  using Tiles = CoreMatrixTiles<kMaxTokens, kSumStride>;
  static constexpr int kVectors = kIsOneStep ? kNarrowVectors<Tile> : kWideVectors;

  static __device__ __forceinline__ int width(const DownInputs& inputs) {
    return kIsOneStep && !Tile::kIsPadded ? Tile::kK : inputs.width;
  }
  static __device__ __forceinline__ int packed_width(const DownInputs& inputs) {
    return kIsOneStep ? Tile::kK : inputs.packed_width;
  }
  static __device__ __forceinline__ int num_steps(const DownInputs& inputs) { return packed_width(inputs) / Tile::kK; }
};

template <class Shape>
struct DownStorage {
  alignas(128) uint8_t weights[Shape::kStages][Shape::Tile::kBytes];
  alignas(16) uint8_t packed_tiles[Shape::kStages][Shape::kPackedTileBytes];
  alignas(16) float sums[Shape::kSumFloats];
  alignas(16) float row_scales[Shape::kStages][Shape::Tile::kRows];
  alignas(8) uint64_t stage_arrived[Shape::kStages];
  alignas(8) uint64_t stage_released[Shape::kStages];
};

template <class Shape>
__device__ __forceinline__ void init_ring(DownStorage<Shape>& s_storage, int ring) {
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int stage = 0; stage < Shape::kRingStages; ++stage) {
    ptx::mbarrier_init(s_storage.stage_arrived[ring * Shape::kRingStages + stage], 2);
    ptx::mbarrier_init(s_storage.stage_released[ring * Shape::kRingStages + stage], 4);
  }
  ptx::fence_mbarrier_init();
}

template <class Shape>
__device__ __forceinline__ void clear_sums(DownStorage<Shape>& s_storage, int thread, int num_threads) {
  for (int index = thread; index < Shape::kSumFloats; index += num_threads) s_storage.sums[index] = 0.0F;
}

template <class Shape>
__device__ __forceinline__ void prepare_down(DownStorage<Shape>& s_storage) {
  if (threadIdx.x < 128) init_ring(s_storage, threadIdx.x / 32);
  clear_sums(s_storage, threadIdx.x, Shape::kThreads);
  __syncthreads();
}

template <class Shape>
class DownStream {
 public:
  using Tile = typename Shape::Tile;

  __device__ __forceinline__ DownStream(const DownInputs& inputs, int num_tiles)
      : inputs_(inputs), rows_{inputs.grouped}, num_tiles_(num_tiles), lane_(ptx::tid_x() % 32) {
    ring_first_ = ptx::tid_x() / 32 * Shape::kRingStages;
    static_assert(Shape::kStages + Shape::kRings <= 32, "a ring is first filled from the tiles that now_ holds");
    static_assert(kTilesLoadedAtOnce == 64, "now_ and next_ hold 32 tiles each");
    now_ = rows_.tile(lane_);
    next_ = rows_.tile(32 + lane_);
  }

  __device__ __forceinline__ void rewind() {
    index_ = ptx::tid_x() / 32;
    k_step_ = 0;
    place_ = {};
    read_tile();
  }

  __device__ __forceinline__ bool is_done() const { return index_ >= num_tiles_; }
  __device__ __forceinline__ bool is_first_round() const { return !is_done() && place_.phase == 0; }

  __device__ __forceinline__ void wait_until_released(DownStorage<Shape>& s_storage) const {
    ptx::mbarrier_wait_suspended(s_storage.stage_released[stage()], place_.phase ^ 1U);
  }

  __device__ __forceinline__ void load_weights(DownStorage<Shape>& s_storage) const {
    if (lane_ != 0) return;
    uint64_t& arrived = s_storage.stage_arrived[stage()];
    const bool has_scales = k_step_ == 0;
    const int64_t owner = int64_t{expert_} * inputs_.num_owners + blockIdx.x;
    ptx::mbarrier_arrive_expect_tx(arrived, Tile::kBytes + (has_scales ? Shape::kScaleBytes : 0));
    const int64_t tile = owner * Shape::num_steps(inputs_) + k_step_;
    ptx::cp_async_bulk(s_storage.weights[stage()], inputs_.weights + tile * Tile::kBytes, Tile::kBytes, arrived,
                       ptx::kEvictFirst);
    if (!has_scales) return;
    ptx::cp_async_bulk(s_storage.row_scales[stage()], inputs_.row_scales + owner * Tile::kRows, Shape::kScaleBytes,
                       arrived, ptx::kEvictNormal);
  }

  __device__ __forceinline__ void load_packed_tile(DownStorage<Shape>& s_storage) const {
    if (lane_ != 0) return;
    uint64_t& arrived = s_storage.stage_arrived[stage()];
    const int values_offset = Shape::Tiles::values_offset(count_);
    const int fp8_bytes = count_ * Tile::kK;
    const int target = k_step_ == 0 ? 0 : values_offset;
    const int source = k_step_ == 0 ? 0 : values_offset + k_step_ * fp8_bytes;
    const int bytes = values_offset + fp8_bytes - target;
    const uint8_t* g_packed =
        inputs_.packed_tiles + index_ * PackedTileShape{Shape::kMaxTokens, Shape::packed_width(inputs_)}.bytes();
    ptx::mbarrier_arrive_expect_tx(arrived, bytes);
    ptx::cp_async_bulk(s_storage.packed_tiles[stage()] + target, g_packed + source, bytes, arrived, ptx::kEvictNormal);
  }

  __device__ __forceinline__ void wait_until_packed() {
    const uint32_t* g_rows_packed = inputs_.grouped.rows_packed + min(chunk_first_ + lane_, num_tiles_ - 1);
    while ((packed_ >> (index_ % 32) & 1U) == 0U) {
      const bool is_packed = ptx::ld_acquire_gpu(g_rows_packed) == static_cast<uint32_t>(now_.row_count);
      packed_ = __ballot_sync(~0U, is_packed);
      __syncwarp();
    }
    ptx::fence_proxy_async_global();
  }

  __device__ __forceinline__ void advance() {
    place_.advance();
    if (++k_step_ < Shape::num_steps(inputs_)) return;
    k_step_ = 0;
    index_ += Shape::kRings;
    if (!is_done()) find_tile();
  }

 private:
  __device__ __forceinline__ int stage() const { return ring_first_ + place_.stage; }

  __device__ __forceinline__ void find_tile() {
    if (index_ >= chunk_first_ + 32) {
      chunk_first_ += 32;
      packed_ = 0;
      now_ = next_;
      next_ = rows_.tile(min(chunk_first_ + 32 + lane_, num_tiles_ - 1));
    }
    read_tile();
  }

  __device__ __forceinline__ void read_tile() {
    const int place = index_ % 32;
    expert_ = __shfl_sync(~0U, now_.expert, place);
    count_ = __shfl_sync(~0U, now_.row_count, place);
  }

  const DownInputs& inputs_;
  ListedRows rows_;
  int num_tiles_;
  int lane_;
  int index_;
  int ring_first_;
  int k_step_ = 0;
  int expert_ = 0;
  int count_ = 0;
  uint32_t packed_ = 0;
  PipelineState<Shape::kRingStages> place_;
  int chunk_first_ = 0;
  TokenTile now_ = {};
  TokenTile next_ = {};
};

constexpr int kPackedBarrier = 9;

template <class Shape>
__device__ __forceinline__ void load_listed_tiles(DownStorage<Shape>& s_storage, const DownInputs& inputs,
                                                  int num_tiles) {
  if (num_tiles == 0) {
    ptx::bar_arrive(kPackedBarrier, Shape::kThreads);
    return;
  }
  DownStream<Shape> stream(inputs, num_tiles);
  stream.rewind();
  for (; stream.is_first_round(); stream.advance()) stream.load_weights(s_storage);
  ptx::griddepcontrol_wait();
  const BlockArrivals arrivals(inputs.arrivals);
  ptx::bar_sync(kPackedBarrier, Shape::kThreads);
  arrivals.announce_and_wait<128>();
  ptx::fence_proxy_async_global();
  stream.rewind();
  for (; stream.is_first_round(); stream.advance()) stream.load_packed_tile(s_storage);
  for (; !stream.is_done(); stream.advance()) {
    stream.wait_until_released(s_storage);
    stream.load_weights(s_storage);
    stream.load_packed_tile(s_storage);
  }
}

template <class Shape>
__device__ __forceinline__ void load_streamed_tiles(DownStorage<Shape>& s_storage, const DownInputs& inputs,
                                                    int num_tiles) {
  DownStream<Shape> stream(inputs, num_tiles);
  init_ring(s_storage, threadIdx.x / 32);
  __syncwarp();
  ptx::bar_arrive(kPackedBarrier, Shape::kThreads);
  stream.rewind();
  for (; stream.is_first_round(); stream.advance()) stream.load_weights(s_storage);
  stream.rewind();
  for (; stream.is_first_round(); stream.advance()) {
    stream.wait_until_packed();
    stream.load_packed_tile(s_storage);
  }
  for (; !stream.is_done(); stream.advance()) {
    stream.wait_until_released(s_storage);
    stream.load_weights(s_storage);
    stream.wait_until_packed();
    stream.load_packed_tile(s_storage);
  }
}

template <class Shape, int kTokens>
__device__ __forceinline__ void multiply_down_stage(float (&r_sum)[kTokens / 2], DownStorage<Shape>& s_storage,
                                                    int stage, int count) {
  using Tile = typename Shape::Tile;
  const uint8_t* s_tokens = s_storage.packed_tiles[stage] + Shape::Tiles::values_offset(count);
  TileMultiply<Shape::kMultiply, kTokens, Tile::kRows, Tile::kK>::add(r_sum, s_storage.weights[stage], s_tokens, count);
}

template <class Shape, int kTokens>
struct WeightedSums {
  static constexpr int kColumns = kTokens / 4;
  static constexpr int kRows = Shape::Tile::kRows;

  int row_first;
  float r_row_scales[2];
  float r_scales[kColumns];
  float r_weights[kColumns];
  int r_places[kColumns];

  __device__ __forceinline__ WeightedSums(DownStorage<Shape>& s_storage, int stage, int count, int thread) {
    const TokenMetadata* s_metadata = Shape::Tiles::metadata(s_storage.packed_tiles[stage]);
    row_first = thread % 128 / 32 * kFragmentRows + thread % 32 / 4;
    r_row_scales[0] = row_first < kRows ? s_storage.row_scales[stage][row_first] : 0.0F;
    r_row_scales[1] = row_first + 8 < kRows ? s_storage.row_scales[stage][row_first + 8] : 0.0F;
#pragma unroll
    for (int item = 0; item < kColumns; ++item) {
      const int column = item / 2 * kFragmentTokens + thread % 4 * 2 + item % 2;
      const TokenMetadata metadata = s_metadata[column];
      r_scales[item] = metadata.scale;
      r_weights[item] = metadata.weight;
      r_places[item] = column < count ? metadata.place + row_first : -1;
    }
  }

  __device__ __forceinline__ bool is_stored(int item, int half) const {
    return r_places[item] >= 0 && row_first + half * 8 < kRows;
  }

  __device__ __forceinline__ void add_to(float* s_sums, float (&r_sum)[kTokens / 2]) const {
    if (row_first - row_first % kFragmentRows >= kRows) return;
    float r_old[kTokens / 2];
#pragma unroll
    for (int index = 0; index < kTokens / 2; ++index) {
      const int item = index / 4 * 2 + index % 2;
      const int half = index / 2 % 2;
      r_old[index] = is_stored(item, half) ? s_sums[r_places[item] + half * 8] : 0.0F;
    }
#pragma unroll
    for (int index = 0; index < kTokens / 2; ++index) {
      const int item = index / 4 * 2 + index % 2;
      const int half = index / 2 % 2;
      const float value = __fmul_rn(__fmul_rn(r_sum[index], r_scales[item]), r_row_scales[half]);
      if (is_stored(item, half)) s_sums[r_places[item] + half * 8] = __fmaf_rn(r_weights[item], value, r_old[index]);
    }
  }
};

struct DownTurn {
  int thread;
  int warpgroup;
  int ring_first;
  int num_steps;
};

template <class Shape, int kTokens>
__device__ __forceinline__ void multiply_down_tile(DownStorage<Shape>& s_storage,
                                                   PipelineState<Shape::kRingStages>& ring, const DownTurn& turn,
                                                   int count) {
  constexpr int kTurnOfFirst = 1;
  constexpr int kTurnThreads = 256;
  const WeightedSums<Shape, kTokens> weighted(s_storage, turn.ring_first + ring.stage, count, turn.thread);
  float r_sum[kTokens / 2];
#pragma unroll
  for (int index = 0; index < kTokens / 2; ++index) r_sum[index] = 0.0F;
#pragma unroll 1
  for (int k_step = 0; k_step < turn.num_steps; ++k_step) {
    const int stage = turn.ring_first + ring.stage;
    if (k_step > 0) ptx::mbarrier_wait_suspended(s_storage.stage_arrived[stage], ring.phase);
    multiply_down_stage<Shape, kTokens>(r_sum, s_storage, stage, count);
    if (turn.thread % 32 == 0) ptx::mbarrier_arrive(s_storage.stage_released[stage]);
    ring.advance();
  }
  ptx::bar_sync(kTurnOfFirst + turn.warpgroup, kTurnThreads);
  weighted.add_to(s_storage.sums, r_sum);
  ptx::bar_arrive(kTurnOfFirst + (turn.warpgroup + 1) % Shape::kRings, kTurnThreads);
}

template <class Shape>
__device__ __forceinline__ void multiply_any_tile(DownStorage<Shape>& s_storage,
                                                  PipelineState<Shape::kRingStages>& ring, const DownTurn& turn,
                                                  int count) {
  if (Shape::kMaxTokens <= 8 || count <= 8) {
    multiply_down_tile<Shape, 8>(s_storage, ring, turn, count);
  } else if (Shape::kMaxTokens <= 16 || count <= 16) {
    multiply_down_tile < Shape, Shape::kMaxTokens<16 ? 8 : 16>(s_storage, ring, turn, count);
  } else {
    multiply_down_tile < Shape, Shape::kMaxTokens<32 ? 8 : 32>(s_storage, ring, turn, count);
  }
}

template <class Shape>
__device__ __forceinline__ void store_sums(const DownStorage<Shape>& s_storage, const DownInputs& inputs) {
  constexpr int kTilesDone = 8;
  constexpr int kVectors = Shape::Tile::kRows / 4;
  ptx::bar_sync(kTilesDone, Shape::kConsumerThreads);
  for (int index = threadIdx.x - 128; index < inputs.num_tokens * kVectors; index += Shape::kConsumerThreads) {
    float* g_out = inputs.out + int64_t{index / kVectors} * inputs.hidden_size + blockIdx.x * Shape::Tile::kRows;
    const int place = index / kVectors * (Shape::kSumStride / 4) + index % kVectors;
    reinterpret_cast<float4*>(g_out)[index % kVectors] = reinterpret_cast<const float4*>(s_storage.sums)[place];
  }
}

template <class Shape>
__device__ __forceinline__ void multiply_down(DownStorage<Shape>& s_storage, const DownInputs& inputs, int num_tiles) {
  const int thread = ptx::tid_x();
  const int warpgroup = thread / 128 - 1;
  const DownTurn turn = {thread, warpgroup, warpgroup * Shape::kRingStages, Shape::num_steps(inputs)};
  if (warpgroup == Shape::kRings - 1) ptx::bar_arrive(1, 256);
  PipelineState<Shape::kRingStages> place;
  for (int index = warpgroup; index < num_tiles; index += Shape::kRings) {
    const int stage = turn.ring_first + place.stage;
    ptx::mbarrier_wait_suspended(s_storage.stage_arrived[stage], place.phase);
    multiply_any_tile(s_storage, place, turn, Shape::Tiles::count(s_storage.packed_tiles[stage]));
  }
}

template <class Shape>
__device__ __forceinline__ void run_listed_down(DownStorage<Shape>& s_storage, const DownInputs& inputs) {
  using Tiles = typename Shape::Tiles;
  constexpr int kWriters = Shape::kConsumerThreads / 32;
  prepare_down(s_storage);
  ptx::griddepcontrol_launch_dependents();
  const int num_tiles = __ldcg(inputs.grouped.down_tile_ends);
  if (threadIdx.x < 128) return load_listed_tiles(s_storage, inputs, num_tiles);
  const ListedRows rows = {inputs.grouped};
  const PackItem<Tiles> first(rows, num_tiles,
                              static_cast<int>(blockIdx.x) * kWriters + static_cast<int>(threadIdx.x) / 32 - 4);
  ptx::griddepcontrol_wait();
  pack_tiles<Tiles, kWriters, Shape::kVectors, 1>(inputs, rows, num_tiles, first);
  ptx::fence_proxy_async_global();
  ptx::bar_arrive(kPackedBarrier, Shape::kThreads);
  multiply_down(s_storage, inputs, num_tiles);
  store_sums(s_storage, inputs);
}

template <class Shape>
__device__ __forceinline__ void pack_streamed_rows(const DownInputs& inputs) {
  using Tiles = typename Shape::Tiles;
  const int thread = ptx::tid_x() - 128;
  const int width = Shape::width(inputs);
  const int packed_width = Shape::packed_width(inputs);
  const int num_blocks = static_cast<int>(gridDim.x);
  const int num_rows = __ldcg(inputs.grouped.num_rows);
  for (int row = thread / 32 * num_blocks + static_cast<int>(blockIdx.x); row < inputs.max_rows;
       row += Shape::kConsumerThreads / 32 * num_blocks) {
    float* g_row = inputs.hidden + int64_t{row} * width;
    const RowPlace place = {__ldcg(&inputs.grouped.row_places[row].packed)};
    const int token = __ldcg(inputs.grouped.row_tokens + row);
    const float weight = __ldcg(inputs.grouped.row_weights + row);
    HiddenRow<Shape::kVectors> r_row;
    bool is_written = r_row.load_written(g_row, width);
    if (row >= num_rows) return;
    while (!is_written) is_written = r_row.load_written(g_row, width);
    r_row.mark_unwritten(g_row, width);
    uint8_t* g_packed = inputs.packed_tiles + place.tile() * PackedTileShape{Tiles::kMaxTokens, packed_width}.bytes();
    const typename Tiles::Row target = {g_packed, place.slot(), place.row_count()};
    const float scale = r_row.quantise_by_converged_warp(target, packed_width);
    if (thread % 32 == 0) target.store({token * Tiles::kPlaceStride, weight, scale});
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (thread % 32 == 0) ptx::red_add_release_gpu(inputs.grouped.rows_packed + place.tile(), 1);
  }
}

template <class Shape>
__device__ __forceinline__ void run_streamed_down(DownStorage<Shape>& s_storage, const DownInputs& inputs) {
  const int num_tiles = __ldcg(inputs.grouped.down_tile_ends);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < 128) return load_streamed_tiles(s_storage, inputs, num_tiles);
  pack_streamed_rows<Shape>(inputs);
  clear_sums(s_storage, threadIdx.x - 128, Shape::kConsumerThreads);
  ptx::bar_sync(kPackedBarrier, Shape::kThreads);
  multiply_down(s_storage, inputs, num_tiles);
  ptx::griddepcontrol_wait();
  store_sums(s_storage, inputs);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) expert_down_kernel(const __grid_constant__ DownInputs inputs) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_storage = *reinterpret_cast<DownStorage<Shape>*>(s_bytes);
  if constexpr (Shape::kIsStreamed) {
    run_streamed_down(s_storage, inputs);
  } else {
    run_listed_down(s_storage, inputs);
  }
}

}
