#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/fp8.h"
#include "cpu/backend.h"
#include "model/ops.h"

namespace glint::ops {

namespace {

struct SliceShape {
  int64_t width;
  int64_t stride;
};

SliceShape slice_shape(int64_t width, int32_t row_slices) {
  const int64_t slice_width = width / row_slices;
  return {slice_width, (slice_width + kOperandAlignment - 1) / kOperandAlignment * kOperandAlignment};
}

float row_scale(const float* in, int64_t count) {
  float highest = 0.0F;
  for (int64_t index = 0; index < count; ++index) {
    const float magnitude = std::fabs(in[index]);
    highest = magnitude > highest ? magnitude : highest;
  }
  const float scale = highest / kE4m3Max;
  return scale == 0.0F ? 1.0F : scale;
}

void write_floats(float* out, const float* in, int64_t count, float scale) {
  for (int64_t index = 0; index < count; ++index) out[index] = float_from_e4m3(e4m3_from_float(in[index] / scale));
}

void write_bf16(uint16_t* out, const float* in, int64_t count, float scale) {
  for (int64_t index = 0; index < count; ++index) {
    out[index] = bf16_from_float(float_from_e4m3(e4m3_from_float(in[index] / scale)));
  }
}

}

int64_t operand_stride(const Backend&, int64_t width, int32_t row_slices) {
  return row_slices * slice_shape(width, row_slices).stride;
}

int64_t operand_element_bytes(const Backend&) { return sizeof(float); }

int64_t code_element_bytes(const Backend& backend) {
  return backend.kernels().code_form == OperandForm::kBf16 ? sizeof(uint16_t) : sizeof(float);
}

void prepare_floats(Backend& backend, OperandBuffer out, const float* in, int64_t count, int64_t width,
                    int32_t row_slices) {
  const SliceShape shape = slice_shape(width, row_slices);
  auto* operand = reinterpret_cast<float*>(out.operand);
  backend.team().run(count, [&](int64_t row, int) {
    for (int32_t slice = 0; slice < row_slices; ++slice) {
      float* target = operand + (row * row_slices + slice) * shape.stride;
      const float* source = in + row * width + slice * shape.width;
      std::copy(source, source + shape.width, target);
      std::fill(target + shape.width, target + shape.stride, 0.0F);
    }
  });
}

void prepare_codes(Backend& backend, OperandBuffer out, const float* in, int64_t count, int64_t width,
                   int32_t row_slices) {
  const SliceShape shape = slice_shape(width, row_slices);
  const bool is_bf16 = backend.kernels().code_form == OperandForm::kBf16;
  backend.team().run(count, [&](int64_t row, int) {
    for (int32_t slice = 0; slice < row_slices; ++slice) {
      const float* source = in + row * width + slice * shape.width;
      const float scale = row_scale(source, shape.width);
      const int64_t offset = (row * row_slices + slice) * shape.stride;
      out.scales[slice * count + row] = scale;
      if (is_bf16) {
        auto* target = reinterpret_cast<uint16_t*>(out.operand) + offset;
        write_bf16(target, source, shape.width, scale);
        std::fill(target + shape.width, target + shape.stride, uint16_t{0});
      } else {
        auto* target = reinterpret_cast<float*>(out.operand) + offset;
        write_floats(target, source, shape.width, scale);
        std::fill(target + shape.width, target + shape.stride, 0.0F);
      }
    }
  });
}

}
