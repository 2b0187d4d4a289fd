#pragma once

#include <cstdint>

namespace glint::cuda {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kWholeWarp = 0xffffffffU;

struct MaxOf {
  __device__ float operator()(float left, float right) const { return fmaxf(left, right); }
};

template <typename Reduce>
__device__ __forceinline__ float reduce_warp(float value, Reduce reduce) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value = reduce(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
}

template <int kThreads, typename Reduce>
__device__ __forceinline__ float reduce_thread_block(float value, float* s_parts, Reduce reduce) {
  constexpr int kWarps = kThreads / kWarpLanes;
  static_assert(kWarps <= kWarpLanes, "one warp reduces the parts");
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  value = reduce_warp(value, reduce);
  if (lane == 0) s_parts[warp] = value;
  __syncthreads();
  value = s_parts[0];
#pragma unroll
  for (int part = 1; part < kWarps; ++part) value = reduce(value, s_parts[part]);
  return value;
}

struct SumAndHighest {
  float sum;
  float highest;

  __device__ __forceinline__ void reduce(float other_sum, float other_highest) {
    sum = sum + other_sum;
    highest = fmaxf(highest, other_highest);
  }
};

template <int kThreads>
__device__ __forceinline__ SumAndHighest reduce_thread_block(SumAndHighest value, float2* s_parts) {
  constexpr int kWarps = kThreads / kWarpLanes;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    const float other_sum = __shfl_xor_sync(kWholeWarp, value.sum, distance);
    value.reduce(other_sum, __shfl_xor_sync(kWholeWarp, value.highest, distance));
  }
  if (thread % kWarpLanes == 0) s_parts[thread / kWarpLanes] = {value.sum, value.highest};
  __syncthreads();
  value = {s_parts[0].x, s_parts[0].y};
#pragma unroll
  for (int part = 1; part < kWarps; ++part) value.reduce(s_parts[part].x, s_parts[part].y);
  return value;
}

}
