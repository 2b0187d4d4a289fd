#include <algorithm>

#include "model/glm4_moe.h"

namespace glint {

namespace {

uint64_t as_size(int64_t value) { return static_cast<uint64_t>(value); }

}

ForwardPass::ForwardPass(Backend& backend, const glint_model& model, const ModelWeights& weights,
                         const PageLayout& pages, const ForwardOptions& options)
    : backend_(backend),
      model_(model),
      weights_(weights),
      pages_(pages),
      options_(options),
      heads_{model.num_heads, model.num_kv_heads, model.head_dim, model.rotary_dim},
      has_codes_(model.weight_scale_kind != GLINT_SCALE_NONE) {
  const int64_t tokens = options.max_tokens;
  const int64_t hidden = model.hidden_size;
  const int64_t slices = options.row_slices;
  const int64_t expert_slices = options.expert_layout == GLINT_EXPERT_LAYOUT_TP ? slices : 1;
  const int64_t query_width = heads_.num_heads * heads_.head_dim;
  const int64_t kv_width = heads_.num_kv_heads * heads_.head_dim;
  const int64_t expert_rows = tokens * model.experts_per_token;
  const int64_t gate_floats = std::max(tokens * model.dense_width, expert_rows * model.expert_width);
  const int64_t rows_in = std::max(tokens, options.max_logit_rows);
  const auto operand_bytes = [&](int64_t rows, int64_t width, int64_t parts) {
    return as_size(rows * ops::operand_stride(backend, width, static_cast<int32_t>(parts)) *
                   ops::operand_element_bytes(backend));
  };
  hidden_ = Buffer<float>(as_size(tokens * hidden));
  normed_ = Buffer<float>(as_size(rows_in * hidden));
  query_ = Buffer<float>(as_size(tokens * query_width));
  key_ = Buffer<float>(as_size(tokens * kv_width));
  value_ = Buffer<float>(as_size(tokens * kv_width));
  attended_ = Buffer<float>(as_size(tokens * query_width));
  cosines_ = Buffer<float>(as_size(tokens * heads_.rotary_dim / 2));
  sines_ = Buffer<float>(as_size(tokens * heads_.rotary_dim / 2));
  gate_ = Buffer<float>(as_size(gate_floats));
  up_ = Buffer<float>(as_size(gate_floats));
  shared_gate_ = Buffer<float>(as_size(tokens * model.shared_width));
  shared_up_ = Buffer<float>(as_size(tokens * model.shared_width));
  routed_ = Buffer<float>(as_size(expert_slices * expert_rows * hidden));
  shared_ = Buffer<float>(as_size(slices * tokens * hidden));
  parts_ = Buffer<float>(as_size(slices * tokens * hidden));
  router_logits_ = Buffer<float>(as_size(tokens * model.num_experts));
  expert_weights_ = Buffer<float>(as_size(expert_rows));
  logits_ = Buffer<float>(as_size(options.max_logit_rows * model.vocab_size));
  experts_ = Buffer<int32_t>(as_size(expert_rows));
  routed_rows_ = Buffer<int32_t>(as_size(expert_rows));
  expert_tokens_ = Buffer<int32_t>(as_size(expert_rows));
  operand_ = Buffer<std::byte>(std::max({operand_bytes(tokens, hidden, 1), operand_bytes(tokens, query_width, slices),
                                         operand_bytes(tokens, std::max(model.dense_width, 1), slices)}));
  float_operand_ = Buffer<std::byte>(operand_bytes(rows_in, hidden, 1));
  expert_operand_ = Buffer<std::byte>(operand_bytes(expert_rows, std::max(model.expert_width, 1), expert_slices));
  shared_operand_ = Buffer<std::byte>(operand_bytes(tokens, std::max(model.shared_width, 1), slices));
  operand_scales_ = Buffer<float>(as_size(tokens * slices));
  expert_scales_ = Buffer<float>(as_size(expert_rows * expert_slices));
  shared_scales_ = Buffer<float>(as_size(tokens * slices));
  expert_first_.resize(as_size(model.num_experts) + 1);
  calls_.reserve(as_size(max_product_calls(model, options.row_slices)));
}

int64_t max_product_calls(const glint_model& model, int32_t row_slices) {
  return (int64_t{model.num_experts} + 1) * std::max(2, row_slices) + 3;
}

uint64_t ForwardPass::byte_count() const {
  return hidden_.byte_count() + normed_.byte_count() + query_.byte_count() + key_.byte_count() + value_.byte_count() +
         attended_.byte_count() + cosines_.byte_count() + sines_.byte_count() + gate_.byte_count() + up_.byte_count() +
         shared_gate_.byte_count() + shared_up_.byte_count() + routed_.byte_count() + shared_.byte_count() +
         parts_.byte_count() + router_logits_.byte_count() + expert_weights_.byte_count() + logits_.byte_count() +
         experts_.byte_count() + routed_rows_.byte_count() + expert_tokens_.byte_count() + operand_.byte_count() +
         float_operand_.byte_count() + expert_operand_.byte_count() + shared_operand_.byte_count() +
         operand_scales_.byte_count() + expert_scales_.byte_count() + shared_scales_.byte_count();
}

ProductInput ForwardPass::prepare(const OperandBuffer& buffer, const float* in, int64_t count, int64_t width,
                                  int32_t slices) {
  const int64_t stride = ops::operand_stride(backend_, width, slices);
  if (!has_codes_) {
    ops::prepare_floats(backend_, buffer, in, count, width, slices);
    return {buffer.operand, nullptr, stride};
  }
  ops::prepare_codes(backend_, buffer, in, count, width, slices);
  return {buffer.operand, buffer.scales, stride};
}

void ForwardPass::add_sliced_product(const SlicedProduct& product) {
  const int64_t width = product.weight.cols / product.slices;
  const int64_t slice_stride = product.input.stride / product.slices;
  const int64_t element_bytes = has_codes_ ? ops::code_element_bytes(backend_) : ops::operand_element_bytes(backend_);
  for (int32_t slice = 0; slice < product.slices; ++slice) {
    const int64_t offset = product.input_first * product.input.stride + slice * slice_stride;
    const float* scales = product.input.scales == nullptr
                              ? nullptr
                              : product.input.scales + slice * product.input_count + product.input_first;
    calls_.push_back({.out = product.out + slice * product.part_stride + product.input_first * product.weight.rows,
                      .out_stride = product.weight.rows,
                      .input = {product.input.operand + offset * element_bytes, scales, product.input.stride},
                      .input_rows = nullptr,
                      .count = product.count,
                      .weight = product.weight.col_slice(slice * width, width),
                      .bias = nullptr});
  }
}

void ForwardPass::project_to_hidden(const float* in, int64_t width, const Weight& weight) {
  const ProductInput input = prepare({operand_.data(), operand_scales_.data()}, in, count_, width, options_.row_slices);
  add_sliced_product({.out = parts_.data(),
                      .part_stride = count_ * model_.hidden_size,
                      .input = input,
                      .input_count = count_,
                      .input_first = 0,
                      .count = count_,
                      .weight = weight,
                      .slices = options_.row_slices});
  run_calls();
  join_and_add();
}

void ForwardPass::join_and_add() {
  const int64_t floats = count_ * model_.hidden_size;
  ops::join_slices(backend_, parts_.data(), floats, options_.row_slices, floats);
  ops::add_rows(backend_, hidden_.data(), parts_.data(), floats);
}

void ForwardPass::run_calls() {
  ops::products(backend_, calls_);
  calls_.clear();
}

}
