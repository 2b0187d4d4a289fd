#pragma once

#include <cstdint>

#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/ptx/mma.cuh"

namespace glint::cuda {

inline constexpr int kLowestExponent = -(1 << 20);
inline constexpr int kHighestExponent = 1 << 20;
inline constexpr float kLog2E = 1.44269504F;

__device__ __forceinline__ float power_of_two(int exponent) {
  return exponent < -126 ? 0.0F : __int_as_float((exponent + 127) << 23);
}

__device__ __forceinline__ int covering_exponent(float highest) {
  return min(max(__float2int_ru(highest), kLowestExponent), kHighestExponent);
}

__device__ __forceinline__ float max_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kWholeWarp, value, 2));
}

__device__ __forceinline__ float sum_of_quad(float value) {
  value += __shfl_xor_sync(kWholeWarp, value, 1);
  return value + __shfl_xor_sync(kWholeWarp, value, 2);
}

struct SplitReduction {
  int exponent = kLowestExponent;
  float weight_sum = 0.0F;
  float keep = 0.0F;
  float take = 0.0F;

  __device__ __forceinline__ void add(int split_exponent, float split_weight_sum) {
    const int highest = max(exponent, split_exponent);
    keep = power_of_two(exponent - highest);
    take = power_of_two(split_exponent - highest);
    weight_sum = weight_sum * keep + split_weight_sum * take;
    exponent = highest;
  }

  __device__ __forceinline__ float reduced(float sum, float split_sum) const { return sum * keep + split_sum * take; }
};

}
