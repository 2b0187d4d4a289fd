#include "cuda/memory/device_memory.h"

#include "cuda/check.h"

namespace glint::cuda {

namespace {

constexpr double kGibibyte = 1024.0 * 1024.0 * 1024.0;

}

DeviceMemory::DeviceMemory(uint64_t byte_count, const char* purpose) : Allocation(byte_count) {
  if (byte_count == 0) return;
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, byte_count);
  if (error != cudaSuccess) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total_bytes);
    throw Failure(
        GLINT_STATUS_OUT_OF_MEMORY,
        text("the GPU has no room for ", static_cast<double>(byte_count) / kGibibyte, " GiB of ", purpose, ": ",
             static_cast<double>(free_bytes) / kGibibyte, " of ", static_cast<double>(total_bytes) / kGibibyte,
             " GiB are free (", cudaGetErrorString(error), "); lower options.num_pages or options.max_step_items"));
  }
  data_.reset(static_cast<std::byte*>(data));
  GLINT_CHECK_CUDA(cudaMemset(data, 0, byte_count));
}

PinnedMemory::PinnedMemory(uint64_t byte_count) : Allocation(byte_count) {
  if (byte_count == 0) return;
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, byte_count, cudaHostAllocDefault);
  if (error != cudaSuccess) cudaGetLastError();
  require(error == cudaSuccess, GLINT_STATUS_OUT_OF_MEMORY, "the machine gave no ", byte_count,
          " bytes of pinned memory: ", cudaGetErrorString(error));
  data_.reset(static_cast<std::byte*>(data));
}

}
