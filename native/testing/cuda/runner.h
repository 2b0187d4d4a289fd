#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/kernels/gemm/gemm.h"
#include "cuda/memory/device_memory.h"
#include "include/glint.h"
#include "testing/cuda/timer.h"
#include "testing/guarded.h"

namespace glint::testing {

class DeviceBytes {
 public:
  explicit DeviceBytes(int64_t byte_count);
  DeviceBytes(const void* source, int64_t byte_count);

  std::byte* bytes() const { return memory_.data(); }
  int64_t byte_count() const { return byte_count_; }
  void download_bytes(void* target) const;
  void copy_from(const DeviceBytes& source) const;
  void fill(int value, int64_t byte_count) const;
  void check_margin() const;

 private:
  cuda::DeviceMemory memory_;
  int64_t byte_count_;
};

template <typename T>
class DeviceArray : public DeviceBytes {
 public:
  explicit DeviceArray(int64_t count) : DeviceBytes(count * kBytes) {}
  DeviceArray(const T* source, int64_t count) : DeviceBytes(source, count * kBytes), is_there_(source != nullptr) {}
  explicit DeviceArray(const std::vector<T>& source)
      : DeviceArray(source.data(), static_cast<int64_t>(source.size())) {}

  T* data() const { return is_there_ ? reinterpret_cast<T*>(bytes()) : nullptr; }
  int64_t count() const { return byte_count() / kBytes; }
  void download(T* target) const {
    if (target != nullptr) download_bytes(target);
  }
  std::vector<T> to_host() const {
    std::vector<T> values(static_cast<size_t>(count()));
    download_bytes(values.data());
    return values;
  }

 private:
  static constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  bool is_there_ = true;
};

constexpr int32_t kFallbackKernels = -1;

class Runner {
 public:
  Runner(int32_t kernels, int32_t num_repeats);

  void run(const std::function<void()>& launch, std::initializer_list<const DeviceBytes*> outputs);
  void run_row_counts(const std::function<void(int64_t)>& launch, const DeviceBytes& out, int64_t count);
  bool is_hopper() const { return is_hopper_; }
  bool is_fallback() const { return is_fallback_; }
  cuda::Multiply multiply() const { return is_hopper_ ? cuda::Multiply::kWgmma : cuda::Multiply::kMmaSync; }
  int64_t num_different_bytes() const { return num_different_bytes_; }

  void start_timing() { timer_ = std::make_unique<Timer>(); }
  bool is_timing() const { return timer_ != nullptr; }
  const Timer& timer() const { return *timer_; }
  std::vector<double> take_microseconds() { return std::exchange(microseconds_, {}); }

 private:
  bool is_hopper_;
  bool is_fallback_;
  int32_t num_repeats_;
  int64_t num_different_bytes_ = 0;
  std::unique_ptr<Timer> timer_;
  std::vector<double> microseconds_;
};

void launch_count_different(unsigned long long* g_count, const std::byte* g_left, const std::byte* g_right,
                            int64_t byte_count, cudaStream_t stream = nullptr);

}
