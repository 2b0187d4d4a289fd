#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>

#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/ptx/mma.cuh"

namespace glint::cuda {

inline constexpr int kRopeWarps = 4;
inline constexpr int kRopeBlocks = 5;
inline constexpr float kBf16Limit = 0x1.ffp127F;

template <int kPaddedDim>
struct RotaryLane {
  static constexpr int kDims = kPaddedDim / kWarpLanes;
  int half;
  float cosines[kDims];
  float sines[kDims];

  __device__ __forceinline__ int other_dim(int dim) const {
    if (dim >= 2 * half) return -1;
    return dim < half ? dim + half : dim - half;
  }

  __device__ __forceinline__ void load(const RopeCall& call, int64_t row) {
    half = call.rotary_dim / 2;
#pragma unroll
    for (int index = 0; index < kDims; ++index) {
      const int dim = static_cast<int>(threadIdx.x) % kWarpLanes * kDims + index;
      const int64_t place = row * half + (dim < half ? dim : dim - half);
      const bool is_rotated = dim < 2 * half;
      cosines[index] = is_rotated ? call.cosines[place] : 1.0F;
      sines[index] = is_rotated ? (dim < half ? -call.sines[place] : call.sines[place]) : 0.0F;
    }
  }
};

template <int kPaddedDim>
struct HeadLane {
  static constexpr int kDims = kPaddedDim / kWarpLanes;
  float values[kDims];

  __device__ static int first_dim() { return static_cast<int>(threadIdx.x) % kWarpLanes * kDims; }

  __device__ __forceinline__ void load(const float* g_head, int head_dim) {
#pragma unroll
    for (int index = 0; index < kDims; index += 2) {
      const int dim = first_dim() + index;
      const float2 pair = dim < head_dim ? *reinterpret_cast<const float2*>(g_head + dim) : make_float2(0.0F, 0.0F);
      values[index] = pair.x;
      values[index + 1] = pair.y;
    }
  }

  __device__ __forceinline__ void take_vector(const float4& loaded) {
    static_assert(kDims == 4, "a lane's dims of a head are one vector");
    values[0] = loaded.x;
    values[1] = loaded.y;
    values[2] = loaded.z;
    values[3] = loaded.w;
  }

  __device__ __forceinline__ void load_vector(const float* g_head) {
    take_vector(*reinterpret_cast<const float4*>(g_head + first_dim()));
  }

