#pragma once

#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/attention/pages.cuh"

namespace glint::cuda {

inline constexpr int kDequantiseThreads = 128;

__device__ __forceinline__ void dequantise_group(std::byte* g_page, const uint4& fp8, int row, int dim) {
  const uint32_t words[4] = {fp8.x, fp8.y, fp8.z, fp8.w};
  uint32_t low[4];
  uint32_t high[4];
#pragma unroll
  for (int word = 0; word < 4; ++word) dequantise_fp8_or_nan(words[word], low[word], high[word]);
  *reinterpret_cast<uint4*>(g_page + swizzled_offset(row, dim)) = make_uint4(low[0], low[1], low[2], low[3]);
  *reinterpret_cast<uint4*>(g_page + swizzled_offset(row, dim + kChunkDims)) =
      make_uint4(high[0], high[1], high[2], high[3]);
}

template <int kPaddedDim>
__global__ void __launch_bounds__(kDequantiseThreads) dequantise_kv_kernel(const DequantiseKvCall call) {
  constexpr int kRowGroups = kPaddedDim / kFp8Group;
  constexpr int kThreadGroups = kPageTokens * kRowGroups / kDequantiseThreads;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t page = call.page_table[blockIdx.x];
  const int64_t kv_head = blockIdx.y / 2;
  const bool is_key = blockIdx.y % 2 == 0;
  const KvPages& from = call.fp8;
  const KvPages& to = call.bf16;
  const std::byte* g_fp8 = (is_key ? from.keys : from.values) + page * from.page_bytes + kv_head * from.head_bytes;
  std::byte* g_bf16 = (is_key ? to.keys : to.values) + page * to.page_bytes + kv_head * to.head_bytes;
  uint4 fp8[kThreadGroups];
#pragma unroll
  for (int index = 0; index < kThreadGroups; ++index) {
    fp8[index] = reinterpret_cast<const uint4*>(g_fp8)[index * kDequantiseThreads + static_cast<int>(threadIdx.x)];
  }
#pragma unroll
  for (int index = 0; index < kThreadGroups; ++index) {
    const int place = index * kDequantiseThreads + static_cast<int>(threadIdx.x);
    const int row = place / kRowGroups;
    const int group = fp8_group_offset(kPaddedDim, row, place % kRowGroups) % kPaddedDim / kFp8Group;
    dequantise_group(g_bf16, fp8[index], row, group * kFp8Group);
  }
}

}
