#pragma once

#include "cuda/kernels/down_records.cuh"

namespace glint::cuda {

template <int kMaxTokensValue, int kBlockTokensValue>
struct DownShape {
  static constexpr int kMaxTokens = kMaxTokensValue;
  static constexpr int kBlockTokens = kBlockTokensValue;
  static constexpr int kRings = 4;
  static constexpr int kConsumerThreads = kRings * 128;
  static constexpr int kThreads = 128 + kConsumerThreads;
  static constexpr int kWeightColumnBytes = kDownTileRows * 16;
  static constexpr int kTokenBytes = kMaxTokens * kDownTileK;
  static constexpr int kSumFloats = kBlockTokens * kDownTileRows;
  static constexpr int kFactBytes = sizeof(RecordFacts<kMaxTokens>);
  static constexpr int kStageBytes = kDownTileBytes + kTokenBytes + kFactBytes + kDownTileRows * 4 + 16;
  static constexpr int kFittingStages = (kSharedLimitBytes - kSharedReserveBytes - kSumFloats * 4) / kStageBytes;
  static constexpr int kRingStages = (kFittingStages < 24 ? kFittingStages : 24) / kRings;
  static constexpr int kStages = kRingStages * kRings;
  static_assert(kRingStages >= 2, "a ring needs two stages");
};

template <class Shape>
struct DownPlan {
  alignas(128) uint8_t weights[Shape::kStages][kDownTileBytes];
  alignas(128) uint8_t tokens[Shape::kStages][Shape::kTokenBytes];
  alignas(16) float sums[Shape::kSumFloats];
  alignas(16) RecordFacts<Shape::kMaxTokens> facts[Shape::kStages];
  alignas(16) float row_scales[Shape::kStages][kDownTileRows];
  alignas(8) uint64_t stage_arrived[Shape::kStages];
  alignas(8) uint64_t stage_released[Shape::kStages];
};

template <class Shape>
__device__ __forceinline__ void prepare_down(DownPlan<Shape>& s_plan) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      hopper::mbarrier_init(s_plan.stage_arrived[stage], 1 + 32);
      hopper::mbarrier_init(s_plan.stage_released[stage], 4);
    }
    hopper::fence_mbarrier_init();
  }
  for (int index = threadIdx.x; index < Shape::kSumFloats; index += Shape::kThreads) s_plan.sums[index] = 0.0F;
  __syncthreads();
}

template <class Shape>
class DownStream {
 public:
  __device__ __forceinline__ DownStream(const DownInputs& inputs, int num_tiles)
      : inputs_(inputs), num_tiles_(num_tiles), lane_(hopper::thread_index() % 32) {
    index_ = hopper::thread_index() / 32;
    ring_first_ = index_ * Shape::kRingStages;
    if (is_done()) return;
    next_ = load_tile(lane_);
    find_tile();
  }

  __device__ __forceinline__ bool is_done() const { return index_ >= num_tiles_; }
  __device__ __forceinline__ bool is_first_round() const { return place_.phase == 0; }

  __device__ __forceinline__ void wait_until_released(DownPlan<Shape>& s_plan) const {
    hopper::mbarrier_wait(s_plan.stage_released[stage()], place_.phase ^ 1U);
  }

