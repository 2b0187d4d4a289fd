#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/check.h"

namespace glint::cuda::bench {

template <typename Element>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : count_(count) {
    GLINT_CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(count) * sizeof(Element)));
    poison();
  }
  explicit DeviceArray(const std::vector<Element>& values) : DeviceArray(static_cast<int64_t>(values.size())) {
    GLINT_CHECK_CUDA(cudaMemcpy(data_, values.data(), values.size() * sizeof(Element), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  Element* data() const { return data_; }
  int64_t count() const { return count_; }
  void fill_bytes(int value) {
    GLINT_CHECK_CUDA(cudaMemset(data_, value, static_cast<size_t>(count_) * sizeof(Element)));
  }
  void poison() { fill_bytes(0xff); }
  std::vector<Element> to_host() const {
    std::vector<Element> values(static_cast<size_t>(count_));
    GLINT_CHECK_CUDA(cudaMemcpy(values.data(), data_, values.size() * sizeof(Element), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  Element* data_ = nullptr;
  int64_t count_;
};

struct RandomFill {
  uint64_t seed;
  float spread;
};

struct ReferenceProduct {
  double* out;
  const uint8_t* weights;
  const uint8_t* activations;
  const int32_t* row_tokens;
  int64_t rows;
  int64_t k;
  int64_t num_tokens;
  bool is_bf16;
};

struct Difference {
  double relative_error;
  int64_t num_wrong;
};

void fill_codes(uint8_t* out, int64_t count, RandomFill fill);
void fill_bf16(uint16_t* out, int64_t count, RandomFill fill);
void fill_positive(float* out, int64_t count, RandomFill fill);
void fill_signed(float* out, int64_t count, RandomFill fill);
void poison_shared_memory();
void run_reference(const ReferenceProduct& product);
Difference compare(const float* out, const double* reference, int64_t count);
int64_t count_different_bits(const float* left, const float* right, int64_t count);
double read_ceiling_bytes_per_second();
double median_microseconds(cudaStream_t stream, int launches, const std::function<void(int)>& launch);
void synchronize();

}