  __device__ __forceinline__ void load_vector_from_l2(const float* g_head) {
    take_vector(__ldcg(reinterpret_cast<const float4*>(g_head + first_dim())));
  }

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int index = 0; index < kDims; ++index) values[index] = value;
  }

  __device__ __forceinline__ bool is_finite_in_bf16() const {
    bool holds = true;
#pragma unroll
    for (int index = 0; index < kDims; ++index) holds = holds && fabsf(values[index]) < kBf16Limit;
    return __all_sync(kWholeWarp, holds);
  }

  __device__ __forceinline__ float sum_of_squares() const {
    float sum = 0.0F;
#pragma unroll
    for (int index = 0; index < kDims; ++index) sum = fmaf(values[index], values[index], sum);
    return sum;
  }

  __device__ __forceinline__ static float norm_factor(float sum, float inverse_dim, float epsilon) {
    return __fdiv_rn(1.0F, __fsqrt_rn(__fmaf_rn(sum, inverse_dim, epsilon)));
  }

  __device__ __forceinline__ void scale(const HeadLane& weight, float factor) {
#pragma unroll
    for (int index = 0; index < kDims; ++index) values[index] = weight.values[index] * values[index] * factor;
  }

  __device__ __forceinline__ void rotate_whole_lanes(const RotaryLane<kPaddedDim>& rotary) {
    const int other = rotary.other_dim(first_dim());
    const int other_lane = (other < 0 ? first_dim() : other) / kDims;
#pragma unroll
    for (int index = 0; index < kDims; ++index) {
      const float partner = __shfl_sync(kWholeWarp, values[index], other_lane);
      const float rotated = __fmaf_rn(values[index], rotary.cosines[index], __fmul_rn(partner, rotary.sines[index]));
      values[index] = other >= 0 ? rotated : values[index];
    }
  }

  __device__ __forceinline__ void rotate(float* s_head, const RotaryLane<kPaddedDim>& rotary) {
    if (rotary.half % kDims == 0) return rotate_whole_lanes(rotary);
#pragma unroll
    for (int index = 0; index < kDims; ++index) s_head[first_dim() + index] = values[index];
    __syncwarp();
#pragma unroll
    for (int index = 0; index < kDims; ++index) {
      const int other = rotary.other_dim(first_dim() + index);
      if (other >= 0) {
        values[index] = __fmaf_rn(values[index], rotary.cosines[index], __fmul_rn(s_head[other], rotary.sines[index]));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store(std::byte* g_target) const {
    if constexpr (kDims == 4) {
      *reinterpret_cast<uint2*>(g_target) = {ptx::pack_bf16(values[0], values[1]),
                                             ptx::pack_bf16(values[2], values[3])};
    } else {
      *reinterpret_cast<uint32_t*>(g_target) = ptx::pack_bf16(values[0], values[1]);
    }
  }

  __device__ __forceinline__ static uint16_t fp8_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  }

  __device__ __forceinline__ void round_to_e4m3() {
#pragma unroll
    for (int index = 0; index < kDims; index += 2) {
      const __half2 pair = __nv_cvt_fp8x2_to_halfraw2(fp8_pair(values[index], values[index + 1]), __NV_E4M3);
      values[index] = __low2float(pair);
      values[index + 1] = __high2float(pair);
    }
  }

  __device__ __forceinline__ void store_fp8(std::byte* g_page, int row, float* s_head) const {
#pragma unroll
    for (int index = 0; index < kDims; ++index) s_head[first_dim() + index] = values[index];
    __syncwarp();
    std::byte* g_target = g_page + fp8_group_offset(kPaddedDim, row, first_dim() / kFp8Group);
#pragma unroll
    for (int index = 0; index < kDims; index += 2) {
      const int place = first_dim() + index;
      *reinterpret_cast<uint16_t*>(g_target + place % kFp8Group) =
          fp8_pair(s_head[fp8_dim(place)], s_head[fp8_dim(place + 1)]);
    }
  }
};

struct HeadRows {
  const RopeCall& call;
  bool has_vectors;

  __device__ __forceinline__ explicit HeadRows(const RopeCall& rotate) : call(rotate) {
    const auto addresses = reinterpret_cast<uintptr_t>(call.query) | reinterpret_cast<uintptr_t>(call.key) |
                           reinterpret_cast<uintptr_t>(call.value);
    has_vectors = call.head_dim == kMaxHeadDim && call.query_stride % 4 == 0 && call.key_stride % 4 == 0 &&
                  addresses % sizeof(float4) == 0;
  }

  template <int kPaddedDim>
  __device__ __forceinline__ void load(HeadLane<kPaddedDim>& lane, const float* g_head) const {
    if constexpr (kPaddedDim == kMaxHeadDim) {
      if (has_vectors) return lane.load_vector(g_head);
    }
    lane.load(g_head, call.head_dim);
  }
};

template <int kPaddedDim>
struct HeadNorm {
  HeadLane<kPaddedDim> weight;
  bool is_used;
  float inverse_dim;

  __device__ __forceinline__ HeadNorm(const RopeCall& call, const float* g_weight) : is_used(g_weight != nullptr) {
    inverse_dim = __frcp_rn(static_cast<float>(call.head_dim));
    if (is_used) weight.load(g_weight, call.head_dim);
  }

  template <int kHeads>
  __device__ __forceinline__ void apply(HeadLane<kPaddedDim> (&heads)[kHeads], float epsilon) const {
    if (!is_used) return;
    float sums[kHeads];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) sums[head] = heads[head].sum_of_squares();
#pragma unroll
    for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) sums[head] += __shfl_xor_sync(kWholeWarp, sums[head], distance);
    }
    float sum_of_lane = sums[0];
#pragma unroll
    for (int head = 1; head < kHeads; ++head) {
      sum_of_lane = static_cast<int>(threadIdx.x) % kWarpLanes == head ? sums[head] : sum_of_lane;
    }
    const float factor = HeadLane<kPaddedDim>::norm_factor(sum_of_lane, inverse_dim, epsilon);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) heads[head].scale(weight, __shfl_sync(kWholeWarp, factor, head));
  }
};

template <int kPaddedDim, int kHeads>
struct QueryRow {
  HeadLane<kPaddedDim> heads[kHeads];
  RotaryLane<kPaddedDim> rotary;

  __device__ __forceinline__ void load(const HeadRows& rows, int64_t row, int head_first) {
    const RopeCall& call = rows.call;
    const float* g_row = call.query + row * call.query_stride;
#pragma unroll
    for (int next = 0; next < kHeads; ++next) {
      const int head = min(head_first + next, call.num_heads - 1);
      rows.load(heads[next], g_row + int64_t{head} * call.head_dim);
    }
    rotary.load(call, row);
  }

  __device__ __forceinline__ void store(const RopeCall& call, int64_t row, int head_first,
                                        const HeadNorm<kPaddedDim>& norm, float* s_head) {
    norm.apply(heads, call.epsilon);
#pragma unroll
    for (int next = 0; next < kHeads; ++next) {
      const int head = head_first + next;
      if (head >= call.num_heads) return;
      heads[next].rotate(s_head, rotary);
      heads[next].store(reinterpret_cast<std::byte*>(call.query_out + (row * call.num_heads + head) * kPaddedDim +
                                                     HeadLane<kPaddedDim>::first_dim()));
    }
  }
};

