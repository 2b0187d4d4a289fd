#pragma once

#include "cuda/kernels/attention/attention_decode.cuh"
#include "cuda/kernels/attention/rope_and_cache.cuh"
#include "cuda/kernels/norm/row_tile.cuh"

namespace glint::cuda {

inline constexpr int kStepUnits = 4;
inline constexpr int kUnitLanes = kWarpLanes / kStepUnits;
inline constexpr int kEarlyTiles = 4;
inline constexpr int kStepRowDims = kMaxHeadDim + kChunkDims;
inline constexpr uint32_t kNanPair = 0x7fff7fffU;

struct StepCall : AttentionStepCall {
  int32_t group_heads;
};

struct StepPlace {
  int row = -1;
  int kv_head = 0;

  bool operator==(const StepPlace&) const = default;
};

struct RareDivision {
  float divisor;

  __device__ __noinline__ float operator()(float value) const { return __fdiv_rn(value, divisor); }
};

struct StepStorage : DecodeStorage<Bf16Tile<kMaxHeadDim>> {
  alignas(16) uint16_t query[kMaxGroupHeads][kStepRowDims];
  alignas(16) uint16_t newest[2][kMaxHeadDim];
  float magnitudes[kDecodeWarps];
  bool has_finite_value;
};

struct StoredItem : DecodeItem {
  __device__ int page_tokens(int page) const {
    const bool is_newest = has_newest() && page + 1 == page_count();
    return DecodeItem::page_tokens(page) - (is_newest ? 1 : 0);
  }
};

struct StepRing {
  using Ring = StepStorage::Ring;
  using State = Ring::State;

  Ring& ring;
  int num_early = kEarlyTiles;

  __device__ __forceinline__ void load_one_lane(State& state, const std::byte* g_tile, int tokens) {
    if (num_early == 0) {
      ptx::griddepcontrol_wait();
    } else {
      --num_early;
    }
    ring.load_one_lane(state, g_tile, tokens);
  }
};

struct StepRotary {
  using Head = HeadLane<kMaxHeadDim>;

  Head cosines;
  Head sines;
  int other_lane;
  bool is_first;
  bool is_rotated;

  __device__ __forceinline__ void load(const RopeCall& call, int64_t row) {
    const int half_lanes = call.rotary_dim / 2 / Head::kDims;
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    is_first = lane < half_lanes;
    is_rotated = lane < 2 * half_lanes;
    other_lane = !is_rotated ? lane : is_first ? lane + half_lanes : lane - half_lanes;
    if (!is_rotated) return;
    const int64_t before = row * (call.rotary_dim / 2) - (is_first ? 0 : half_lanes * Head::kDims);
    cosines.load_vector(call.cosines + before);
    sines.load_vector(call.sines + before);
  }
};

struct StepRows {
  using Head = HeadLane<kMaxHeadDim>;

  Head units[kStepUnits];
  const float* g_units[kStepUnits];
  StepRotary rotary;

  __device__ static int unit(const StepCall& call, int index) {
    return index * kDecodeWarps + static_cast<int>(threadIdx.x) / kWarpLanes - call.group_heads;
  }

  __device__ __forceinline__ void find(const StepCall& call, const StepPlace& place) {
    const RopeCall& rope = call.rope;
    const int64_t row = place.row;
    const int key_first = place.kv_head * kMaxHeadDim;
    const float* g_query = rope.query + row * rope.query_stride + key_first * call.group_heads;
    const float* g_key = rope.key + row * rope.key_stride + key_first;
    const float* g_value = rope.value + row * rope.key_stride + key_first;
#pragma unroll
    for (int index = 0; index < kStepUnits; ++index) {
      const int own = unit(call, index);
      g_units[index] = own < 0 ? g_query + (own + call.group_heads) * kMaxHeadDim : own == 0 ? g_key : g_value;
    }
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int index = 0; index < kStepUnits; ++index) units[index].load_vector_from_l2(g_units[index]);
  }

  __device__ __forceinline__ float sum_of_lane_unit() const {
    static_assert(kStepUnits == 4, "two exchanges leave a lane one of four units");
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    const bool is_upper = lane >= 2 * kUnitLanes;
    float sums[2];
#pragma unroll
    for (int index = 0; index < 2; ++index) {
      const float low = units[index].sum_of_squares();
      const float high = units[index + 2].sum_of_squares();
      sums[index] = (is_upper ? high : low) + __shfl_xor_sync(kWholeWarp, is_upper ? low : high, 2 * kUnitLanes);
    }
    const bool is_odd = lane / kUnitLanes % 2 == 1;
    float sum = (is_odd ? sums[1] : sums[0]) + __shfl_xor_sync(kWholeWarp, is_odd ? sums[0] : sums[1], kUnitLanes);
#pragma unroll
    for (int distance = kUnitLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, distance);
    return sum;
  }

