#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/kernels/ptx/hopper.cuh"

namespace glint::cuda {

constexpr float kE4m3Largest = 448.0F;

__device__ __forceinline__ float largest_magnitude(float most, const float4& values) {
  return fmaxf(fmaxf(fmaxf(most, fabsf(values.x)), fmaxf(fabsf(values.y), fabsf(values.z))), fabsf(values.w));
}

__device__ __forceinline__ bool has_unwritten(const float4& values) {
  return __float_as_uint(values.x) == 0U || __float_as_uint(values.y) == 0U || __float_as_uint(values.z) == 0U ||
         __float_as_uint(values.w) == 0U;
}

struct ScaleDivision {
  static constexpr float kLeast = 0x1p-90F;
  static constexpr float kMost = 0x1p90F;

  float scale;
  float reciprocal;
  bool is_plain;

  __device__ __forceinline__ explicit ScaleDivision(float divisor)
      : scale(divisor), is_plain(divisor > kLeast && divisor < kMost) {
    reciprocal = __frcp_rn(divisor);
  }

  __device__ __forceinline__ float plain(float value) const {
    const float near = __fmul_rn(value, reciprocal);
    const float nearer = __fmaf_rn(__fmaf_rn(-near, scale, value), reciprocal, near);
    return copysignf(__fmaf_rn(__fmaf_rn(-nearer, scale, value), reciprocal, nearer), value);
  }

  __device__ __forceinline__ float4 divide(const float4& values) const {
    if (is_plain) return {plain(values.x), plain(values.y), plain(values.z), plain(values.w)};
    return {__fdiv_rn(values.x, scale), __fdiv_rn(values.y, scale), __fdiv_rn(values.z, scale),
            __fdiv_rn(values.w, scale)};
  }
};

__device__ __forceinline__ uint32_t e4m3_codes(const float4& values) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2({values.x, values.y}, __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2({values.z, values.w}, __NV_SATFINITE, __NV_E4M3);
  return low | high << 16U;
}

constexpr int kQuantisedWidthLimit = 1536;

template <int kVectors>
struct HiddenRow {
  float4 r_values[kVectors];

  static __device__ __forceinline__ int first_unit(int vector) { return vector * 128 + threadIdx.x % 32 * 4; }

  __device__ __forceinline__ void load(const float* g_row, int width) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int unit = first_unit(vector);
      r_values[vector] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (unit < width) r_values[vector] = __ldcg(reinterpret_cast<const float4*>(g_row + unit));
    }
  }

  __device__ __forceinline__ bool load_written(const float* g_row, int width) {
    bool is_written = true;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int unit = first_unit(vector);
      r_values[vector] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (unit >= width) continue;
      r_values[vector] = hopper::load_relaxed(g_row + unit);
    }
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      is_written = is_written && (first_unit(vector) >= width || !has_unwritten(r_values[vector]));
    }
    return __all_sync(~0U, is_written);
  }

  static __device__ __forceinline__ void mark_unwritten(float* g_row, int width) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int unit = first_unit(vector);
      if (unit < width) hopper::store_relaxed(g_row + unit, float4{0.0F, 0.0F, 0.0F, 0.0F});
    }
  }

  template <class Target>
  __device__ __forceinline__ float quantise_by_converged_warp(const Target& target, int width) const {
    float most = 0.0F;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) most = largest_magnitude(most, r_values[vector]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0U, most, distance));
    }
    const float scale = most == 0.0F ? 1.0F : __fdiv_rn(most, kE4m3Largest);
    const ScaleDivision by_scale(scale);
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int unit = first_unit(vector);
      if (unit >= width) continue;
      *reinterpret_cast<uint32_t*>(target.place(unit)) = e4m3_codes(by_scale.divide(r_values[vector]));
    }
    return scale;
  }
};

}
