#pragma once

#include <cstdint>

#include "base/rng.h"

namespace glint::cuda {

inline constexpr float kMassOne = 0x1p45F;
inline constexpr float kGumbelReach = 40.35F;
inline constexpr float kNearMargin = 1e-3F;

__device__ __forceinline__ float next_term(float series, float rest, float constant) {
  return __fadd_rn(__fmul_rn(series, rest), constant);
}

__device__ __forceinline__ float weight_of_gap(float gap) {
  constexpr float kRounder = 12582912.0F;
  const uint32_t furthest = __float_as_uint(87.0F);
  const float value = -__uint_as_float(min(__float_as_uint(gap), furthest));
  const float shifted = __fadd_rn(__fmul_rn(value, 1.44269504F), kRounder);
  const float whole = __fsub_rn(shifted, kRounder);
  const float rest =
      __fadd_rn(__fsub_rn(value, __fmul_rn(whole, 0.693359375F)), __fmul_rn(whole, 2.12194440e-4F));
  float series = 1.0F / 5040.0F;
  series = next_term(series, rest, 1.0F / 720.0F);
  series = next_term(series, rest, 1.0F / 120.0F);
  series = next_term(series, rest, 1.0F / 24.0F);
  series = next_term(series, rest, 1.0F / 6.0F);
  series = next_term(series, rest, 0.5F);
  series = next_term(series, rest, 1.0F);
  series = next_term(series, rest, 1.0F);
  const int32_t exponent = __float_as_int(shifted) - __float_as_int(kRounder) + 127;
  return __fmul_rn(series, __int_as_float(exponent << 23));
}

__device__ __forceinline__ uint64_t mass_of_gap(float gap) { return __float2ull_rn(weight_of_gap(gap) * kMassOne); }

__device__ __forceinline__ double gumbel_of_bits(uint64_t bits) { return -log(-log(open_uniform(bits))); }

__device__ __forceinline__ float near_gumbel_bound(uint64_t bits) {
  constexpr float kLn2 = 0.6931472F;
  return static_cast<float>(__clzll(static_cast<long long>(~bits | 0xfffU)) + 1) * kLn2 + kNearMargin;
}

__device__ __forceinline__ float near_gumbel(uint64_t bits) {
  constexpr uint64_t kHighest = (uint64_t{1} << 52U) - 1;
  constexpr uint64_t kHalf = uint64_t{1} << 51U;
  const uint64_t drawn = bits >> 12U;
  const bool is_low = drawn < kHalf;
  const float share = (__ull2float_rn(is_low ? drawn : kHighest - drawn) + 0.5F) * 0x1p-52F;
  const float exponential = is_low ? -__logf(share) : -log1pf(-share);
  return -__logf(exponential);
}

}
