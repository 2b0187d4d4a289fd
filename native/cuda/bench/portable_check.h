#pragma once

#include "cuda/bench/measure.h"
#include "cuda/kernels/gemm/gemm_portable.h"
#include "include/glint.h"

namespace glint::cuda::bench {

struct MatrixShape {
  int64_t rows;
  int64_t cols;
  GemmElement element;
  int32_t scale_kind;

  int64_t row_bytes() const { return cols * (element == GemmElement::kBf16 ? 2 : 1); }
  int64_t scale_tiles() const { return (cols + kPortableScaleTile - 1) / kPortableScaleTile; }
  int64_t num_scales() const {
    if (scale_kind == GLINT_SCALE_NONE) return 1;
    if (scale_kind == GLINT_SCALE_TENSOR) return 1;
    if (scale_kind == GLINT_SCALE_CHANNEL) return rows;
    return (rows + kPortableScaleTile - 1) / kPortableScaleTile * scale_tiles();
  }
};

class PackedMatrices {
 public:
  PackedMatrices(const MatrixShape& shape, int64_t count, uint64_t seed);
  PortableWeight weight(int64_t first) const;
  const MatrixShape& shape() const { return shape_; }
  const uint8_t* source() const { return source_.data(); }
  bool has_guards_untouched() const;

 private:
  MatrixShape shape_;
  int64_t count_;
  DeviceArray<uint8_t> source_;
  DeviceArray<uint8_t> packed_;
  DeviceArray<float> scales_;
};

void fill_elements(uint8_t* out, int64_t count, GemmElement element, RandomFill fill);
bool check_portable_experts();
void measure_portable_experts();

}