  __device__ __forceinline__ void load_weights(DownPlan<Shape>& s_plan) const {
    if (lane_ == 0) {
      uint64_t& arrived = s_plan.stage_arrived[stage()];
      const int64_t tile = (int64_t{expert_} * inputs_.num_owners + blockIdx.x) * inputs_.num_steps + k_step_;
      hopper::mbarrier_arrive_expect_tx(arrived, kDownTileBytes);
      hopper::cp_async_bulk<hopper::kEvictFirst>(s_plan.weights[stage()], inputs_.weights + tile * kDownTileBytes,
                                                 kDownTileBytes, arrived);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_record(DownPlan<Shape>& s_plan) const {
    const RecordShape record = {Shape::kMaxTokens, inputs_.width};
    const uint8_t* g_record = inputs_.records + index_ * record.bytes() + lane_ * 16;
    copy_codes(hopper::shared_address(s_plan.tokens[stage()]) + lane_ * 16, g_record);
    if (k_step_ == 0) {
      const float* g_scales = inputs_.row_scales + int64_t{expert_} * inputs_.hidden_size + blockIdx.x * kDownTileRows;
      const uint32_t facts = hopper::shared_address(&s_plan.facts[stage()]) + lane_ * 16;
#pragma unroll
      for (int offset = 0; offset < Shape::kFactBytes; offset += 512) {
        if (offset + lane_ * 16 < Shape::kFactBytes) {
          hopper::cp_async_16(facts + offset, g_record + record.facts_offset() + offset);
        }
      }
      const uint32_t scales = hopper::shared_address(s_plan.row_scales[stage()]) + lane_ * 16;
      if (lane_ < kDownTileRows / 4) hopper::cp_async_16(scales, g_scales + lane_ * 4);
    }
    hopper::cp_async_mbarrier_arrive(s_plan.stage_arrived[stage()]);
  }

  __device__ __forceinline__ void advance() {
    place_.advance(Shape::kRingStages);
    if (++k_step_ < inputs_.num_steps) return;
    k_step_ = 0;
    index_ += Shape::kRings;
    if (!is_done()) find_tile();
  }

 private:
  __device__ __forceinline__ int stage() const { return ring_first_ + place_.stage; }

  __device__ __forceinline__ void copy_codes(uint32_t target, const uint8_t* g_record) const {
    constexpr int kRounds = Shape::kTokenBytes / 512;
    const int slot_mask = padded_tokens(count_) - 1;
    const int num_chunks = (slot_mask + 1) * (kDownTileK / 16);
    const uint8_t* g_codes = g_record + k_step_ * num_chunks * 16;
    const bool is_real_slot = (lane_ & slot_mask) < count_;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int chunk = round * 32 + lane_;
      const bool is_real = Shape::kMaxTokens <= 32 ? is_real_slot : (chunk & slot_mask) < count_;
      if (is_real && chunk < num_chunks) hopper::cp_async_16(target + round * 512, g_codes + round * 512);
    }
  }

  __device__ __forceinline__ void find_tile() {
    if (index_ >= chunk_first_ + 32) {
      chunk_first_ += 32;
      now_ = next_;
      next_ = load_tile(chunk_first_ + 32 + lane_);
    }
    const int place = index_ % 32;
    expert_ = __shfl_sync(~0U, now_.x, place);
    count_ = __shfl_sync(~0U, now_.z, place);
  }

  __device__ __forceinline__ int4 load_tile(int index) const {
    return __ldg(reinterpret_cast<const int4*>(inputs_.grouped.down_tiles) + min(index, num_tiles_ - 1));
  }

  const DownInputs& inputs_;
  int num_tiles_;
  int lane_;
  int index_;
  int ring_first_;
  int k_step_ = 0;
  int expert_ = 0;
  int count_ = 0;
  RingPlace place_;
  int chunk_first_ = -32;
  int4 now_ = {};
  int4 next_ = {};
};

constexpr int kRecordBarrier = 9;

template <class Shape>
__device__ __forceinline__ void load_down_tiles(DownPlan<Shape>& s_plan, const DownInputs& inputs, int num_tiles) {
  if (num_tiles == 0) {
    hopper::named_barrier_arrive(kRecordBarrier, Shape::kThreads);
    return;
  }
  DownStream<Shape> stream(inputs, num_tiles);
  int num_early = 0;
  for (; !stream.is_done() && stream.is_first_round(); ++num_early, stream.advance()) stream.load_weights(s_plan);
  hopper::wait_for_previous_kernel();
  const BlockArrivals arrivals(inputs.arrivals);
  hopper::named_barrier_sync(kRecordBarrier, Shape::kThreads);
  arrivals.announce_and_wait<128>();
  DownStream<Shape> late(inputs, num_tiles);
  for (; num_early > 0; --num_early, late.advance()) late.load_record(s_plan);
  for (; !stream.is_done(); stream.advance()) {
    stream.wait_until_released(s_plan);
    stream.load_weights(s_plan);
    stream.load_record(s_plan);
  }
}

template <class Shape, int kTokens>
__device__ __forceinline__ void multiply_down_stage(float (&r_sum)[kTokens / 2], DownPlan<Shape>& s_plan, int stage) {
  using Product = hopper::Wgmma<hopper::Element::kE4m3, kTokens>;
  constexpr int kSteps = kDownTileK / 32;
  float r_first[kTokens / 2];
  float r_second[kTokens / 2];
  const uint64_t rows =
      hopper::wgmma_descriptor(hopper::shared_address(s_plan.weights[stage]), Shape::kWeightColumnBytes, 128);
  const uint64_t tokens = hopper::wgmma_descriptor(hopper::shared_address(s_plan.tokens[stage]), kTokens * 16, 128);
  hopper::fence_proxy_async();
  hopper::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t row_part = rows + step * (2 * Shape::kWeightColumnBytes / 16);
    const uint64_t token_part = tokens + step * (kTokens * 2);
    if (step < kSteps / 2) {
      Product::multiply(r_first, row_part, token_part, step == 0 ? 0 : 1);
    } else {
      Product::multiply(r_second, row_part, token_part, step == kSteps / 2 ? 0 : 1);
    }
  }
  hopper::wgmma_commit_group();
  hopper::wgmma_wait_group<0>();
  hopper::pin_registers(r_first);
  hopper::pin_registers(r_second);
#pragma unroll
  for (int index = 0; index < kTokens / 2; ++index) {
    r_sum[index] = __fadd_rn(__fadd_rn(r_sum[index], r_first[index]), r_second[index]);
  }
}

