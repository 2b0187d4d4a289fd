#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace glint {

class ZeroedMemory {
 public:
  ZeroedMemory() = default;
  explicit ZeroedMemory(uint64_t byte_count);
  ~ZeroedMemory();
  ZeroedMemory(ZeroedMemory&& other) noexcept;
  ZeroedMemory& operator=(ZeroedMemory&& other) noexcept;
  ZeroedMemory(const ZeroedMemory&) = delete;
  ZeroedMemory& operator=(const ZeroedMemory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t byte_count() const { return byte_count_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t byte_count_ = 0;
};

class MappedFile {
 public:
  MappedFile(const char* path, uint64_t expected_bytes);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) = delete;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  uint64_t byte_count() const { return byte_count_; }

 private:
  const std::byte* data_ = nullptr;
  uint64_t byte_count_ = 0;
};

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(uint64_t count) : memory_(count * sizeof(T)), count_(count) {}
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  T& operator[](int64_t index) const { return data()[index]; }
  uint64_t size() const { return count_; }
  uint64_t byte_count() const { return memory_.byte_count(); }
  std::span<T> span() const { return {data(), count_}; }

 private:
  ZeroedMemory memory_;
  uint64_t count_ = 0;
};

}
