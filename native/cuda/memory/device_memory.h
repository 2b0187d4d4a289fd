#pragma once

#include <cstddef>
#include <cstdint>

namespace glint::cuda {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(uint64_t byte_count, const char* purpose);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t byte_count() const { return byte_count_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t byte_count_ = 0;
};

class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(uint64_t byte_count);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t byte_count() const { return byte_count_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t byte_count_ = 0;
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