template <class Shape, int kTokens>
struct WeightedSums {
  static constexpr int kColumns = kTokens / 4;

  int row_first;
  float r_row_scales[2];
  float r_scales[kColumns];
  float r_weights[kColumns];
  int r_places[kColumns];

  __device__ __forceinline__ WeightedSums(const DownPlan<Shape>& s_plan, int stage, int thread) {
    const RecordFacts<Shape::kMaxTokens>& s_facts = s_plan.facts[stage];
    row_first = thread % 128 / 32 * kFragmentRows + thread % 32 / 4;
    r_row_scales[0] = row_first < kDownTileRows ? s_plan.row_scales[stage][row_first] : 0.0F;
    r_row_scales[1] = row_first + 8 < kDownTileRows ? s_plan.row_scales[stage][row_first + 8] : 0.0F;
#pragma unroll
    for (int item = 0; item < kColumns; ++item) {
      const int column = item / 2 * kGroupTokens + thread % 4 * 2 + item % 2;
      const bool is_real = column < s_facts.count;
      r_scales[item] = s_facts.scales[column];
      r_weights[item] = s_facts.weights[column];
      r_places[item] = is_real ? s_facts.places[column] + row_first : -1;
    }
  }

  __device__ __forceinline__ bool is_stored(int item, int half) const {
    return r_places[item] >= 0 && row_first + half * 8 < kDownTileRows;
  }

