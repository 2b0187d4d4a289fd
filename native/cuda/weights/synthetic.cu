#include "cuda/weights/synthetic.h"

#include <cuda_bf16.h>

#include "base/rng.h"
#include "cuda/check.h"

namespace glint::cuda {

namespace {

constexpr int kFillThreads = 256;
constexpr int kGroupValues = 8;
constexpr int kGroupNormals = 2;
constexpr uint64_t kGroupStep = 0x9e3779b97f4a7c15U;

__device__ __forceinline__ uint64_t group_bits(uint64_t key, int64_t group) {
  return mix_bits(key + kGroupStep * static_cast<uint64_t>(group + 1));
}

__global__ void __launch_bounds__(kFillThreads) fill_fp8_kernel(const FillFp8Call call) {
  __shared__ uint8_t s_fp8[kFp8TableSize];
  static_assert(kFp8TableSize == kFillThreads, "each thread places one value of the table");
  s_fp8[threadIdx.x] = call.table.values[threadIdx.x];
  __syncthreads();
  const int64_t group = call.first / kGroupValues + int64_t{blockIdx.x} * kFillThreads + threadIdx.x;
  const int64_t group_first = group * kGroupValues - call.first;
  if (group_first >= call.count) return;
  const uint64_t bits = group_bits(call.key, group);
  uint64_t values = 0;
#pragma unroll
  for (int index = 0; index < kGroupValues; ++index) {
    values |= uint64_t{s_fp8[bits >> (8 * index) & 0xffU]} << (8 * index);
  }
  uint8_t* g_out = call.out + group_first;
  const bool is_whole = group_first >= 0 && group_first + kGroupValues <= call.count;
  if (is_whole && reinterpret_cast<uintptr_t>(g_out) % sizeof(values) == 0) {
    *reinterpret_cast<uint64_t*>(g_out) = values;
    return;
  }
  for (int index = 0; index < kGroupValues; ++index) {
    const int64_t place = group_first + index;
    if (place >= 0 && place < call.count) g_out[index] = static_cast<uint8_t>(values >> (8 * index));
  }
}

__global__ void __launch_bounds__(kFillThreads) fill_normal_kernel(const FillNormalCall call) {
  const int64_t group = call.first / kGroupNormals + int64_t{blockIdx.x} * kFillThreads + threadIdx.x;
  const int64_t group_first = group * kGroupNormals - call.first;
  if (group_first >= call.count) return;
  const uint64_t bits = group_bits(call.key, group);
  const float uniform = (static_cast<float>(bits >> 40U) + 0.5F) * 0x1p-24F;
  const float angle = static_cast<float>(bits & 0xffffffU) * 0x1p-24F * 2.0F;
  const float radius = sqrtf(-2.0F * logf(uniform));
  float values[kGroupNormals];
  sincospif(angle, &values[0], &values[1]);
#pragma unroll
  for (int index = 0; index < kGroupNormals; ++index) {
    const int64_t place = group_first + index;
    if (place < 0 || place >= call.count) continue;
    const float value = call.mean + call.deviation * radius * values[index];
    if (call.is_bf16) {
      reinterpret_cast<__nv_bfloat16*>(call.out)[place] = __float2bfloat16_rn(value);
    } else {
      reinterpret_cast<float*>(call.out)[place] = value;
    }
  }
}

unsigned fill_blocks(int64_t first, int64_t count, int64_t group_elements) {
  const int64_t groups = (first % group_elements + count + group_elements - 1) / group_elements;
  return static_cast<unsigned>((groups + kFillThreads - 1) / kFillThreads);
}

}

void launch_fill_fp8(const FillFp8Call& call, cudaStream_t stream) {
  if (call.count == 0) return;
  fill_fp8_kernel<<<fill_blocks(call.first, call.count, kGroupValues), kFillThreads, 0, stream>>>(call);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

void launch_fill_normal(const FillNormalCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  fill_normal_kernel<<<fill_blocks(call.first, call.count, kGroupNormals), kFillThreads, 0, stream>>>(call);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

}
