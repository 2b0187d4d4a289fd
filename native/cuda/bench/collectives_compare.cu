#include "cuda/bench/collectives_check.h"

namespace glint::cuda::bench {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kThreadBlocks = 64;

__global__ void __launch_bounds__(kThreads) count_differences_kernel(const uint8_t* seen, const uint8_t* wanted,
                                                                     uint64_t count, unsigned long long* differences) {
  unsigned long long different = 0;
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  for (uint64_t index = uint64_t{blockIdx.x} * kThreads + threadIdx.x; index < count; index += stride) {
    different += seen[index] == wanted[index] ? 0 : 1;
  }
  if (different != 0) atomicAdd(differences, different);
}

}

void count_differences(const std::byte* seen, const std::byte* wanted, uint64_t byte_count, uint64_t* differences,
                       cudaStream_t stream) {
  count_differences_kernel<<<kThreadBlocks, kThreads, 0, stream>>>(
      reinterpret_cast<const uint8_t*>(seen), reinterpret_cast<const uint8_t*>(wanted), byte_count,
      reinterpret_cast<unsigned long long*>(differences));
  GLINT_CHECK_CUDA(cudaGetLastError());
}

}
