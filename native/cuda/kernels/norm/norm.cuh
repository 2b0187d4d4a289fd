#pragma once

#include <cstdint>
#include <type_traits>

#include "base/contract.h"
#include "cuda/kernels/norm/row_tile.cuh"
#include "cuda/kernels/norm/rows.h"
#include "cuda/kernels/ptx/launch.cuh"

namespace glint::cuda {

struct StridedParts {
  const float* g_first;
  int64_t stride;

  __device__ __forceinline__ const float* operator[](int part) const { return g_first + part * stride; }
};

template <int kRoom>
__device__ __forceinline__ float reduce_tree(float (&r_parts)[kRoom], int num_parts) {
#pragma unroll
  for (int width = 1; width < kRoom; width *= 2) {
#pragma unroll
    for (int part = 0; part + width < kRoom; part += 2 * width) {
      const float sum = r_parts[part] + r_parts[part + width];
      r_parts[part] = kRoom <= 2 || part + width < num_parts ? sum : r_parts[part];
    }
  }
  return r_parts[0];
}

template <int kRoom, typename Parts>
__device__ __forceinline__ float reduced_number(const Parts& parts, int num_parts, int64_t index) {
  float r_parts[kRoom];
#pragma unroll
  for (int part = 0; part < kRoom; ++part) r_parts[part] = parts[min(part, num_parts - 1)][index];
  return reduce_tree(r_parts, num_parts);
}

template <int kRoom, typename Parts>
__device__ __forceinline__ float4 reduced_vector(const Parts& parts, int num_parts, int64_t index) {
  float r_parts[4][kRoom];
#pragma unroll
  for (int part = 0; part < kRoom; ++part) {
    const float4 loaded = *reinterpret_cast<const float4*>(parts[min(part, num_parts - 1)] + index);
    r_parts[0][part] = loaded.x;
    r_parts[1][part] = loaded.y;
    r_parts[2][part] = loaded.z;
    r_parts[3][part] = loaded.w;
  }
  return {reduce_tree(r_parts[0], num_parts), reduce_tree(r_parts[1], num_parts), reduce_tree(r_parts[2], num_parts),
          reduce_tree(r_parts[3], num_parts)};
}

struct NormShared {
  float2 parts[kRowThreads / kWarpLanes];
};

template <int kVectors, typename Combine>
__device__ __forceinline__ void combine_values(RowTile<kVectors>& tile, const RowTile<kVectors>& other,
                                               Combine combine) {
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
    for (int element = 0; element < kVectorFloats; ++element) {
      tile.values[vector][element] = combine(tile.values[vector][element], other.values[vector][element]);
    }
  }
}

template <int kVectors>
__device__ __forceinline__ void add(RowTile<kVectors>& tile, const RowTile<kVectors>& update) {
  combine_values(tile, update, [](float value, float other) { return value + other; });
}

