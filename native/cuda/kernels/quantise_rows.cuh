#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace glint::cuda {

constexpr float kE4m3Largest = 448.0F;

__device__ __forceinline__ float largest_magnitude(float most, const float4& values) {
  return fmaxf(fmaxf(fmaxf(most, fabsf(values.x)), fmaxf(fabsf(values.y), fabsf(values.z))), fabsf(values.w));
}

__device__ __forceinline__ uint32_t e4m3_codes(const float4& values, float scale) {
  const float2 low = {__fdiv_rn(values.x, scale), __fdiv_rn(values.y, scale)};
  const float2 high = {__fdiv_rn(values.z, scale), __fdiv_rn(values.w, scale)};
  const uint32_t low_codes = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3);
  const uint32_t high_codes = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3);
  return low_codes | high_codes << 16U;
}

constexpr int kQuantisedWidthLimit = 1536;

template <int kVectors, class Target>
__device__ __forceinline__ float quantise_row_converged_warp(const Target& target, const float* g_row, int width) {
  const int lane = threadIdx.x % 32;
  float4 r_values[kVectors];
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
    const int unit = vector * 128 + lane * 4;
    r_values[vector] = {0.0F, 0.0F, 0.0F, 0.0F};
    if (unit < width) r_values[vector] = __ldcg(reinterpret_cast<const float4*>(g_row + unit));
  }
  float most = 0.0F;
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) most = largest_magnitude(most, r_values[vector]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0U, most, distance));
  }
  const float scale = most == 0.0F ? 1.0F : __fdiv_rn(most, kE4m3Largest);
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
    const int unit = vector * 128 + lane * 4;
    if (unit < width) *reinterpret_cast<uint32_t*>(target.place(unit)) = e4m3_codes(r_values[vector], scale);
  }
  return scale;
}

}
