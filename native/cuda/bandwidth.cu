#include "cuda/device.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

constexpr int kReadThreads = 512;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kReadTimes = 5;

__global__ void __launch_bounds__(kReadThreads) read_kernel(uint4* g_words, size_t count) {
  const size_t stride = size_t{gridDim.x} * kReadThreads;
  uint4 sum{};
#pragma unroll 8
  for (size_t index = size_t{blockIdx.x} * kReadThreads + threadIdx.x; index < count; index += stride) {
    const uint4 value = __ldg(g_words + index);
    sum.x ^= value.x;
    sum.y ^= value.y;
    sum.z ^= value.z;
    sum.w ^= value.w;
  }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678U) *g_words = sum;
}

struct Event {
  cudaEvent_t event = nullptr;
  Event() { GLINT_CHECK_CUDA(cudaEventCreate(&event)); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
};

}

double measure_read(const DeviceMemory& memory, cudaStream_t stream) {
  const Event start;
  const Event stop;
  const size_t words = memory.byte_count() / sizeof(uint4);
  const auto thread_blocks =
      static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount) * kBlocksPerMultiprocessor);
  float fastest_ms = 0;
  for (int time = 0; time < kReadTimes; ++time) {
    float milliseconds = 0;
    GLINT_CHECK_CUDA(cudaEventRecord(start.event, stream));
    read_kernel<<<thread_blocks, kReadThreads, 0, stream>>>(reinterpret_cast<uint4*>(memory.data()), words);
    GLINT_CHECK_CUDA(cudaGetLastError());
    GLINT_CHECK_CUDA(cudaEventRecord(stop.event, stream));
    GLINT_CHECK_CUDA(cudaEventSynchronize(stop.event));
    GLINT_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, start.event, stop.event));
    fastest_ms = time == 0 ? milliseconds : std::min(fastest_ms, milliseconds);
  }
  return static_cast<double>(memory.byte_count()) / (static_cast<double>(fastest_ms) * 1e-3);
}

}