  __device__ __forceinline__ void normalise(const StepCall& call, const Head& query_norm, const Head& key_norm) {
    const RopeCall& rope = call.rope;
    const float lane_factor =
        Head::norm_factor(sum_of_lane_unit(), __frcp_rn(static_cast<float>(kMaxHeadDim)), rope.epsilon);
#pragma unroll
    for (int index = 0; index < kStepUnits; ++index) {
      const bool is_query = unit(call, index) < 0;
      const bool has_norm = is_query ? rope.query_norm != nullptr : unit(call, index) == 0 && rope.key_norm != nullptr;
      const float factor = __shfl_sync(kWholeWarp, lane_factor, index * kUnitLanes);
#pragma unroll
      for (int dim = 0; dim < Head::kDims; ++dim) {
        const float weight = is_query ? query_norm.values[dim] : key_norm.values[dim];
        const float normed = weight * units[index].values[dim] * factor;
        units[index].values[dim] = has_norm ? normed : units[index].values[dim];
      }
    }
  }

  __device__ __forceinline__ void rotate(const StepCall& call) {
#pragma unroll
    for (int index = 0; index < kStepUnits; ++index) {
#pragma unroll
      for (int dim = 0; dim < Head::kDims; ++dim) {
        const float value = units[index].values[dim];
        const float partner = __shfl_sync(kWholeWarp, value, rotary.other_lane);
        const float turned = __fmul_rn(partner, rotary.sines.values[dim]);
        const float rotated = __fmaf_rn(value, rotary.cosines.values[dim], rotary.is_first ? -turned : turned);
        units[index].values[dim] = rotary.is_rotated && unit(call, index) < 1 ? rotated : value;
      }
    }
  }
};

struct StepInputs {
  using Head = HeadLane<kMaxHeadDim>;

  StepRows rows;
  Head query_norm = {};
  Head key_norm = {};
  StepPlace place;

  __device__ __forceinline__ void load(const StepCall& call, const StepPlace& wanted) {
    const RopeCall& rope = call.rope;
    place = wanted;
    if (rope.query_norm != nullptr) query_norm.load_vector(rope.query_norm);
    if (rope.key_norm != nullptr) key_norm.load_vector(rope.key_norm);
    rows.rotary.load(rope, place.row);
    rows.find(call, place);
    ptx::griddepcontrol_wait();
    rows.load();
  }
};

template <bool kHasOneKvHead>
struct StepLane : DecodeLane<Bf16Tile<kMaxHeadDim>, true> {
  using Head = HeadLane<kMaxHeadDim>;
  static constexpr bool kHidesEarlier = false;

  StepStorage& s_rows;
  StepInputs inputs;
  uint4 newest = {};
  bool has_newest = false;
  StepPlace prepared;

  __device__ explicit StepLane(StepStorage& shared) : DecodeLane(shared), s_rows(shared) {}

  __device__ __forceinline__ void start(const StepCall& call, const DecodeItem& item) {
    const int64_t slot = call.rope.slots[item.task.row];
    const StepPlace place{item.task.row, item.kv_head};
    has_newest = item.has_newest();
    clear();
    if (place != prepared) prepare(call, place);
    if (has_newest && warp() == 0) publish_newest(call.rope.pages, slot, place.kv_head);
  }

  __device__ __forceinline__ void load_likely_row(const StepCall& call, const StepPlace& place) {
    if (place.row < call.rope.count) inputs.load(call, place);
  }

