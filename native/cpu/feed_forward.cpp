#include <algorithm>

#include "cpu/layers.h"

namespace glint {

namespace {

int64_t num_expert_rows(const Backend& backend) { return backend.workspace.expert_first[backend.slice.num_experts()]; }

int32_t local_expert(const Backend& backend, int64_t index) {
  const int32_t expert = backend.workspace.experts[index];
  return expert < backend.slice.expert_last ? expert - backend.slice.expert_first : -1;
}

void group_by_expert(Backend& backend, const StepState& step) {
  const cpu::Workspace& rows = backend.workspace;
  const std::span<int32_t> first = rows.expert_first.span();
  const int64_t num_choices = step.num_rows() * backend.model.experts_per_token;
  std::ranges::fill(first, 0);
  for (int64_t index = 0; index < num_choices; ++index) {
    const int32_t expert = local_expert(backend, index);
    if (expert >= 0) ++first[static_cast<size_t>(expert) + 1];
  }
  const auto is_read = [](int32_t count) { return count > 0; };
  backend.experts_read += static_cast<uint64_t>(std::ranges::count_if(first, is_read));
  for (size_t expert = 1; expert < first.size(); ++expert) first[expert] += first[expert - 1];
  for (int64_t index = 0; index < num_choices; ++index) {
    const int32_t expert = local_expert(backend, index);
    if (expert < 0) continue;
    const int32_t row = first[static_cast<size_t>(expert)]++;
    rows.routed_rows[index] = row;
    rows.expert_tokens[row] = static_cast<int32_t>(index / backend.model.experts_per_token);
  }
  std::rotate(first.begin(), first.end() - 1, first.end());
  first.front() = 0;
}

template <typename Visit>
void for_each_read_expert(const Backend& backend, const LayerWeights& layer, Visit visit) {
  for (size_t expert = 0; expert < layer.experts.size(); ++expert) {
    const auto index = static_cast<int64_t>(expert);
    const int64_t first = backend.workspace.expert_first[index];
    const int64_t count = backend.workspace.expert_first[index + 1] - first;
    if (count > 0) visit(layer.experts[expert], first, count);
  }
}

void run_gate_and_up(Backend& backend, const StepState& step, const LayerWeights& layer) {
  const cpu::Workspace& rows = backend.workspace;
  const cpu::GemmInput input = cpu::prepare_normed(backend, step.num_rows());
  for_each_read_expert(backend, layer, [&](const FeedForwardWeights& expert, int64_t first, int64_t count) {
    const auto project = [&](float* out, const Weight& weight) {
      cpu::add_gemm(backend, out + first * weight.rows, input, count, weight, nullptr);
      backend.calls.back().input_rows = rows.expert_tokens.data() + first;
    };
    project(rows.gate.data(), expert.gate);
    project(rows.up.data(), expert.up);
  });
  cpu::add_gemm(backend, rows.shared_gate.data(), input, step.num_rows(), layer.shared.gate, nullptr);
  cpu::add_gemm(backend, rows.shared_up.data(), input, step.num_rows(), layer.shared.up, nullptr);
  cpu::run_calls(backend);
  cpu::swiglu(backend.workers, rows.gate.data(), rows.gate.data(), rows.up.data(),
              num_expert_rows(backend) * backend.model.expert_width);
  cpu::swiglu(backend.workers, rows.shared_gate.data(), rows.shared_gate.data(), rows.shared_up.data(),
              step.num_rows() * backend.model.shared_width);
}

void run_down(Backend& backend, const StepState& step, const LayerWeights& layer) {
  const cpu::Workspace& rows = backend.workspace;
  const int64_t num_rows = num_expert_rows(backend);
  const int64_t num_tokens = step.num_rows();
  const int32_t slices = backend.row_slices;
  const int32_t expert_slices = backend.splits_experts() ? slices : 1;
  const cpu::GemmInput routed = cpu::prepare(backend, {rows.expert_operand.data(), rows.expert_scales.data()},
                                             rows.gate.data(), num_rows, backend.model.expert_width, expert_slices);
  const cpu::GemmInput shared = cpu::prepare(backend, {rows.shared_operand.data(), rows.shared_scales.data()},
                                             rows.shared_gate.data(), num_tokens, backend.model.shared_width, slices);
  for_each_read_expert(backend, layer, [&](const FeedForwardWeights& expert, int64_t first, int64_t count) {
    cpu::add_sliced_gemm(backend, {.out = rows.routed.data(),
                                   .part_stride = num_rows * backend.model.hidden_size,
                                   .input = routed,
                                   .input_count = num_rows,
                                   .input_first = first,
                                   .count = count,
                                   .weight = expert.down,
                                   .slices = expert_slices});
  });
  cpu::add_sliced_gemm(backend, {.out = rows.shared.data(),
                                 .part_stride = num_tokens * backend.model.hidden_size,
                                 .input = shared,
                                 .input_count = num_tokens,
                                 .input_first = 0,
                                 .count = num_tokens,
                                 .weight = layer.shared.down,
                                 .slices = slices});
  cpu::run_calls(backend);
}

void combine_experts(Backend& backend, const StepState& step) {
  const cpu::Workspace& rows = backend.workspace;
  const int64_t width = backend.model.hidden_size;
  const int64_t count = step.num_rows();
  const bool is_tp = backend.splits_experts();
  const int32_t group_experts = backend.slice.num_experts() / backend.row_slices;
  for (int32_t slice = 0; slice < backend.row_slices; ++slice) {
    cpu::combine(
        backend.workers,
        {.out = rows.parts.data() + slice * count * width,
         .routed = rows.routed.data() + (is_tp ? slice * num_expert_rows(backend) * width : 0),
         .routed_rows = rows.routed_rows.data(),
         .weights = rows.expert_weights.data(),
         .experts = rows.experts.data(),
         .shared = rows.shared.data() + slice * count * width,
         .count = count,
         .hidden_size = width,
         .experts_per_token = backend.model.experts_per_token,
         .expert_first = backend.slice.expert_first + (is_tp ? 0 : slice * group_experts),
         .expert_last = is_tp ? backend.slice.expert_last : backend.slice.expert_first + (slice + 1) * group_experts});
  }
}

}

namespace ops {

void dense_feed_forward(Backend& backend, StepState& step, int64_t layer) {
  const FeedForwardWeights& dense = backend.layer(layer).dense;
  const cpu::Workspace& rows = backend.workspace;
  const int64_t count = step.num_rows();
  const cpu::GemmInput input = cpu::prepare_normed(backend, count);
  cpu::add_gemm(backend, rows.gate.data(), input, count, dense.gate, nullptr);
  cpu::add_gemm(backend, rows.up.data(), input, count, dense.up, nullptr);
  cpu::run_calls(backend);
  cpu::swiglu(backend.workers, rows.gate.data(), rows.gate.data(), rows.up.data(), count * backend.model.dense_width);
  cpu::project_to_parts(backend, rows.gate.data(), count, backend.model.dense_width, dense.down);
}

void router(Backend& backend, StepState& step, int64_t layer) {
  const LayerWeights& weights = backend.layer(layer);
  const cpu::Workspace& rows = backend.workspace;
  const int64_t count = step.num_rows();
  const cpu::GemmInput input = cpu::prepare_normed_floats(backend, count);
  cpu::add_gemm(backend, rows.router_logits.data(), input, count, weights.router, nullptr);
  cpu::run_calls(backend);
  cpu::route(backend.workers, {.experts = rows.experts.data(),
                               .weights = rows.expert_weights.data(),
                               .logits = rows.router_logits.data(),
                               .bias = weights.router_bias,
                               .count = count,
                               .model = &backend.model});
}

void shared_expert(Backend&, StepState&, int64_t) {}

void routed_experts(Backend& backend, StepState& step, int64_t layer) {
  const LayerWeights& weights = backend.layer(layer);
  group_by_expert(backend, step);
  run_gate_and_up(backend, step, weights);
  run_down(backend, step, weights);
  combine_experts(backend, step);
}

}

}
