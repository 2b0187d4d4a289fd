#pragma once

#include <cuda_bf16.h>

#include "cuda/kernels/ptx/dependent.cuh"
#include "cuda/kernels/norm/row_tile.cuh"
#include "cuda/kernels/norm/rows.h"
#include "model/sampling.h"

namespace glint::cuda {

inline constexpr int kGatherVectors = 5;

__device__ __forceinline__ int32_t embedded_token(const EmbedCall& call, int64_t row) {
  const int32_t token = call.tokens[row];
  const int32_t sampled_row = call.sampled_rows == nullptr ? kNoSampledRow : call.sampled_rows[row];
  if (sampled_row == kNoSampledRow) return token;
  return min(max(call.sampled[sampled_row].token, 0), call.vocab_size - 1);
}

__device__ __forceinline__ float4 widened_bf16(uint2 values) {
  return make_float4(__uint_as_float(values.x << 16U), __uint_as_float(values.x & 0xffff0000U),
                     __uint_as_float(values.y << 16U), __uint_as_float(values.y & 0xffff0000U));
}

__global__ void __launch_bounds__(kRowThreads) embed_kernel(const EmbedCall call) {
  const int64_t row = blockIdx.x;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const uint16_t* g_source = call.table + embedded_token(call, row) * call.width;
  float* g_target = call.hidden + row * call.width;
  const int64_t num_vectors = call.width % kVectorFloats == 0 ? call.width / kVectorFloats : 0;
#pragma unroll 5
  for (int64_t vector = threadIdx.x; vector < num_vectors; vector += kRowThreads) {
    reinterpret_cast<float4*>(g_target)[vector] = widened_bf16(reinterpret_cast<const uint2*>(g_source)[vector]);
  }
  for (int64_t index = num_vectors * kVectorFloats + threadIdx.x; index < call.width; index += kRowThreads) {
    g_target[index] = __uint_as_float(static_cast<uint32_t>(g_source[index]) << 16U);
  }
}

__global__ void __launch_bounds__(kRowThreads) add_rows_kernel(float* hidden, const float* update,
                                                                      int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * kRowThreads;
  const int64_t start = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  const int64_t num_vectors = count / kVectorFloats;
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (int64_t vector = start; vector < num_vectors; vector += stride) {
    float4 sum = reinterpret_cast<const float4*>(hidden)[vector];
    const float4 change = reinterpret_cast<const float4*>(update)[vector];
    sum.x += change.x;
    sum.y += change.y;
    sum.z += change.z;
    sum.w += change.w;
    reinterpret_cast<float4*>(hidden)[vector] = sum;
  }
  for (int64_t index = num_vectors * kVectorFloats + start; index < count; index += stride) {
    hidden[index] += update[index];
  }
}

__global__ void __launch_bounds__(kRowThreads) gather_rows_kernel(const GatherCall call) {
  const int64_t row = blockIdx.x;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t source = call.rows[row] * call.width;
  const bool is_aligned = call.width % kVectorFloats == 0;
  for (int64_t first = 0; first < call.width; first += kGatherVectors * kRowThreads * kVectorFloats) {
    const int64_t width = call.width - first;
    RowTile<kGatherVectors> tile;
    tile.load(call.in + source + first, width, is_aligned);
    if (call.update != nullptr) {
      RowTile<kGatherVectors> update;
      update.load(call.update + source + first, width, is_aligned);
      RowTile<kGatherVectors>::for_each(width, [&](int vector, int element, int64_t) {
        tile.values[vector][element] += update.values[vector][element];
      });
    }
    tile.store(call.out + row * call.width + first, width, is_aligned);
  }
}

}