  __device__ __forceinline__ void prepare(const StepCall& call, const StepPlace& place) {
    if (inputs.place != place) inputs.load(call, place);
    inputs.rows.normalise(call, inputs.query_norm, inputs.key_norm);
    inputs.rows.rotate(call);
    store_rows(inputs.rows, call);
    prepared = place;
    sync_consumers<kDecodeConsumers>();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::ldmatrix_x4(query[step].regs, ptx::shared_address(&s_rows.query[lane() % 16][step * 16 + lane() / 16 * 8]));
    }
  }

  __device__ __forceinline__ void store_rows(const StepRows& loaded, const StepCall& call) {
#pragma unroll
    for (int index = 0; index < kStepUnits; ++index) {
      const int unit = StepRows::unit(call, index);
      if (unit >= 0) *reinterpret_cast<uint2*>(s_rows.query[unit + call.group_heads] + Head::first_dim()) = {};
      if (unit >= 2) continue;
      if (unit == 1) {
        const bool is_finite = loaded.units[index].is_finite_in_bf16();
        if (lane() == 0) s_rows.has_finite_value = is_finite;
      }
      uint16_t* s_row = unit < 0 ? s_rows.query[unit + call.group_heads] : s_rows.newest[unit];
      loaded.units[index].store(reinterpret_cast<std::byte*>(s_row + Head::first_dim()));
    }
  }

  __device__ __forceinline__ void publish_newest(const KvPages& pages, int64_t slot, int kv_head) {
    const bool is_key = lane() < 16;
    const int dim = lane() % 16 * kChunkDims;
    newest = *reinterpret_cast<const uint4*>(&s_rows.newest[is_key ? 0 : 1][dim]);
    if (!s_rows.has_finite_value) newest = is_key ? make_uint4(kNanPair, kNanPair, kNanPair, kNanPair) : uint4{};
    const int64_t offset = slot / kPageTokens * pages.page_bytes + kv_head * pages.head_bytes;
    std::byte* g_page = (is_key ? pages.keys : pages.values) + offset;
    *reinterpret_cast<uint4*>(g_page + swizzled_offset(static_cast<int>(slot % kPageTokens), dim)) = newest;
  }

  __device__ __forceinline__ void put_newest(std::byte* s_tile, int visible, int first_thread) const {
    if (thread() < first_thread || thread() >= first_thread + 16) return;
    const int dim = lane() % 16 * kChunkDims;
    *reinterpret_cast<uint4*>(s_tile + swizzled_offset(visible - 1, dim)) = newest;
  }

  __device__ __forceinline__ void put_newest_key(std::byte* s_keys, int visible) const {
    if (!has_newest || visible > kPageTokens) return;
    put_newest(s_keys, visible, 0);
    ptx::fence_proxy_async();
    sync_consumers<kDecodeConsumers>();
  }

  __device__ __forceinline__ void put_newest_value(std::byte* s_values, int visible) const {
    if (has_newest && visible <= kPageTokens) put_newest(s_values, visible, 16);
  }

  __device__ __forceinline__ float share_magnitude(int num_heads) {
    float highest = 0.0F;
#pragma unroll
    for (int index = 0; index < 4 * kDimTiles; ++index) {
      const int half = index / 2 % 2;
      float& value = sums[index / 4].values[index % 4];
      value = __fdiv_rn(value, weight_sum[half]);
      if (row(half) < num_heads) highest = fmaxf(highest, fabsf(value));
    }
    highest = reduce_warp(highest, MaxOf());
    if (lane() == 0) s_rows.magnitudes[warp()] = highest;
    sync_consumers<kDecodeConsumers>();
#pragma unroll
    for (int other = 0; other < kDecodeWarps; ++other) highest = fmaxf(highest, s_rows.magnitudes[other]);
    return highest;
  }

  template <typename Division>
  __device__ __forceinline__ void store_fp8(uint8_t* g_fp8, int num_heads, const Division& division) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= num_heads) continue;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        const uint32_t fp8 = fp8_pair(sums[tile].values[2 * half], sums[tile].values[2 * half + 1], division);
        const int dim = warp() * kWarpDims + tile * 8 + lane() % 4 * 2;
        *reinterpret_cast<uint16_t*>(g_fp8 + row(half) * kMaxHeadDim + dim) = static_cast<uint16_t>(fp8);
      }
    }
  }

  __device__ __forceinline__ void store_quantised(const StepCall& call, const DecodeItem& item) {
    const int num_heads = call.group_heads;
    const float scale = fp8_scale(share_magnitude(num_heads));
    uint8_t* g_fp8 = call.fp8 + item.task.row * call.fp8_stride;
    if (thread() == 0) call.scales[item.task.row] = scale;
    if (ReciprocalDivision::is_exact_for(scale)) {
      store_fp8(g_fp8, num_heads, ReciprocalDivision{scale, __frcp_rn(scale)});
    } else {
      store_fp8(g_fp8, num_heads, RareDivision{scale});
    }
  }

  __device__ __forceinline__ void store_fp32(const StepCall& call, const DecodeItem& item) {
    const int64_t place = int64_t{item.task.row} * call.attend.num_kv_heads + item.kv_head;
    const float highest = share_magnitude(call.group_heads);
    float* g_out = call.attend.out + place * call.group_heads * kMaxHeadDim;
    if (thread() == 0) call.magnitudes[place] = highest;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= call.group_heads) continue;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        const int dim = warp() * kWarpDims + tile * 8 + lane() % 4 * 2;
        *reinterpret_cast<float2*>(g_out + row(half) * kMaxHeadDim + dim) =
            make_float2(sums[tile].values[2 * half], sums[tile].values[2 * half + 1]);
      }
    }
  }

  __device__ __forceinline__ void store_out(const StepCall& call, const DecodeItem& item) {
    if constexpr (kHasOneKvHead) {
      store_quantised(call, item);
    } else {
      store_fp32(call, item);
    }
  }
};

template <bool kHasOneKvHead>
__global__ void __launch_bounds__(kDecodeThreads, 1) attention_step_kernel(const __grid_constant__ StepCall call) {
  extern __shared__ std::byte s_memory[];
  auto& storage = reinterpret_cast<StepStorage*>(aligned_storage(s_memory))[threadIdx.y];
  ptx::griddepcontrol_launch_dependents();
  storage.ring.prepare<kDecodeWarps>();
  if (threadIdx.x < kDecodeConsumers) {
    StepLane<kHasOneKvHead> work(storage);
    const DecodeScheduler<kHasOneKvHead> scheduler(call);
    work.load_likely_row(call, {scheduler.task_index(), scheduler.kv_head()});
    attend_decode_pages(work, call, scheduler);
    ptx::griddepcontrol_wait();
  } else if (threadIdx.x == kDecodeConsumers) {
    StepRing ring{storage.ring};
    load_decode_pages<StoredItem>(DecodeScheduler<kHasOneKvHead>(call), ring);
  }
}

}
