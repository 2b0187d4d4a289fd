#pragma once

#include "cuda/kernels/gemm/wide_plan.cuh"

namespace glint::cuda {

template <int kTokens, class Finish>
struct TokenScales {
  static constexpr int kParts = (kTokens + 31) / 32;

  float r_scales[kParts];

  __device__ __forceinline__ TokenScales(const Finish& finish, const ProductTile& tile) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      r_scales[part] = finish.token_scale(tile, part * 32 + static_cast<int>(threadIdx.x % 32));
    }
  }

  __device__ __forceinline__ float2 of_group(int group) const {
    const int lane = group % 4 * kGroupTokens + threadIdx.x % 4 * 2;
    return {__shfl_sync(~0U, r_scales[group / 4], lane), __shfl_sync(~0U, r_scales[group / 4], lane + 1)};
  }
};

template <class Shape, int kTokens, class Finish>
__device__ __forceinline__ void stage_values(WidePlan<Shape>& s_plan, const Finish& finish,
                                             const float (&r_total)[kTokens / 2], const typename Finish::RowFacts& rows,
                                             const TokenScales<kTokens, Finish>& scales) {
  const int warpgroup = threadIdx.x / 128 - 1;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int token = lane % 4 * 2;
  float* s_out = s_plan.staged.outs[warpgroup * 2 + warp / 2];
#pragma unroll
  for (int group = 0; group < kTokens / kGroupTokens; ++group) {
    const float2 pair = scales.of_group(group);
    float* s_group = s_out + group * kGroupTokens * kStagedRows + lane / 4 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = warp % 2 * 4 + half * 2 + lane / 16;
      const float* r_sums = r_total + group * 4 + half * 2;
      s_group[token * kStagedRows + (chunk ^ token) * 4] = finish.value(r_sums[0], pair.x, rows, half);
      s_group[(token + 1) * kStagedRows + (chunk ^ (token + 1)) * 4] = finish.value(r_sums[1], pair.y, rows, half);
    }
  }
}

template <class Shape, int kTokens, class Finish>
__device__ __forceinline__ void store_staged(WidePlan<Shape>& s_plan, const Finish& finish, const ProductTile& tile,
                                             const float (&r_total)[kTokens / 2], const typename Finish::RowFacts& rows,
                                             const TokenScales<kTokens, Finish>& scales) {
  const int warpgroup = threadIdx.x / 128 - 1;
  const bool issues = threadIdx.x % 128 == 0;
  if (issues) hopper::wait_until_stores_read();
  hopper::named_barrier_sync(2 + warpgroup, 128);
  stage_values<Shape, kTokens>(s_plan, finish, r_total, rows, scales);
  hopper::fence_proxy_async();
  hopper::named_barrier_sync(2 + warpgroup, 128);
  if (issues) {
    const int row = tile.row_tile * kProductTileRows + warpgroup * 64;
    hopper::store_tensor(finish.out_map, s_plan.staged.outs[warpgroup * 2], row, tile.tokens.row_first);
    hopper::store_tensor(finish.out_map, s_plan.staged.outs[warpgroup * 2 + 1], row + kStagedRows, tile.tokens.row_first);
    hopper::commit_stores();
  }
}

template <class Shape, int kTokens, class Finish>
__device__ __forceinline__ void store_direct(const Finish& finish, const ProductTile& tile,
                                             const float (&r_total)[kTokens / 2], const typename Finish::RowFacts& rows,
                                             const TokenScales<kTokens, Finish>& scales) {
#pragma unroll
  for (int group = 0; group < kTokens / kGroupTokens; ++group) {
    const int column = group * kGroupTokens + threadIdx.x % 4 * 2;
    finish.store_group(tile, threadIdx.x / 32 - 4, column, r_total + group * 4, rows, scales.of_group(group));
  }
}

}
