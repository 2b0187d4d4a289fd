#pragma once

#include "cuda/kernels/ptx/dependent.cuh"
#include "cuda/kernels/norm/part_tree.cuh"
#include "cuda/kernels/norm/row_tile.cuh"
#include "cuda/kernels/norm/rows.h"

namespace glint::cuda {

struct NormShared {
  float2 parts[kRowThreads / kWarpLanes];
};

template <int kVectors, typename Join>
__device__ __forceinline__ void join_values(RowTile<kVectors>& tile, const RowTile<kVectors>& other, Join join) {
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
    for (int element = 0; element < kVectorFloats; ++element) {
      tile.values[vector][element] = join(tile.values[vector][element], other.values[vector][element]);
    }
  }
}

template <int kVectors>
__device__ __forceinline__ void add(RowTile<kVectors>& tile, const RowTile<kVectors>& update) {
  join_values(tile, update, [](float value, float other) { return value + other; });
}

template <int kVectors>
__device__ __forceinline__ void weigh(RowTile<kVectors>& tile, const RowTile<kVectors>& weight) {
  join_values(tile, weight, [](float value, float other) { return other * value; });
}

template <int kVectors, int kRoom, typename Parts>
__device__ __forceinline__ void add_parts(RowTile<kVectors>& tile, const Parts& parts, int num_parts, int64_t offset,
                                          int64_t width, bool is_aligned) {
  if constexpr (kRoom == 1) {
    RowTile<kVectors> update;
    update.load(parts[0] + offset, width, is_aligned);
    add(tile, update);
    return;
  }
  if (is_aligned) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t start = RowTile<kVectors>::first(vector);
      float4 joined = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if (start < width) joined = joined_vector<kRoom>(parts, num_parts, offset + start);
      tile.values[vector][0] += joined.x;
      tile.values[vector][1] += joined.y;
      tile.values[vector][2] += joined.z;
      tile.values[vector][3] += joined.w;
    }
    return;
  }
  RowTile<kVectors>::for_each(width, [&](int vector, int element, int64_t index) {
    tile.values[vector][element] += joined_number<kRoom>(parts, num_parts, offset + index);
  });
}

template <int kVectors>
__device__ __forceinline__ void scale_by(RowTile<kVectors>& tile, float factor) {
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
    for (int element = 0; element < kVectorFloats; ++element) tile.values[vector][element] *= factor;
  }
}

template <int kVectors>
__device__ __forceinline__ void norm_and_quantise(RowTile<kVectors>& tile, const RowTile<kVectors>& weight,
                                                  const NormCall& call, int64_t row, int64_t width, bool is_aligned,
                                                  NormShared& shared) {
  const float own_sum = tile.sum_of_squares();
  weigh(tile, weight);
  const SumAndHighest all = reduce_thread_block<kRowThreads>({own_sum, tile.highest_magnitude()}, shared.parts);
  const float factor = __fdiv_rn(1.0F, __fsqrt_rn(__fdiv_rn(all.sum, static_cast<float>(width)) + call.epsilon));
  scale_by(tile, factor);
  if (call.normed != nullptr) tile.store(call.normed + row * width, width, is_aligned);
  if (call.codes == nullptr) return;
  const float code_step = code_scale(fmaxf(all.highest * factor, 0.0F));
  if (threadIdx.x == 0) call.scales[row] = code_step;
  tile.store_codes(call.codes + row * call.code_stride, width, call.code_stride, code_step,
                   is_aligned && call.code_stride % kVectorFloats == 0);
}

template <int kVectors, int kRoom>
__global__ void __launch_bounds__(kRowThreads) norm_kernel(const NormCall call) {
  __shared__ NormShared s_norm;
  const int64_t row = blockIdx.x;
  const bool is_aligned = call.width % kVectorFloats == 0;
  RowTile<kVectors> tile;
  RowTile<kVectors> weight;
  if (call.weight != nullptr) weight.load(call.weight, call.width, is_aligned);
  wait_and_let_next_kernel_start(call.count);
  tile.load(call.hidden + row * call.width, call.width, is_aligned);
  if constexpr (kRoom > 0) {
    const bool has_aligned_parts = is_aligned && (kRoom == 1 || call.part_stride % kVectorFloats == 0);
    add_parts<kVectors, kRoom>(tile, StridedParts{call.parts, call.part_stride}, call.num_parts, row * call.width,
                               call.width, has_aligned_parts);
    tile.store(call.hidden + row * call.width, call.width, is_aligned);
  }
  if (call.weight != nullptr) norm_and_quantise(tile, weight, call, row, call.width, is_aligned, s_norm);
}

template <int kVectors>
__global__ void __launch_bounds__(kRowThreads, 1) whole_norm_kernel(const NormCall call) {
  constexpr int64_t kWidth = kVectors * kRowThreads * kVectorFloats;
  __shared__ NormShared s_norm;
  __builtin_assume(threadIdx.x < kRowThreads);
  __builtin_assume(call.code_stride % kVectorFloats == 0);
  const int64_t row = blockIdx.x;
  float* g_hidden = call.hidden + row * kWidth;
  RowTile<kVectors> tile;
  RowTile<kVectors> update;
  RowTile<kVectors> weight;
  weight.load_from_l2(call.weight, kWidth);
  if (call.hidden_is_settled) tile.load_from_l2(g_hidden, kWidth);
  wait_and_let_next_kernel_start(call.count);
  update.load_from_l2(call.parts + row * kWidth, kWidth);
  if (!call.hidden_is_settled) tile.load_from_l2(g_hidden, kWidth);
  add(tile, update);
  tile.store(g_hidden, kWidth, true);
  norm_and_quantise(tile, weight, call, row, kWidth, true, s_norm);
}

}
