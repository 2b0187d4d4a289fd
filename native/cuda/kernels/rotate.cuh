#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>

#include "cuda/attention.h"
#include "cuda/kernels/dependent.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace glint::cuda {

inline constexpr int kRotateWarps = 4;
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

  __device__ __forceinline__ void load(const RotateCall& call, int64_t row) {
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

  __device__ __forceinline__ void normalise(const HeadLane& weight, float inverse_dim, float epsilon) {
    const float factor = norm_factor(reduce_warp(sum_of_squares(), SumOf()), inverse_dim, epsilon);
#pragma unroll
    for (int index = 0; index < kDims; ++index) values[index] = weight.values[index] * values[index] * factor;
  }

  __device__ __forceinline__ void rotate(float* s_head, const RotaryLane<kPaddedDim>& rotary) {
#pragma unroll
    for (int index = 0; index < kDims; ++index) s_head[first_dim() + index] = values[index];
    __syncwarp();
#pragma unroll
    for (int index = 0; index < kDims; ++index) {
      const int other = rotary.other_dim(first_dim() + index);
      if (other >= 0) {
        values[index] =
            __fmaf_rn(values[index], rotary.cosines[index], __fmul_rn(s_head[other], rotary.sines[index]));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store(std::byte* g_target) const {
#pragma unroll
    for (int index = 0; index < kDims; index += 2) {
      reinterpret_cast<uint32_t*>(g_target)[index / 2] = pack_bf16(values[index], values[index + 1]);
    }
  }

  __device__ __forceinline__ static uint16_t code_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  }

  __device__ __forceinline__ void round_to_e4m3() {
#pragma unroll
    for (int index = 0; index < kDims; index += 2) {
      const __half2 pair = __nv_cvt_fp8x2_to_halfraw2(code_pair(values[index], values[index + 1]), __NV_E4M3);
      values[index] = __low2float(pair);
      values[index + 1] = __high2float(pair);
    }
  }

  __device__ __forceinline__ void store_codes(std::byte* g_page, int row, float* s_head) const {
#pragma unroll
    for (int index = 0; index < kDims; ++index) s_head[first_dim() + index] = values[index];
    __syncwarp();
    std::byte* g_target = g_page + code_group_offset(kPaddedDim, row, first_dim() / kCodeGroup);
#pragma unroll
    for (int index = 0; index < kDims; index += 2) {
      const int place = first_dim() + index;
      *reinterpret_cast<uint16_t*>(g_target + place % kCodeGroup) =
          code_pair(s_head[code_dim(place)], s_head[code_dim(place + 1)]);
    }
  }
};

template <int kPaddedDim>
struct HeadWork {
  HeadLane<kPaddedDim> values;
  HeadLane<kPaddedDim> weight;
  RotaryLane<kPaddedDim> rotary;
  int head;
  int kv_head;
  bool is_query;
  bool is_key;
  bool has_norm;
  bool has_finite_value = true;
  float inverse_dim;

  __device__ __forceinline__ void prepare(const RotateCall& call, int head_index) {
    head = head_index;
    kv_head = (head - call.num_heads) % call.num_kv_heads;
    is_query = head < call.num_heads;
    is_key = !is_query && head < call.num_heads + call.num_kv_heads;
    const float* g_norm = is_query ? call.query_norm : call.key_norm;
    has_norm = (is_query || is_key) && g_norm != nullptr;
    inverse_dim = __frcp_rn(static_cast<float>(call.head_dim));
    if (has_norm) weight.load(g_norm, call.head_dim);
  }

  __device__ __forceinline__ void load(const RotateCall& call, int64_t row) {
    if (is_query || is_key) rotary.load(call, row);
    if (is_query) {
      return values.load(call.query + row * call.query_stride + int64_t{head} * call.head_dim, call.head_dim);
    }
    const int64_t first = row * call.key_stride + int64_t{kv_head} * call.head_dim;
    HeadLane<kPaddedDim> value;
    value.load(call.value + first, call.head_dim);
    values.load((is_key ? call.key : call.value) + first, call.head_dim);
    has_finite_value = value.is_finite_in_bf16();
  }

  __device__ __forceinline__ void store(const RotateCall& call, int64_t row, float* s_head) {
    if (has_norm) values.normalise(weight, inverse_dim, call.epsilon);
    if (is_query || is_key) values.rotate(s_head, rotary);
    if (is_query) {
      values.store(reinterpret_cast<std::byte*>(call.query_out + (row * call.num_heads + head) * kPaddedDim +
                                                HeadLane<kPaddedDim>::first_dim()));
    } else {
      store_in_page(call.pages, call.slots[row], s_head);
    }
  }

  __device__ __forceinline__ void store_in_page(const PagePool& pages, int64_t slot, float* s_head) {
    const int page_row = static_cast<int>(slot % kPageTokens);
    std::byte* g_page =
        (is_key ? pages.keys : pages.values) + slot / kPageTokens * pages.page_bytes + kv_head * pages.head_bytes;
    if (!has_finite_value) values.fill(is_key ? NAN : 0.0F);
    if (pages.element != PageElement::kBf16) {
      if (is_key && !values.is_finite_in_bf16()) values.fill(NAN);
      values.round_to_e4m3();
    }
    if (holds_codes(pages.element)) return values.store_codes(g_page, page_row, s_head);
    values.store(g_page + swizzled_offset(page_row, HeadLane<kPaddedDim>::first_dim()));
  }
};

template <int kPaddedDim>
__global__ void __launch_bounds__(kRotateWarps* kWarpLanes) rotate_and_store_kernel(const RotateCall call) {
  __shared__ float s_heads[kRotateWarps][kPaddedDim];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int heads_per_row = call.num_heads + 2 * call.num_kv_heads;
  const int64_t task = int64_t{blockIdx.x} * kRotateWarps + warp;
  const int64_t row = task / heads_per_row;
  if (row >= call.count) return;
  HeadWork<kPaddedDim> work;
  let_next_kernel_start();
  work.prepare(call, static_cast<int>(task % heads_per_row));
  wait_for_previous_kernel();
  work.load(call, row);
  work.store(call, row, s_heads[warp]);
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
