#include "model/glm4_moe.h"

#include <algorithm>

namespace glint {

void ForwardPass::run(const StepBatch& batch) {
  count_ = static_cast<int64_t>(batch.tokens.size());
  calls_.clear();
  ops::embed(backend_, hidden_.data(), weights_.embedding, batch.tokens);
  ops::fill_rotary(backend_, cosines_.data(), sines_.data(), batch.positions, heads_.rotary_dim, model_.rope_theta);
  for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
    if (tap_) tap_(layer, hidden_.data(), count_);
    attention(layer, batch);
    if (layer < model_.num_dense_layers) {
      dense_feed_forward(layer);
    } else {
      expert_feed_forward(layer);
    }
  }
  if (tap_) tap_(model_.num_layers, hidden_.data(), count_);
}

void ForwardPass::attention(int64_t layer, const StepBatch& batch) {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  ops::rms_norm(backend_, normed_.data(), hidden_.data(), weights.input_norm, count_, model_.hidden_size,
                model_.norm_epsilon);
  const ProductInput input =
      prepare({operand_.data(), operand_scales_.data()}, normed_.data(), count_, model_.hidden_size, 1);
  const auto project = [&](float* out, const Weight& weight, const float* bias) {
    calls_.push_back({.out = out,
                      .out_stride = weight.rows,
                      .input = input,
                      .input_rows = nullptr,
                      .count = count_,
                      .weight = weight,
                      .bias = bias});
  };
  project(query_.data(), weights.query, weights.query_bias);
  project(key_.data(), weights.key, weights.key_bias);
  project(value_.data(), weights.value, weights.value_bias);
  run_calls();
  ops::rotate_and_store(backend_,
                        {.query = query_.data(),
                         .key = key_.data(),
                         .value = value_.data(),
                         .query_norm = weights.query_norm,
                         .key_norm = weights.key_norm,
                         .cosines = cosines_.data(),
                         .sines = sines_.data(),
                         .heads = heads_,
                         .norm_epsilon = model_.norm_epsilon},
                        pages_, layer, batch.requests);
  ops::attend(backend_, attended_.data(), query_.data(), pages_, layer, batch.requests, heads_);
  project_to_hidden(attended_.data(), heads_.num_heads * heads_.head_dim, weights.output);
}

void ForwardPass::dense_feed_forward(int64_t layer) {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  ops::rms_norm(backend_, normed_.data(), hidden_.data(), weights.post_attention_norm, count_, model_.hidden_size,
                model_.norm_epsilon);
  const ProductInput input =
      prepare({operand_.data(), operand_scales_.data()}, normed_.data(), count_, model_.hidden_size, 1);
  add_sliced_product({.out = gate_.data(),
                      .part_stride = 0,
                      .input = input,
                      .input_count = count_,
                      .input_first = 0,
                      .count = count_,
                      .weight = weights.dense.gate,
                      .slices = 1});
  add_sliced_product({.out = up_.data(),
                      .part_stride = 0,
                      .input = input,
                      .input_count = count_,
                      .input_first = 0,
                      .count = count_,
                      .weight = weights.dense.up,
                      .slices = 1});
  run_calls();
  ops::swiglu(backend_, gate_.data(), gate_.data(), up_.data(), count_ * model_.dense_width);
  project_to_hidden(gate_.data(), model_.dense_width, weights.dense.down);
}

void ForwardPass::expert_feed_forward(int64_t layer) {
  const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
  ops::rms_norm(backend_, normed_.data(), hidden_.data(), weights.post_attention_norm, count_, model_.hidden_size,
                model_.norm_epsilon);
  route_tokens(weights);
  group_by_expert();
  run_gate_and_up(weights);
  run_down(weights);
  combine_experts();
  join_and_add();
}

void ForwardPass::route_tokens(const LayerWeights& layer) {
  ops::prepare_floats(backend_, {float_operand_.data(), nullptr}, normed_.data(), count_, model_.hidden_size, 1);
  calls_.push_back({.out = router_logits_.data(),
                    .out_stride = model_.num_experts,
                    .input = {float_operand_.data(), nullptr,
                              ops::operand_stride(backend_, model_.hidden_size, 1)},
                    .input_rows = nullptr,
                    .count = count_,
                    .weight = layer.router,
                    .bias = nullptr});
  run_calls();
  ops::route(backend_, {.experts = experts_.data(),
                        .weights = expert_weights_.data(),
                        .logits = router_logits_.data(),
                        .bias = layer.router_bias,
                        .count = count_,
                        .model = &model_});
}

void ForwardPass::group_by_expert() {
  num_expert_rows_ = count_ * model_.experts_per_token;
  std::fill(expert_first_.begin(), expert_first_.end(), 0);
  for (int64_t index = 0; index < num_expert_rows_; ++index) {
    ++expert_first_[static_cast<size_t>(experts_[index]) + 1];
  }
  for (size_t expert = 1; expert < expert_first_.size(); ++expert) expert_first_[expert] += expert_first_[expert - 1];
  for (int64_t index = 0; index < num_expert_rows_; ++index) {
    const int32_t row = expert_first_[static_cast<size_t>(experts_[index])]++;
    routed_rows_[index] = row;
    expert_tokens_[row] = static_cast<int32_t>(index / model_.experts_per_token);
  }
  std::rotate(expert_first_.begin(), expert_first_.end() - 1, expert_first_.end());
  expert_first_.front() = 0;
}

