#pragma once

#include "cuda/kernels/moe/down_records.cuh"

namespace glint::cuda {

constexpr int kMostDownStages = 12;

template <int kMaxTokensValue, int kBlockTokensValue, bool kIsHandedValue, bool kIsOneStep>
struct DownShape {
  static constexpr int kMaxTokens = kMaxTokensValue;
  static constexpr int kBlockTokens = kBlockTokensValue;
  static constexpr bool kIsHanded = kIsHandedValue;
  static constexpr int kRings = 4;
  static constexpr int kConsumerThreads = kRings * 128;
  static constexpr int kThreads = 128 + kConsumerThreads;
  static constexpr int kWeightColumnBytes = kDownTileRows * 16;
  static constexpr int kRecordBytes = RecordShape{kMaxTokens, kDownTileK}.bytes();
  static constexpr int kSumFloats = kBlockTokens * kDownTileRows;
  static constexpr int kScaleBytes = kDownTileRows * 4;
  static constexpr int kStageBytes = kDownTileBytes + kRecordBytes + kScaleBytes + 16;
  static constexpr int kFittingBytes = kSharedLimitBytes - kSharedReserveBytes - kSumFloats * 4;
  static constexpr int kFittingStages = kFittingBytes / kStageBytes;
  static constexpr int kRingStages = (kFittingStages < kMostDownStages ? kFittingStages : kMostDownStages) / kRings;
  static constexpr int kStages = kRingStages * kRings;
  static_assert(kRingStages >= 2, "a ring needs two stages");

  static __device__ __forceinline__ int width(const DownInputs& inputs) {
    return kIsOneStep ? kDownTileK : inputs.width;
  }
  static __device__ __forceinline__ int num_steps(const DownInputs& inputs) { return width(inputs) / kDownTileK; }
};

template <class Shape>
struct DownPlan {
  alignas(128) uint8_t weights[Shape::kStages][kDownTileBytes];
  alignas(16) uint8_t records[Shape::kStages][Shape::kRecordBytes];
  alignas(16) float sums[Shape::kSumFloats];
  alignas(16) float row_scales[Shape::kStages][kDownTileRows];
  alignas(8) uint64_t stage_arrived[Shape::kStages];
  alignas(8) uint64_t stage_released[Shape::kStages];
};

template <class Shape>
__device__ __forceinline__ void init_ring(DownPlan<Shape>& s_plan, int ring) {
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int stage = 0; stage < Shape::kRingStages; ++stage) {
    hopper::mbarrier_init(s_plan.stage_arrived[ring * Shape::kRingStages + stage], 2);
    hopper::mbarrier_init(s_plan.stage_released[ring * Shape::kRingStages + stage], 4);
  }
  hopper::fence_mbarrier_init();
}

template <class Shape>
__device__ __forceinline__ void clear_sums(DownPlan<Shape>& s_plan, int thread, int num_threads) {
  for (int index = thread; index < Shape::kSumFloats; index += num_threads) s_plan.sums[index] = 0.0F;
}

template <class Shape>
__device__ __forceinline__ void prepare_down(DownPlan<Shape>& s_plan) {
  if (threadIdx.x < 128) init_ring(s_plan, threadIdx.x / 32);
  clear_sums(s_plan, threadIdx.x, Shape::kThreads);
  __syncthreads();
}

template <class Shape>
class DownStream {
 public:
  __device__ __forceinline__ DownStream(const DownInputs& inputs, int num_tiles)
      : inputs_(inputs), rows_{inputs.grouped}, num_tiles_(num_tiles), lane_(hopper::thread_index() % 32) {
    ring_first_ = hopper::thread_index() / 32 * Shape::kRingStages;
    static_assert(Shape::kStages + Shape::kRings <= 32, "a ring is first filled from the tiles that now_ holds");
    static_assert(kTilesLoadedAtOnce == 64, "now_ and next_ hold 32 tiles each");
    now_ = rows_.tile(lane_);
    next_ = rows_.tile(32 + lane_);
  }

  __device__ __forceinline__ void rewind() {
    index_ = hopper::thread_index() / 32;
    k_step_ = 0;
    place_ = {};
    read_tile();
  }

  __device__ __forceinline__ bool is_done() const { return index_ >= num_tiles_; }
  __device__ __forceinline__ bool is_first_round() const { return !is_done() && place_.phase == 0; }

  __device__ __forceinline__ void wait_until_released(DownPlan<Shape>& s_plan) const {
    hopper::mbarrier_wait(s_plan.stage_released[stage()], place_.phase ^ 1U);
  }

  __device__ __forceinline__ void load_weights(DownPlan<Shape>& s_plan) const {
    if (lane_ != 0) return;
    uint64_t& arrived = s_plan.stage_arrived[stage()];
    const bool has_scales = k_step_ == 0;
    const int64_t owner = int64_t{expert_} * inputs_.num_owners + blockIdx.x;
    hopper::mbarrier_arrive_expect_tx(arrived, kDownTileBytes + (has_scales ? Shape::kScaleBytes : 0));
    const int64_t tile = owner * Shape::num_steps(inputs_) + k_step_;
    hopper::cp_async_bulk<hopper::kEvictFirst>(s_plan.weights[stage()], inputs_.weights + tile * kDownTileBytes,
                                               kDownTileBytes, arrived);
    if (!has_scales) return;
    hopper::cp_async_bulk<hopper::kEvictNormal>(s_plan.row_scales[stage()], inputs_.row_scales + owner * kDownTileRows,
                                                Shape::kScaleBytes, arrived);
  }

  __device__ __forceinline__ void load_record(DownPlan<Shape>& s_plan) const {
    if (lane_ != 0) return;
    uint64_t& arrived = s_plan.stage_arrived[stage()];
    const int codes_offset = CoreMatrixRecords<Shape::kMaxTokens>::codes_offset(count_);
    const int codes_bytes = count_ * kDownTileK;
    const int target = k_step_ == 0 ? 0 : codes_offset;
    const int source = k_step_ == 0 ? 0 : codes_offset + k_step_ * codes_bytes;
    const int bytes = codes_offset + codes_bytes - target;
    const uint8_t* g_record = inputs_.records + index_ * RecordShape{Shape::kMaxTokens, Shape::width(inputs_)}.bytes();
    hopper::mbarrier_arrive_expect_tx(arrived, bytes);
    hopper::cp_async_bulk<hopper::kEvictNormal>(s_plan.records[stage()] + target, g_record + source, bytes, arrived);
  }

  __device__ __forceinline__ void wait_until_recorded() {
    const uint32_t* g_recorded = inputs_.grouped.rows_recorded + min(chunk_first_ + lane_, num_tiles_ - 1);
    while ((recorded_ >> (index_ % 32) & 1U) == 0U) {
      const bool is_recorded = hopper::load_acquire(g_recorded) == static_cast<uint32_t>(now_.row_count);
      recorded_ = __ballot_sync(~0U, is_recorded);
      __syncwarp();
    }
    hopper::fence_proxy_async_global();
  }

  __device__ __forceinline__ void advance() {
    place_.advance(Shape::kRingStages);
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
      recorded_ = 0;
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
  uint32_t recorded_ = 0;
  RingPlace place_;
  int chunk_first_ = 0;
  TokenTile now_ = {};
  TokenTile next_ = {};
};

}
