#pragma once

#include <cuda_bf16.h>

#include "cuda/kernels/ptx/dependent.cuh"
#include "cuda/kernels/gemm/portable_load.cuh"

namespace glint::cuda::portable {

constexpr int kPackThreads = 256;
constexpr int kWordBytes = 4;

struct PackShape {
  int64_t num_words;
  int64_t num_lines;
  int64_t row_bytes;
};

__global__ void __launch_bounds__(kPackThreads) portable_pack_kernel(const PortablePackCall call, PackShape shape) {
  const int64_t stride = int64_t{gridDim.x} * kPackThreads;
  for (int64_t word = int64_t{blockIdx.x} * kPackThreads + threadIdx.x; word < shape.num_words; word += stride) {
    const auto inside = static_cast<int>(word % (kUnitLineBytes / kWordBytes));
    const int64_t line = word / (kUnitLineBytes / kWordBytes);
    const int half = inside / 128;
    const int lane = inside / 4 % 32;
    const int64_t row = line / shape.num_lines * kUnitRows + lane / 4 + inside % 2 * 8;
    const int64_t first = line % shape.num_lines * kLineBytes + lane % 4 * kChunkBytes + half * 8 + inside / 2 % 2 * 4;
    uint32_t packed = 0;
    for (int byte = 0; byte < kWordBytes; ++byte) {
      if (row >= call.rows || first + byte >= shape.row_bytes) continue;
      packed |= uint32_t{call.weights[row * call.weight_stride_bytes + first + byte]} << (8 * byte);
    }
    reinterpret_cast<uint32_t*>(call.packed)[word] = packed;
  }
}

__global__ void __launch_bounds__(kPackThreads) to_bf16_kernel(const ToBf16Call call) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const float* g_row = call.in + blockIdx.x * call.in_stride;
  auto* g_out = reinterpret_cast<uint32_t*>(call.out + blockIdx.x * call.out_stride_bytes);
  for (int64_t word = threadIdx.x; word < call.out_stride_bytes / kWordBytes; word += kPackThreads) {
    const int64_t index = word * 2;
    const float low = index < call.width ? g_row[index] : 0.0F;
    const float high = index + 1 < call.width ? g_row[index + 1] : 0.0F;
    g_out[word] = pack_bf16(low, high);
  }
}

}
