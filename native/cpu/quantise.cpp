#include <algorithm>

#include "cpu/operations.h"

namespace glint::cpu {

namespace {

struct SliceShape {
  int64_t width;
  int64_t stride;
};

SliceShape slice_shape(int64_t width, int32_t row_slices) {
  const int64_t slice_width = width / row_slices;
  return {slice_width, (slice_width + kOperandAlignment - 1) / kOperandAlignment * kOperandAlignment};
}

}

int64_t operand_stride(int64_t width, int32_t row_slices) { return row_slices * slice_shape(width, row_slices).stride; }

int64_t fp8_element_bytes(const Workers& workers) {
  return workers.kernels().fp8_form == OperandForm::kBf16 ? sizeof(uint16_t) : sizeof(float);
}

int64_t num_input_groups(int64_t width, int64_t group_size) {
  return group_size == 0 ? 1 : (width + group_size - 1) / group_size;
}

void prepare_floats(Workers& workers, OperandBuffer out, const float* in, int64_t count, int64_t width,
                    int32_t row_slices) {
  const SliceShape shape = slice_shape(width, row_slices);
  auto* operand = reinterpret_cast<float*>(out.operand);
  workers.team().run(count, [&](int64_t row, int) {
    for (int32_t slice = 0; slice < row_slices; ++slice) {
      float* target = operand + (row * row_slices + slice) * shape.stride;
      const float* source = in + row * width + slice * shape.width;
      std::copy(source, source + shape.width, target);
      std::fill(target + shape.width, target + shape.stride, 0.0F);
    }
  });
}

void prepare_fp8(Workers& workers, OperandBuffer out, const float* in, int64_t count, int64_t width, int32_t row_slices,
                 int64_t group_size) {
  const SliceShape shape = slice_shape(width, row_slices);
  const KernelSet& kernels = workers.kernels();
  const int64_t element_bytes = fp8_element_bytes(workers);
  const int64_t groups = num_input_groups(shape.width, group_size);
  const int64_t step = group_size == 0 ? shape.width : group_size;
  workers.team().run(count, [&](int64_t row, int) {
    for (int32_t slice = 0; slice < row_slices; ++slice) {
      const float* source = in + row * width + slice * shape.width;
      std::byte* target = out.operand + (row * row_slices + slice) * shape.stride * element_bytes;
      float* scales = out.scales + (slice * count + row) * groups;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * step;
        scales[group] =
            kernels.quantise(target + first * element_bytes, source + first, std::min(step, shape.width - first));
      }
      std::fill(target + shape.width * element_bytes, target + shape.stride * element_bytes, std::byte{0});
    }
  });
}

}
