#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/kernels/ptx/reduce.cuh"

namespace glint::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kVectorFloats = 4;
inline constexpr float kFp8Max = 448.0F;

struct PlainDivision {
  float divisor;

  __device__ __forceinline__ float operator()(float value) const { return __fdiv_rn(value, divisor); }
};

struct ReciprocalDivision {
  float divisor;
  float reciprocal;

  __device__ __forceinline__ static bool is_exact_for(float divisor) { return divisor > 0x1p-60F && divisor < 0x1p60F; }

  __device__ __forceinline__ float operator()(float value) const {
    const float near = value * reciprocal;
    const float nearer = fmaf(fmaf(-near, divisor, value), reciprocal, near);
    return copysignf(fmaf(fmaf(-nearer, divisor, value), reciprocal, nearer), value);
  }
};

template <typename Division>
__device__ __forceinline__ uint32_t fp8_pair(float low, float high, const Division& division) {
  return __nv_cvt_float2_to_fp8x2(make_float2(division(low), division(high)), __NV_SATFINITE, __NV_E4M3);
}

template <int kVectors>
struct RowTile {
  float values[kVectors][kVectorFloats];

  __device__ static int64_t first(int vector) { return (int64_t{vector} * kRowThreads + threadIdx.x) * kVectorFloats; }

  template <typename Visit>
  __device__ __forceinline__ static void for_each(int64_t width, Visit visit) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
      for (int element = 0; element < kVectorFloats; ++element) {
        if (first(vector) + element < width) visit(vector, element, first(vector) + element);
      }
    }
  }

  __device__ __forceinline__ void load(const float* g_row, int64_t width, bool is_aligned) {
    if (is_aligned) {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        float4 loaded = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        if (first(vector) < width) loaded = *reinterpret_cast<const float4*>(g_row + first(vector));
        values[vector][0] = loaded.x;
        values[vector][1] = loaded.y;
        values[vector][2] = loaded.z;
        values[vector][3] = loaded.w;
      }
      return;
    }
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
      for (int element = 0; element < kVectorFloats; ++element) {
        const int64_t index = first(vector) + element;
        values[vector][element] = index < width ? g_row[index] : 0.0F;
      }
    }
  }

  __device__ __forceinline__ void load_from_l2(const float* g_row, int64_t width) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      float4 loaded = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if (first(vector) < width) loaded = __ldcg(reinterpret_cast<const float4*>(g_row + first(vector)));
      values[vector][0] = loaded.x;
      values[vector][1] = loaded.y;
      values[vector][2] = loaded.z;
      values[vector][3] = loaded.w;
    }
  }

  __device__ __forceinline__ void store(float* g_row, int64_t width, bool is_aligned) const {
    if (is_aligned) {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        if (first(vector) >= width) continue;
        *reinterpret_cast<float4*>(g_row + first(vector)) =
            make_float4(values[vector][0], values[vector][1], values[vector][2], values[vector][3]);
      }
      return;
    }
    for_each(width, [&](int vector, int element, int64_t index) { g_row[index] = values[vector][element]; });
  }

  __device__ __forceinline__ float sum_of_squares() const {
    float sum = 0.0F;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
      for (int element = 0; element < kVectorFloats; ++element) {
        sum = fmaf(values[vector][element], values[vector][element], sum);
      }
    }
    return sum;
  }

  __device__ __forceinline__ float highest_magnitude() const {
    float highest = 0.0F;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
      for (int element = 0; element < kVectorFloats; ++element) {
        highest = fmaxf(highest, fabsf(values[vector][element]));
      }
    }
    return highest;
  }

  __device__ __forceinline__ void store_fp8(uint8_t* g_fp8, int64_t width, int64_t stride, float scale,
                                            bool is_aligned) const {
    if (ReciprocalDivision::is_exact_for(scale)) {
      store_quotients(g_fp8, width, is_aligned, ReciprocalDivision{scale, __frcp_rn(scale)});
    } else {
      store_quotients(g_fp8, width, is_aligned, PlainDivision{scale});
    }
    for (int64_t index = width + threadIdx.x; index < stride; index += kRowThreads) g_fp8[index] = 0;
  }

 private:
  template <typename Division>
  __device__ __forceinline__ void store_quotients(uint8_t* g_fp8, int64_t width, bool is_aligned,
                                                  const Division& division) const {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t start = first(vector);
      const uint32_t low = fp8_pair(values[vector][0], values[vector][1], division);
      const uint32_t fp8 = low | (fp8_pair(values[vector][2], values[vector][3], division) << 16U);
      if (is_aligned && start + kVectorFloats <= width) {
        *reinterpret_cast<uint32_t*>(g_fp8 + start) = fp8;
      } else {
#pragma unroll
        for (int element = 0; element < kVectorFloats; ++element) {
          if (start + element < width) g_fp8[start + element] = static_cast<uint8_t>(fp8 >> (8 * element));
        }
      }
    }
  }
};

__device__ __forceinline__ float fp8_scale(float highest) {
  const float scale = __fdiv_rn(highest, kFp8Max);
  return scale == 0.0F ? 1.0F : scale;
}

}
