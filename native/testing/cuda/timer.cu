#include <cstddef>
#include <cstdint>

#include "cuda/check.h"
#include "cuda/launch.h"
#include "testing/cuda/timer.h"

namespace glint::testing {

namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr uint32_t kPoison = 0xffffffffU;

__global__ void empty_kernel() {}

__global__ void __launch_bounds__(kThreads) flush_kernel(uint4* g_words, size_t count) {
  const size_t stride = size_t{gridDim.x} * kThreads;
  uint32_t folded = 0;
  for (size_t index = size_t{blockIdx.x} * kThreads + threadIdx.x; index < count; index += stride) {
    const uint4 value = __ldg(g_words + index);
    folded ^= value.x ^ value.y ^ value.z ^ value.w;
  }
  if (folded == 0x12345678U) g_words->x = folded;
}

__global__ void __launch_bounds__(kThreads) poison_shared_kernel(uint32_t* g_sink, int num_words) {
  extern __shared__ uint32_t s_words[];
  for (int word = static_cast<int>(threadIdx.x); word < num_words; word += kThreads) s_words[word] = kPoison;
  __syncthreads();
  if (s_words[num_words - 1 - static_cast<int>(threadIdx.x)] != kPoison) *g_sink = 0;
}

unsigned thread_blocks() {
  return static_cast<unsigned>(cuda::device_attribute(cudaDevAttrMultiProcessorCount) * kBlocksPerMultiprocessor);
}

}

void launch_empty() { cuda::launch_dependent(empty_kernel, {1, kThreads, 0}, nullptr); }

void launch_flush(const cuda::DeviceMemory& memory) {
  cuda::launch_dependent(flush_kernel, {thread_blocks(), kThreads, 0}, nullptr, reinterpret_cast<uint4*>(memory.data()),
                         memory.byte_count() / sizeof(uint4));
}

void poison_shared_memory() {
  const int bytes = cuda::device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(poison_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const cuda::DeviceMemory sink(sizeof(uint32_t), "a test");
  poison_shared_kernel<<<thread_blocks(), kThreads, static_cast<size_t>(bytes)>>>(
      reinterpret_cast<uint32_t*>(sink.data()), bytes / 4);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

}
