#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/kernels/reduce.cuh"

namespace glint::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kVectorFloats = 4;
inline constexpr float kCodeMax = 448.0F;

template <int kVectors>
struct RowTile {
  float values[kVectors][kVectorFloats];

  __device__ static int64_t first(int vector) {
    return (int64_t{vector} * kRowThreads + threadIdx.x) * kVectorFloats;
  }

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
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t start = first(vector);
      if (is_aligned && start + kVectorFloats <= width) {
        const float4 loaded = *reinterpret_cast<const float4*>(g_row + start);
        values[vector][0] = loaded.x;
        values[vector][1] = loaded.y;
        values[vector][2] = loaded.z;
        values[vector][3] = loaded.w;
      } else {
#pragma unroll
        for (int element = 0; element < kVectorFloats; ++element) {
          values[vector][element] = start + element < width ? g_row[start + element] : 0.0F;
        }
      }
    }
  }

  __device__ __forceinline__ void store(float* g_row, int64_t width, bool is_aligned) const {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t start = first(vector);
      if (is_aligned && start + kVectorFloats <= width) {
        *reinterpret_cast<float4*>(g_row + start) =
            make_float4(values[vector][0], values[vector][1], values[vector][2], values[vector][3]);
      } else {
#pragma unroll
        for (int element = 0; element < kVectorFloats; ++element) {
          if (start + element < width) g_row[start + element] = values[vector][element];
        }
      }
    }
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

  __device__ __forceinline__ void store_codes(uint8_t* g_codes, int64_t width, int64_t stride, float scale,
                                              bool is_aligned) const {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t start = first(vector);
      const uint32_t low = code_pair(values[vector][0], values[vector][1], scale);
      const uint32_t high = code_pair(values[vector][2], values[vector][3], scale);
      const uint32_t codes = low | (high << 16U);
      if (is_aligned && start + kVectorFloats <= width) {
        *reinterpret_cast<uint32_t*>(g_codes + start) = codes;
      } else {
#pragma unroll
        for (int element = 0; element < kVectorFloats; ++element) {
          if (start + element < width) g_codes[start + element] = static_cast<uint8_t>(codes >> (8 * element));
        }
      }
    }
    for (int64_t index = width + threadIdx.x; index < stride; index += kRowThreads) g_codes[index] = 0;
  }

  __device__ __forceinline__ static uint32_t code_pair(float low, float high, float scale) {
    const float2 scaled = make_float2(__fdiv_rn(low, scale), __fdiv_rn(high, scale));
    return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
  }
};

__device__ __forceinline__ float code_scale(float highest) {
  const float scale = __fdiv_rn(highest, kCodeMax);
  return scale == 0.0F ? 1.0F : scale;
}

}
