#pragma once

#include "base/fp8.h"
#include "cuda/kernels/gemm/gemm_portable.h"
#include "testing/cases.h"
#include "testing/cuda/runner.h"

namespace glint::testing {

class Operand {
 public:
  explicit Operand(const TestOperand& source);

  void launch() const;
  const DeviceBytes& rows() const { return rows_; }
  const DeviceArray<float>& scales() const { return scales_; }
  const uint8_t* row_data() const { return rows_.data(); }
  const float* scale_data() const { return has_fp8_ ? scales_.data() : nullptr; }
  int64_t row_bytes() const { return row_slices_ * slice_bytes_; }
  std::vector<float> values() const;

 private:
  bool has_fp8_;
  int64_t count_;
  int64_t width_;
  int32_t row_slices_;
  int64_t slice_bytes_;
  DeviceArray<float> in_;
  DeviceArray<uint8_t> rows_;
  DeviceArray<float> scales_;
};

std::vector<float> fp8_values(const DeviceArray<uint8_t>& fp8);

}