void ForwardPass::run_gate_and_up(const LayerWeights& layer) {
  const ProductInput input =
      prepare({operand_.data(), operand_scales_.data()}, normed_.data(), count_, model_.hidden_size, 1);
  for (size_t expert = 0; expert < layer.experts.size(); ++expert) {
    const int64_t first = expert_first_[expert];
    const int64_t count = expert_first_[expert + 1] - first;
    if (count == 0) continue;
    const auto project = [&](float* out, const Weight& weight) {
      calls_.push_back({.out = out + first * weight.rows,
                        .out_stride = weight.rows,
                        .input = input,
                        .input_rows = expert_tokens_.data() + first,
                        .count = count,
                        .weight = weight,
                        .bias = nullptr});
    };
    project(gate_.data(), layer.experts[expert].gate);
    project(up_.data(), layer.experts[expert].up);
  }
  add_sliced_product({.out = shared_gate_.data(),
                      .part_stride = 0,
                      .input = input,
                      .input_count = count_,
                      .input_first = 0,
                      .count = count_,
                      .weight = layer.shared.gate,
                      .slices = 1});
  add_sliced_product({.out = shared_up_.data(),
                      .part_stride = 0,
                      .input = input,
                      .input_count = count_,
                      .input_first = 0,
                      .count = count_,
                      .weight = layer.shared.up,
                      .slices = 1});
  run_calls();
  ops::swiglu(backend_, gate_.data(), gate_.data(), up_.data(), num_expert_rows_ * model_.expert_width);
  ops::swiglu(backend_, shared_gate_.data(), shared_gate_.data(), shared_up_.data(), count_ * model_.shared_width);
}

void ForwardPass::run_down(const LayerWeights& layer) {
  const int64_t hidden = model_.hidden_size;
  const int32_t slices = options_.row_slices;
  const int32_t expert_slices = options_.expert_layout == GLINT_EXPERT_LAYOUT_TP ? slices : 1;
  const ProductInput routed = prepare({expert_operand_.data(), expert_scales_.data()}, gate_.data(), num_expert_rows_,
                                      model_.expert_width, expert_slices);
  const ProductInput shared = prepare({shared_operand_.data(), shared_scales_.data()}, shared_gate_.data(), count_,
                                      model_.shared_width, slices);
  for (size_t expert = 0; expert < layer.experts.size(); ++expert) {
    const int64_t first = expert_first_[expert];
    const int64_t count = expert_first_[expert + 1] - first;
    if (count == 0) continue;
    add_sliced_product({.out = routed_.data(),
                        .part_stride = num_expert_rows_ * hidden,
                        .input = routed,
                        .input_count = num_expert_rows_,
                        .input_first = first,
                        .count = count,
                        .weight = layer.experts[expert].down,
                        .slices = expert_slices});
  }
  add_sliced_product({.out = shared_.data(),
                      .part_stride = count_ * hidden,
                      .input = shared,
                      .input_count = count_,
                      .input_first = 0,
                      .count = count_,
                      .weight = layer.shared.down,
                      .slices = slices});
  run_calls();
}

void ForwardPass::combine_experts() {
  const int64_t hidden = model_.hidden_size;
  const bool is_tp = options_.expert_layout == GLINT_EXPERT_LAYOUT_TP;
  for (int32_t slice = 0; slice < options_.row_slices; ++slice) {
    const int32_t group_experts = model_.num_experts / options_.row_slices;
    ops::combine(backend_, {.out = parts_.data() + slice * count_ * hidden,
                            .routed = routed_.data() + (is_tp ? slice * num_expert_rows_ * hidden : 0),
                            .routed_rows = routed_rows_.data(),
                            .weights = expert_weights_.data(),
                            .experts = experts_.data(),
                            .shared = shared_.data() + slice * count_ * hidden,
                            .count = count_,
                            .hidden_size = hidden,
                            .experts_per_token = model_.experts_per_token,
                            .expert_first = is_tp ? 0 : slice * group_experts,
                            .expert_last = is_tp ? model_.num_experts : (slice + 1) * group_experts});
  }
}

float* ForwardPass::logits(std::span<const int32_t> rows) {
  const auto count = static_cast<int64_t>(rows.size());
  const int64_t hidden = model_.hidden_size;
  ops::gather_rows(backend_, normed_.data(), hidden_.data(), rows, hidden);
  ops::rms_norm(backend_, normed_.data(), normed_.data(), weights_.final_norm, count, hidden, model_.norm_epsilon);
  ops::prepare_floats(backend_, {float_operand_.data(), nullptr}, normed_.data(), count, hidden, 1);
  calls_.push_back({.out = logits_.data(),
                    .out_stride = model_.vocab_size,
                    .input = {float_operand_.data(), nullptr, ops::operand_stride(backend_, hidden, 1)},
                    .input_rows = nullptr,
                    .count = count,
                    .weight = weights_.lm_head,
                    .bias = nullptr});
  run_calls();
  return logits_.data();
}

}