  __device__ __forceinline__ void add_to(float* s_sums, float (&r_sum)[kTokens / 2]) const {
    if (row_first - row_first % kFragmentRows >= kDownTileRows) return;
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
__device__ __forceinline__ void multiply_down_tile(DownPlan<Shape>& s_plan, RingPlace& ring, const DownTurn& turn) {
  constexpr int kTurnOfFirst = 1;
  constexpr int kTurnThreads = 256;
  const WeightedSums<Shape, kTokens> weighted(s_plan, turn.ring_first + ring.stage, turn.thread);
  float r_sum[kTokens / 2];
#pragma unroll
  for (int index = 0; index < kTokens / 2; ++index) r_sum[index] = 0.0F;
  for (int k_step = 0; k_step < turn.num_steps; ++k_step) {
    const int stage = turn.ring_first + ring.stage;
    if (k_step > 0) hopper::mbarrier_wait(s_plan.stage_arrived[stage], ring.phase);
    multiply_down_stage<Shape, kTokens>(r_sum, s_plan, stage);
    if (turn.thread % 32 == 0) hopper::mbarrier_arrive(s_plan.stage_released[stage]);
    ring.advance(Shape::kRingStages);
  }
  hopper::named_barrier_sync(kTurnOfFirst + turn.warpgroup, kTurnThreads);
  weighted.add_to(s_plan.sums, r_sum);
  hopper::named_barrier_arrive(kTurnOfFirst + (turn.warpgroup + 1) % Shape::kRings, kTurnThreads);
}

template <class Shape>
__device__ __forceinline__ void multiply_any_tile(DownPlan<Shape>& s_plan, RingPlace& ring, const DownTurn& turn,
                                                  int count) {
  if (Shape::kMaxTokens <= 8 || count <= 8) {
    multiply_down_tile<Shape, 8>(s_plan, ring, turn);
  } else if (Shape::kMaxTokens <= 16 || count <= 16) {
    multiply_down_tile<Shape, Shape::kMaxTokens < 16 ? 8 : 16>(s_plan, ring, turn);
  } else {
    multiply_down_tile<Shape, Shape::kMaxTokens < 32 ? 8 : 32>(s_plan, ring, turn);
  }
}

template <class Shape>
__device__ __forceinline__ void store_sums(const DownPlan<Shape>& s_plan, const DownInputs& inputs) {
  constexpr int kTilesDone = 8;
  constexpr int kVectors = kDownTileRows / 4;
  hopper::named_barrier_sync(kTilesDone, Shape::kConsumerThreads);
  for (int index = threadIdx.x - 128; index < inputs.num_tokens * kVectors; index += Shape::kConsumerThreads) {
    float* g_out = inputs.out + int64_t{index / kVectors} * inputs.hidden_size + blockIdx.x * kDownTileRows;
    reinterpret_cast<float4*>(g_out)[index % kVectors] = reinterpret_cast<const float4*>(s_plan.sums)[index];
  }
}

template <class Shape>
__device__ __forceinline__ void multiply_down(DownPlan<Shape>& s_plan, const DownInputs& inputs, int num_tiles) {
  const int thread = hopper::thread_index();
  const int warpgroup = thread / 128 - 1;
  const DownTurn turn = {thread, warpgroup, warpgroup * Shape::kRingStages, inputs.num_steps};
  if (warpgroup == Shape::kRings - 1) hopper::named_barrier_arrive(1, 256);
  RingPlace place;
  for (int index = warpgroup; index < num_tiles; index += Shape::kRings) {
    const int stage = turn.ring_first + place.stage;
    hopper::mbarrier_wait(s_plan.stage_arrived[stage], place.phase);
    multiply_any_tile(s_plan, place, turn, s_plan.facts[stage].count);
  }
  store_sums(s_plan, inputs);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    expert_down_kernel(const __grid_constant__ DownInputs inputs) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_plan = *reinterpret_cast<DownPlan<Shape>*>(s_bytes);
  const int num_tiles = __ldg(inputs.grouped.down_tile_ends);
  prepare_down(s_plan);
  hopper::allow_next_kernel();
  if (threadIdx.x < 128) {
    load_down_tiles(s_plan, inputs, num_tiles);
    return;
  }
  using Records = CoreMatrixRecords<Shape::kMaxTokens>;
  constexpr int kWriters = Shape::kConsumerThreads / 32;
  const RecordItem<Records> first(inputs, num_tiles,
                                  static_cast<int>(blockIdx.x) * kWriters + static_cast<int>(threadIdx.x) / 32 - 4);
  hopper::wait_for_previous_kernel();
  if (inputs.width <= kNarrowVectors * 128) {
    write_records<Records, kWriters, kNarrowVectors, 1>(inputs, num_tiles, first);
  } else {
    write_records<Records, kWriters, kWideVectors, 1>(inputs, num_tiles, first);
  }
  hopper::named_barrier_arrive(kRecordBarrier, Shape::kThreads);
  multiply_down(s_plan, inputs, num_tiles);
}

}
