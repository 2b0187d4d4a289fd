#include "cuda/memory/device_memory.h"

#include <utility>

#include "cuda/check.h"

namespace glint::cuda {

namespace {

constexpr double kGibibyte = 1024.0 * 1024.0 * 1024.0;

}

DeviceMemory::DeviceMemory(uint64_t byte_count, const char* purpose) : byte_count_(byte_count) {
  if (byte_count == 0) return;
  void* place = nullptr;
  const cudaError_t error = cudaMalloc(&place, byte_count);
  if (error != cudaSuccess) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total_bytes);
    throw Failure(GLINT_STATUS_OUT_OF_MEMORY,
                  text("the GPU has no room for ", static_cast<double>(byte_count) / kGibibyte, " GiB of ", purpose,
                       ": ", static_cast<double>(free_bytes) / kGibibyte, " of ",
                       static_cast<double>(total_bytes) / kGibibyte, " GiB are free (", cudaGetErrorString(error),
                       "); lower options.num_pages or options.max_step_items"));
  }
  data_ = static_cast<std::byte*>(place);
  GLINT_CHECK_CUDA(cudaMemset(data_, 0, byte_count));
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) cudaFree(data_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), byte_count_(std::exchange(other.byte_count_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(byte_count_, other.byte_count_);
  return *this;
}

PinnedMemory::PinnedMemory(uint64_t byte_count) : byte_count_(byte_count) {
  if (byte_count == 0) return;
  void* place = nullptr;
  const cudaError_t error = cudaHostAlloc(&place, byte_count, cudaHostAllocDefault);
  if (error != cudaSuccess) cudaGetLastError();
  require(error == cudaSuccess, GLINT_STATUS_OUT_OF_MEMORY, "the machine gave no ", byte_count,
          " bytes of pinned memory: ", cudaGetErrorString(error));
  data_ = static_cast<std::byte*>(place);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), byte_count_(std::exchange(other.byte_count_, 0)) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(byte_count_, other.byte_count_);
  return *this;
}

}
