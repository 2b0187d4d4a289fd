#include <algorithm>

#include "cuda/memory/copies.h"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr int kThreadWords = 4;
constexpr int64_t kBlockBytes = int64_t{kThreads} * kThreadWords * sizeof(uint32_t);

struct CopiedWords {
  const CopyRange& range;
  int64_t first;
  uint32_t words[kThreadWords];

  __device__ __forceinline__ explicit CopiedWords(const CopyRange& copied)
      : range(copied), first(int64_t{blockIdx.x} * kThreads * kThreadWords + threadIdx.x) {}

  __device__ __forceinline__ bool has(int index) const {
    return (first + index * int64_t{kThreads}) * static_cast<int64_t>(sizeof(uint32_t)) < range.bytes;
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int index = 0; index < kThreadWords; ++index) {
      if (has(index)) words[index] = __ldcv(static_cast<const uint32_t*>(range.source) + first + index * kThreads);
    }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int index = 0; index < kThreadWords; ++index) {
      if (has(index)) static_cast<uint32_t*>(range.target)[first + index * kThreads] = words[index];
    }
  }
};

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyCall call) {
  ptx::griddepcontrol_launch_dependents();
  CopiedWords copied(call.ranges[blockIdx.y]);
  const bool loads_early = call.direction == CopyDirection::kToDevice;
  if (loads_early) copied.load();
  ptx::griddepcontrol_wait();
  if (!loads_early) copied.load();
  copied.store();
}

}

void launch_copies(const CopyCall& call, cudaStream_t stream) {
  int64_t longest = 0;
  for (const CopyRange& range : call.ranges) longest = std::max(longest, range.bytes);
  const auto blocks = static_cast<unsigned>((longest + kBlockBytes - 1) / kBlockBytes);
  launch_dependent(copy_kernel, {dim3(blocks, static_cast<unsigned>(call.count)), kThreads, 0}, stream, call);
}

}