template <int kVectors>
__device__ __forceinline__ void weigh(RowTile<kVectors>& tile, const RowTile<kVectors>& weight) {
  combine_values(tile, weight, [](float value, float other) { return other * value; });
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
      float4 reduced = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if (start < width) reduced = reduced_vector<kRoom>(parts, num_parts, offset + start);
      tile.values[vector][0] += reduced.x;
      tile.values[vector][1] += reduced.y;
      tile.values[vector][2] += reduced.z;
      tile.values[vector][3] += reduced.w;
    }
    return;
  }
  RowTile<kVectors>::for_each(width, [&](int vector, int element, int64_t index) {
    tile.values[vector][element] += reduced_number<kRoom>(parts, num_parts, offset + index);
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
__device__ __forceinline__ float norm_row(RowTile<kVectors>& tile, const RowTile<kVectors>& weight, int64_t width,
                                          float epsilon, NormShared& shared) {
  const float own_sum = tile.sum_of_squares();
  weigh(tile, weight);
  const SumAndHighest all = reduce_thread_block<kRowThreads>({own_sum, tile.highest_magnitude()}, shared.parts);
  const float factor = __fdiv_rn(1.0F, __fsqrt_rn(__fdiv_rn(all.sum, static_cast<float>(width)) + epsilon));
  scale_by(tile, factor);
  return all.highest * factor;
}

template <int kVectors>
__device__ __forceinline__ void norm_and_quantise(RowTile<kVectors>& tile, const RowTile<kVectors>& weight,
                                                  const NormCall& call, int64_t row, int64_t width, bool is_aligned,
                                                  NormShared& shared) {
  const float highest = norm_row(tile, weight, width, call.epsilon, shared);
  if (call.normed != nullptr) tile.store(call.normed + row * width, width, is_aligned);
  if (call.fp8 == nullptr) return;
  const float scale = fp8_scale(fmaxf(highest, 0.0F));
  if (threadIdx.x == 0) call.scales[row] = scale;
  tile.store_fp8(call.fp8 + row * call.fp8_stride, width, call.fp8_stride, scale,
                 is_aligned && call.fp8_stride % kVectorFloats == 0);
}

template <int kVectors, int kRoom>
__global__ void __launch_bounds__(kRowThreads) norm_kernel(const NormCall call) {
  __shared__ NormShared s_norm;
  const int64_t row = blockIdx.x;
  const bool is_aligned = call.width % kVectorFloats == 0;
  RowTile<kVectors> tile;
  RowTile<kVectors> weight;
  if (call.weight != nullptr) weight.load(call.weight, call.width, is_aligned);
  wait_and_launch_dependents(call.count);
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
__global__ void __launch_bounds__(kRowThreads, 1) norm_fixed_width_kernel(const NormCall call) {
  constexpr int64_t kWidth = kVectors * kRowThreads * kVectorFloats;
  __shared__ NormShared s_norm;
  __builtin_assume(threadIdx.x < kRowThreads);
  __builtin_assume(call.fp8_stride % kVectorFloats == 0);
  const int64_t row = blockIdx.x;
  float* g_hidden = call.hidden + row * kWidth;
  RowTile<kVectors> tile;
  RowTile<kVectors> update;
  RowTile<kVectors> weight;
  weight.load_from_l2(call.weight, kWidth);
  if (call.hidden_is_settled) tile.load_from_l2(g_hidden, kWidth);
  wait_and_launch_dependents(call.count);
  update.load_from_l2(call.parts + row * kWidth, kWidth);
  if (!call.hidden_is_settled) tile.load_from_l2(g_hidden, kWidth);
  add(tile, update);
  tile.store(g_hidden, kWidth, true);
  norm_and_quantise(tile, weight, call, row, kWidth, true, s_norm);
}

template <typename Visit>
void with_room_for(int32_t num_parts, Visit visit) {
  require_argument(num_parts >= 0 && num_parts <= kMaxParts, "a sum reduces ", num_parts, " parts; it reduces 0 to ",
                   kMaxParts);
  if (num_parts == 0) return visit(std::integral_constant<int, 0>());
  if (num_parts == 1) return visit(std::integral_constant<int, 1>());
  if (num_parts == 2) return visit(std::integral_constant<int, 2>());
  if (num_parts <= 4) return visit(std::integral_constant<int, 4>());
  visit(std::integral_constant<int, kMaxParts>());
}

template <typename Visit>
bool with_fixed_width(int64_t width, Visit visit) {
  constexpr int64_t kTileFloats = kRowThreads * kVectorFloats;
  if (width == 4 * kTileFloats) visit(std::integral_constant<int, 4>());
  if (width == 5 * kTileFloats) visit(std::integral_constant<int, 5>());
  return width == 4 * kTileFloats || width == 5 * kTileFloats;
}

template <typename Visit>
void with_norm_vectors(int64_t width, Visit visit) {
  constexpr int64_t kTileFloats = kRowThreads * kVectorFloats;
  require_argument(width <= 8 * kTileFloats, "a norm is ", width, " wide; at most ", 8 * kTileFloats);
  if (width <= kTileFloats) return visit(std::integral_constant<int, 1>());
  if (width <= 5 * kTileFloats) return visit(std::integral_constant<int, 5>());
  visit(std::integral_constant<int, 8>());
}

}
