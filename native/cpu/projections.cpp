#include "cpu/layers.h"

#include <algorithm>

namespace glint::cpu {

int64_t max_product_calls(const glint_model& model, int32_t row_slices) {
  return (int64_t{model.num_experts} + 1) * std::max(2, row_slices) + 3;
}

ProductInput prepare(Backend& backend, const OperandBuffer& buffer, const float* in, int64_t count, int64_t width,
                     int32_t slices) {
  const int64_t stride = operand_stride(width, slices);
  if (!backend.has_codes()) {
    prepare_floats(backend.workers, buffer, in, count, width, slices);
    return {buffer.operand, nullptr, stride};
  }
  prepare_codes(backend.workers, buffer, in, count, width, slices);
  return {buffer.operand, buffer.scales, stride};
}

ProductInput prepare_normed(Backend& backend) {
  const Activations& rows = backend.activations;
  return prepare(backend, {rows.operand.data(), rows.operand_scales.data()}, rows.normed.data(), backend.count(),
                 backend.model.hidden_size, 1);
}

ProductInput prepare_normed_floats(Backend& backend, int64_t count) {
  const Activations& rows = backend.activations;
  const int64_t width = backend.model.hidden_size;
  prepare_floats(backend.workers, {rows.float_operand.data(), nullptr}, rows.normed.data(), count, width, 1);
  return {rows.float_operand.data(), nullptr, operand_stride(width, 1)};
}

void add_product(Backend& backend, float* out, const ProductInput& input, int64_t count, const Weight& weight,
                 const float* bias) {
  backend.calls.push_back({.out = out,
                           .out_stride = weight.rows,
                           .input = input,
                           .input_rows = nullptr,
                           .count = count,
                           .weight = weight,
                           .bias = bias});
}

void add_sliced_product(Backend& backend, const SlicedProduct& product) {
  const int64_t width = product.weight.cols / product.slices;
  const int64_t slice_stride = product.input.stride / product.slices;
  const int64_t element_bytes = backend.has_codes() ? code_element_bytes(backend.workers) : kOperandElementBytes;
  for (int32_t slice = 0; slice < product.slices; ++slice) {
    const int64_t offset = product.input_first * product.input.stride + slice * slice_stride;
    const float* scales = product.input.scales == nullptr
                              ? nullptr
                              : product.input.scales + slice * product.input_count + product.input_first;
    add_product(backend, product.out + slice * product.part_stride + product.input_first * product.weight.rows,
                {product.input.operand + offset * element_bytes, scales, product.input.stride}, product.count,
                product.weight.col_slice(slice * width, width), nullptr);
  }
}

void run_calls(Backend& backend) {
  products(backend.workers, backend.calls);
  backend.calls.clear();
}

void project_to_parts(Backend& backend, const float* in, int64_t width, const Weight& weight) {
  const Activations& rows = backend.activations;
  const int64_t count = backend.count();
  const int32_t slices = backend.row_slices;
  const ProductInput input =
      prepare(backend, {rows.operand.data(), rows.operand_scales.data()}, in, count, width, slices);
  add_sliced_product(backend, {.out = rows.parts.data(),
                               .part_stride = count * backend.model.hidden_size,
                               .input = input,
                               .input_count = count,
                               .input_first = 0,
                               .count = count,
                               .weight = weight,
                               .slices = slices});
  run_calls(backend);
}

}
