#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace glint::cuda {

template <auto Free>
class Allocation {
 public:
  std::byte* data() const { return data_.get(); }
  uint64_t byte_count() const { return byte_count_; }

 protected:
  struct Release {
    void operator()(std::byte* data) const { Free(data); }
  };

  Allocation() = default;
  explicit Allocation(uint64_t byte_count) : byte_count_(byte_count) {}

  std::unique_ptr<std::byte, Release> data_;
  uint64_t byte_count_ = 0;
};

class DeviceMemory : public Allocation<cudaFree> {
 public:
  DeviceMemory() = default;
  DeviceMemory(uint64_t byte_count, const char* purpose);
};

class PinnedMemory : public Allocation<cudaFreeHost> {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(uint64_t byte_count);
};

class Arena {
 public:
  static constexpr uint64_t kAlignment = 1024;

  Arena() = default;
  explicit Arena(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(int64_t count) {
    const uint64_t first = used_;
    used_ += (static_cast<uint64_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + first);
  }
  uint64_t used() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  uint64_t used_ = 0;
};

}
