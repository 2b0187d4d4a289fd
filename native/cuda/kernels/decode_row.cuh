#pragma once

#include <cuda_fp8.h>

#include "cuda/attention.h"
#include "cuda/kernels/row_tile.cuh"
#include "cuda/kernels/softmax.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace glint::cuda {

inline constexpr int kDecodeWarps = 4;
inline constexpr int kDecodeConsumers = kDecodeWarps * kWarpLanes;

__device__ __forceinline__ int decode_lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ __forceinline__ int decode_warp() { return static_cast<int>(threadIdx.x) / kWarpLanes; }
__device__ __forceinline__ int decode_head(int half) { return decode_lane() / 4 + 8 * half; }

struct HeadShape {
  int group_heads;
  int head_dim;

  __device__ int width() const { return group_heads * head_dim; }
};

template <int kDimTiles>
struct HeadSums {
  FragmentC sums[kDimTiles];
  float weight_sum[2];
  int exponent[2];
  int dim_first;

  __device__ __forceinline__ void clear(int first) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) sums[tile] = {};
    exponent[0] = exponent[1] = kLowestExponent;
    weight_sum[0] = weight_sum[1] = 0.0F;
    dim_first = first;
  }

  __device__ __forceinline__ int dim(int tile) const { return dim_first + tile * 8 + decode_lane() % 4 * 2; }

  __device__ __forceinline__ void scale_sums(int half, float factor) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      sums[tile].values[2 * half] *= factor;
      sums[tile].values[2 * half + 1] *= factor;
    }
  }

  __device__ __forceinline__ void divide_by_weights() {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        sums[tile].values[element] = __fdiv_rn(sums[tile].values[element], weight_sum[element / 2]);
      }
    }
  }

  template <typename Visit>
  __device__ __forceinline__ void for_each_pair(const HeadShape& shape, Visit visit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (decode_head(half) >= shape.group_heads) continue;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        if (dim(tile) >= shape.head_dim) continue;
        visit(decode_head(half) * shape.head_dim + dim(tile),
              make_float2(sums[tile].values[2 * half], sums[tile].values[2 * half + 1]));
      }
    }
  }

  __device__ __forceinline__ float highest_magnitude_of_warp(const HeadShape& shape) const {
    float highest = 0.0F;
    for_each_pair(shape, [&](int, float2 pair) { highest = fmaxf(highest, fmaxf(fabsf(pair.x), fabsf(pair.y))); });
    return reduce_warp(highest, MaxOf());
  }

  __device__ __forceinline__ void store(float* g_out, const HeadShape& shape) const {
    for_each_pair(shape, [&](int place, float2 pair) { *reinterpret_cast<float2*>(g_out + place) = pair; });
  }

  __device__ __forceinline__ void store_codes(uint8_t* g_codes, const HeadShape& shape, float scale) const {
    for_each_pair(shape, [&](int place, float2 pair) {
      *reinterpret_cast<uint16_t*>(g_codes + place) =
          static_cast<uint16_t>(code_pair(pair.x, pair.y, PlainDivision{scale}));
    });
  }

  __device__ __forceinline__ int partial_place(int tile) const {
    return (dim_first / 8 + tile) * kWarpLanes + decode_lane();
  }

  __device__ __forceinline__ void store_partial(float* g_partial, bool stores_weights) const {
    auto* g_sums = reinterpret_cast<float4*>(g_partial + 2 * kMaxGroupHeads);
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const FragmentC& sum = sums[tile];
      g_sums[partial_place(tile)] = make_float4(sum.values[0], sum.values[1], sum.values[2], sum.values[3]);
    }
    if (stores_weights && decode_lane() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        g_partial[decode_head(half)] = __int_as_float(exponent[half]);
        g_partial[kMaxGroupHeads + decode_head(half)] = weight_sum[half];
      }
    }
  }

  __device__ __forceinline__ void join_partial(SplitJoin (&joins)[2], const float* g_partial) {
    const auto* g_sums = reinterpret_cast<const float4*>(g_partial + 2 * kMaxGroupHeads);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      joins[half].add(__float_as_int(__ldcg(g_partial + decode_head(half))),
                      __ldcg(g_partial + kMaxGroupHeads + decode_head(half)));
    }
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float4 split = __ldcg(g_sums + partial_place(tile));
      sums[tile].values[0] = joins[0].joined(sums[tile].values[0], split.x);
      sums[tile].values[1] = joins[0].joined(sums[tile].values[1], split.y);
      sums[tile].values[2] = joins[1].joined(sums[tile].values[2], split.z);
      sums[tile].values[3] = joins[1].joined(sums[tile].values[3], split.w);
    }
  }

  __device__ __forceinline__ void join_partials(const float* g_partials, int64_t stride, int num_splits) {
    SplitJoin joins[2];
#pragma unroll 4
    for (int split = 0; split < num_splits; ++split) join_partial(joins, g_partials + split * stride);
    weight_sum[0] = joins[0].weight_sum;
    weight_sum[1] = joins[1].weight_sum;
  }
};

}
