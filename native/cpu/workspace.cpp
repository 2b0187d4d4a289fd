#include "cpu/workspace.h"

#include <algorithm>

#include "cpu/operations.h"

namespace glint::cpu {

namespace {

uint64_t as_size(int64_t value) { return static_cast<uint64_t>(value); }

uint64_t operand_bytes(int64_t rows, int64_t width, int32_t slices) {
  return as_size(rows * operand_stride(width, slices) * kOperandElementBytes);
}

}

Workspace::Workspace(const RankSlice& slice, const glint_engine_options& options) {
  const glint_model& model = slice.model;
  const bool has_peers = slice.num_ranks > 1;
  const int64_t tokens = options.max_step_tokens;
  const int64_t logit_rows = options.max_step_items;
  const int64_t width = model.hidden_size;
  const int32_t slices = slice.row_slices;
  const int32_t expert_slices = options.expert_layout == GLINT_EXPERT_LAYOUT_TP ? slices : 1;
  const int64_t query_width = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_width = int64_t{model.num_kv_heads} * model.head_dim;
  const int64_t expert_rows = tokens * model.experts_per_token;
  const int64_t gate_floats = std::max(tokens * model.dense_width, expert_rows * model.expert_width);
  const int64_t rows_in = std::max(tokens, logit_rows);
  hidden = Buffer<float>(as_size(tokens * width));
  normed = Buffer<float>(as_size(rows_in * width));
  query = Buffer<float>(as_size(tokens * query_width));
  key = Buffer<float>(as_size(tokens * kv_width));
  value = Buffer<float>(as_size(tokens * kv_width));
  attention_output = Buffer<float>(as_size(tokens * query_width));
  cosines = Buffer<float>(as_size(tokens * model.rotary_dim / 2));
  sines = Buffer<float>(as_size(tokens * model.rotary_dim / 2));
  gate = Buffer<float>(as_size(gate_floats));
  up = Buffer<float>(as_size(gate_floats));
  shared_gate = Buffer<float>(as_size(tokens * model.shared_width));
  shared_up = Buffer<float>(as_size(tokens * model.shared_width));
  routed = Buffer<float>(as_size(expert_slices * expert_rows * width));
  shared = Buffer<float>(as_size(slices * tokens * width));
  parts = Buffer<float>(as_size(slices * tokens * width));
  branch_sum = Buffer<float>(as_size(has_peers ? tokens * width : 0));
  router_logits = Buffer<float>(as_size(tokens * model.num_experts));
  expert_weights = Buffer<float>(as_size(expert_rows));
  logits = Buffer<float>(as_size(slice.is_first() ? logit_rows * model.vocab_size : 0));
  rank_logits = Buffer<float>(as_size(has_peers ? logit_rows * slice.vocab_size() : 0));
  experts = Buffer<int32_t>(as_size(expert_rows));
  routed_rows = Buffer<int32_t>(as_size(expert_rows));
  expert_tokens = Buffer<int32_t>(as_size(expert_rows));
  expert_first = Buffer<int32_t>(as_size(slice.num_experts()) + 1);
  operand = Buffer<std::byte>(std::max({operand_bytes(tokens, width, 1), operand_bytes(tokens, query_width, slices),
                                        operand_bytes(tokens, std::max(model.dense_width, 1), slices)}));
  float_operand = Buffer<std::byte>(operand_bytes(rows_in, width, 1));
  expert_operand = Buffer<std::byte>(operand_bytes(expert_rows, std::max(model.expert_width, 1), expert_slices));
  shared_operand = Buffer<std::byte>(operand_bytes(tokens, std::max(model.shared_width, 1), slices));
  operand_scales = Buffer<float>(as_size(tokens * slices));
  expert_scales = Buffer<float>(as_size(expert_rows * expert_slices));
  shared_scales = Buffer<float>(as_size(tokens * slices));
  sampled = Buffer<SampledRow>(as_size(kSampleSlots * logit_rows));
  step_tokens = Buffer<int32_t>(as_size(tokens));
}

uint64_t Workspace::byte_count() const {
  return hidden.byte_count() + normed.byte_count() + query.byte_count() + key.byte_count() + value.byte_count() +
         attention_output.byte_count() + cosines.byte_count() + sines.byte_count() + gate.byte_count() +
         up.byte_count() + shared_gate.byte_count() + shared_up.byte_count() + routed.byte_count() + shared.byte_count() +
         parts.byte_count() + branch_sum.byte_count() + rank_logits.byte_count() + router_logits.byte_count() +
         expert_weights.byte_count() + logits.byte_count() + experts.byte_count() + routed_rows.byte_count() +
         expert_tokens.byte_count() + expert_first.byte_count() + operand.byte_count() + float_operand.byte_count() +
         expert_operand.byte_count() + shared_operand.byte_count() + operand_scales.byte_count() + expert_scales.byte_count() +
         shared_scales.byte_count() + sampled.byte_count() + step_tokens.byte_count();
}

}