template <int kPaddedDim>
struct KeyValueRow {
  HeadLane<kPaddedDim> keys[1];
  HeadLane<kPaddedDim> value;
  RotaryLane<kPaddedDim> rotary;
  int64_t slot;

  __device__ __forceinline__ void load(const HeadRows& rows, int64_t row, int kv_head) {
    const RopeCall& call = rows.call;
    const int64_t first = row * call.key_stride + int64_t{kv_head} * call.head_dim;
    rows.load(keys[0], call.key + first);
    rows.load(value, call.value + first);
    rotary.load(call, row);
    slot = call.slots[row];
  }

  __device__ __forceinline__ void store(const RopeCall& call, int64_t, int kv_head, const HeadNorm<kPaddedDim>& norm,
                                        float* s_head) {
    const KvPages& pages = call.pages;
    const int64_t offset = slot / kPageTokens * pages.page_bytes + kv_head * pages.head_bytes;
    HeadLane<kPaddedDim>& key = keys[0];
    norm.apply(keys, call.epsilon);
    key.rotate(s_head, rotary);
    if (!value.is_finite_in_bf16()) {
      key.fill(NAN);
      value.fill(0.0F);
    }
    if (pages.element != PageElement::kBf16) {
      if (!key.is_finite_in_bf16()) key.fill(NAN);
      key.round_to_e4m3();
      value.round_to_e4m3();
    }
    store_in_page(key, pages, pages.keys + offset, s_head);
    __syncwarp();
    store_in_page(value, pages, pages.values + offset, s_head);
    __syncwarp();
  }

  __device__ __forceinline__ void store_in_page(const HeadLane<kPaddedDim>& lane, const KvPages& pages,
                                                std::byte* g_page, float* s_head) const {
    const int page_row = static_cast<int>(slot % kPageTokens);
    if (holds_fp8(pages.element)) return lane.store_fp8(g_page, page_row, s_head);
    lane.store(g_page + swizzled_offset(page_row, HeadLane<kPaddedDim>::first_dim()));
  }
};

template <class Row, int kPaddedDim>
__device__ __forceinline__ void rope_rows(const HeadRows& rows, int64_t first_row, int64_t stride, int head,
                                          const HeadNorm<kPaddedDim>& norm, float* s_head) {
  const RopeCall& call = rows.call;
  Row current;
  if (first_row < call.count) current.load(rows, first_row, head);
  for (int64_t row = first_row; row < call.count; row += stride) {
    Row next;
    if (row + stride < call.count) next.load(rows, row + stride, head);
    current.store(call, row, head, norm, s_head);
    current = next;
  }
}

template <int kPaddedDim, int kHeads>
__global__ void __launch_bounds__(kRopeWarps* kWarpLanes, kRopeBlocks) rope_and_cache_kernel(const RopeCall call) {
  __shared__ float s_heads[kRopeWarps][kPaddedDim];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int query_tasks = (call.num_heads + kHeads - 1) / kHeads;
  const int row_tasks = query_tasks + call.num_kv_heads;
  const int64_t place = int64_t{blockIdx.x} * kRopeWarps + warp;
  const int64_t stride = int64_t{gridDim.x} * kRopeWarps / row_tasks;
  const int64_t first_row = place / row_tasks;
  const int task = static_cast<int>(place % row_tasks);
  const bool is_query = task < query_tasks;
  ptx::griddepcontrol_launch_dependents();
  const HeadRows rows(call);
  const HeadNorm<kPaddedDim> norm(call, is_query ? call.query_norm : call.key_norm);
  ptx::griddepcontrol_wait();
  if (first_row >= stride) return;
  if (is_query) {
    rope_rows<QueryRow<kPaddedDim, kHeads>>(rows, first_row, stride, task * kHeads, norm, s_heads[warp]);
  } else {
    rope_rows<KeyValueRow<kPaddedDim>>(rows, first_row, stride, task - query_tasks, norm, s_heads[warp]);
  }
}

__global__ void rotary_table_kernel(const RotaryTableCall call) {
  const int64_t half = call.rotary_dim / 2;
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= call.count * half) return;
  const double exponent = -2.0 * static_cast<double>(index % half) / static_cast<double>(call.rotary_dim);
  const double angle = static_cast<double>(call.positions[index / half]) * pow(call.theta, exponent);
  call.cosines[index] = static_cast<float>(cos(angle));
  call.sines[index] = static_cast<float>(sin(angle));
}

}
