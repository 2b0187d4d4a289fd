#include <cstddef>
#include <cstdint>

#include "cuda/check.h"
#include "testing/cuda/runner.h"

namespace glint::testing {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxThreadBlocks = 528;

__global__ void __launch_bounds__(kThreads) count_different_kernel(unsigned long long* g_count, const std::byte* g_left,
                                                                   const std::byte* g_right, int64_t byte_count) {
  const int64_t start = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  const int64_t num_words = byte_count / 4;
  unsigned long long different = 0;
  for (int64_t word = start; word < num_words; word += stride) {
    const auto* left = reinterpret_cast<const uint32_t*>(g_left);
    const auto* right = reinterpret_cast<const uint32_t*>(g_right);
    if (left[word] != right[word]) different += 4;
  }
  for (int64_t byte = num_words * 4 + start; byte < byte_count; byte += stride) {
    if (g_left[byte] != g_right[byte]) ++different;
  }
  if (different > 0) atomicAdd(g_count, different);
}

}

void launch_count_different(unsigned long long* g_count, const std::byte* g_left, const std::byte* g_right,
                            int64_t byte_count, cudaStream_t stream) {
  if (byte_count == 0) return;
  const int64_t wanted = (byte_count / 4 + kThreads) / kThreads;
  const auto thread_blocks = static_cast<unsigned>(wanted < kMaxThreadBlocks ? wanted : kMaxThreadBlocks);
  count_different_kernel<<<thread_blocks, kThreads, 0, stream>>>(g_count, g_left, g_right, byte_count);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

}
