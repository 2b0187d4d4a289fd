#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "cuda/check.h"

namespace glint::cuda::bench {

inline bool is_quick = false;
inline constexpr size_t kGuardBytes = 4096;
inline constexpr int kPoisonByte = 0xff;

template <typename Value>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    GLINT_CHECK_CUDA(cudaMalloc(&data_, count * sizeof(Value) + kGuardBytes));
    poison();
  }
  explicit DeviceArray(const std::vector<Value>& values) : DeviceArray(values.size()) { upload(values); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  Value* data() const { return data_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * sizeof(Value); }
  void poison() { GLINT_CHECK_CUDA(cudaMemset(data_, kPoisonByte, bytes() + kGuardBytes)); }
  void upload(const std::vector<Value>& values) {
    GLINT_CHECK_CUDA(cudaMemcpy(data_, values.data(), values.size() * sizeof(Value), cudaMemcpyHostToDevice));
  }
  std::vector<Value> download() const {
    std::vector<Value> values(count_);
    GLINT_CHECK_CUDA(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }
  bool guard_is_whole() const {
    std::vector<uint8_t> guard(kGuardBytes);
    GLINT_CHECK_CUDA(cudaMemcpy(guard.data(), reinterpret_cast<const uint8_t*>(data_) + bytes(), kGuardBytes,
                                cudaMemcpyDeviceToHost));
    return std::ranges::all_of(guard, [](uint8_t value) { return value == kPoisonByte; });
  }

 private:
  Value* data_ = nullptr;
  size_t count_;
};

class RandomSource {
 public:
  explicit RandomSource(uint64_t seed) : key_(row_key(seed, 0, 0)) {}
  uint64_t bits() { return mix_bits(key_ += 0x9e3779b97f4a7c15U); }
  double uniform() { return open_uniform(bits()); }
  int64_t below(int64_t limit) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(limit)); }
  float normal() {
    constexpr float kScale = 0x1p-16F * 1.7320508F;
    const uint64_t drawn = bits();
    const auto part = [&](unsigned shift) { return static_cast<float>((drawn >> shift) & 0xffffU); };
    return (part(0) + part(16) + part(32) + part(48) - 131070.0F) * kScale;
  }
  std::vector<float> normals(size_t count, float scale) {
    std::vector<float> values(count);
    for (float& value : values) value = scale * normal();
    return values;
  }

 private:
  uint64_t key_;
};

struct Ceiling {
  double read_bytes_per_second = 0;
};

class Report {
 public:
  void check(bool holds, const std::string& name, const std::string& detail = "") {
    std::printf("%s %s%s%s\n", holds ? "ok  " : "FAIL", name.c_str(), detail.empty() ? "" : ": ", detail.c_str());
    num_failures_ += holds ? 0 : 1;
  }
  int num_failures() const { return num_failures_; }

 private:
  int num_failures_ = 0;
};

struct Work {
  double bytes = 0;
  double operations = 0;
};

double read_ceiling();
double median_seconds(const std::function<void(int, cudaStream_t)>& launch, int num_sets);
void print_time(const std::string& name, double seconds, const Work& work, const Ceiling& ceiling);
void time_empty_kernel(const Ceiling& ceiling);
int64_t count_differences(const void* left, const void* right, size_t bytes);
bool is_repeatable(const std::function<void(cudaStream_t)>& launch, const void* out, size_t bytes, int runs);

inline double relative_error(const std::vector<float>& out, const std::vector<double>& wanted) {
  double difference = 0;
  double size = 0;
  for (size_t index = 0; index < wanted.size(); ++index) {
    const double gap = static_cast<double>(out[index]) - wanted[index];
    difference += gap * gap;
    size += wanted[index] * wanted[index];
  }
  const double error = std::sqrt(difference / size);
  return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
}

template <typename Value>
bool same_bits(const std::vector<Value>& left, const std::vector<Value>& right) {
  return left.size() == right.size() && std::memcmp(left.data(), right.data(), left.size() * sizeof(Value)) == 0;
}

void run_rows(Report& report, const Ceiling& ceiling);
void run_attention(Report& report, const Ceiling& ceiling);
void run_codes(Report& report, const Ceiling& ceiling);
void run_router(Report& report, const Ceiling& ceiling);
void run_sampling(Report& report, const Ceiling& ceiling);

}
