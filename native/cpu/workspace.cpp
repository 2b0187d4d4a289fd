#include "cpu/workspace.h"

#include <algorithm>

#include "cpu/operations.h"

namespace glint::cpu {

namespace {

int64_t operand_bytes(int64_t rows, int64_t width, int32_t slices) {
  return rows * operand_stride(width, slices) * kOperandElementBytes;
}

}

Workspace::Workspace(const RankSlice& slice, const glint_engine_options& options) {
  const glint_model& model = slice.model;
  const bool has_peers = slice.num_ranks > 1;
  const int64_t resumed_rows = options.max_draft_tokens > 0 ? options.max_step_items : 0;
  const int64_t tokens = options.max_step_tokens + resumed_rows;
  const int64_t logit_rows = options.max_step_items;
  const int64_t width = model.hidden_size;
  const int32_t slices = slice.row_slices;
  const int32_t expert_slices = options.expert_layout == GLINT_EXPERT_LAYOUT_TP ? slices : 1;
  const int64_t query_width = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_width = int64_t{model.num_kv_heads} * model.head_dim;
  const int64_t expert_rows = tokens * model.experts_per_token;
  const int64_t gate_floats = std::max(tokens * model.dense_width, expert_rows * model.expert_width);
  const int64_t rows_in = std::max(tokens, logit_rows);
  const auto scales_of_row = [&model](int64_t row_width, int32_t row_slices) {
    return row_slices * num_input_groups(row_width / row_slices, model.input_group_size);
  };
  const auto take = [this]<typename T>(Buffer<T>& buffer, int64_t count) {
    buffer = Buffer<T>(static_cast<uint64_t>(count));
    byte_count += buffer.byte_count();
  };
  take(hidden, tokens * width);
  take(normed, rows_in * width);
  take(query, tokens * query_width);
  take(key, tokens * kv_width);
  take(value, tokens * kv_width);
  take(attention_output, tokens * query_width);
  take(cosines, tokens * model.rotary_dim / 2);
  take(sines, tokens * model.rotary_dim / 2);
  take(gate, gate_floats);
  take(up, gate_floats);
  take(shared_gate, tokens * model.shared_width);
  take(shared_up, tokens * model.shared_width);
  take(routed, expert_slices * expert_rows * width);
  take(shared, slices * tokens * width);
  take(parts, slices * tokens * width);
  take(branch_sum, has_peers ? tokens * width : 0);
  take(router_logits, tokens * model.num_experts);
  take(expert_weights, expert_rows);
  take(logits, slice.is_first() ? logit_rows * model.vocab_size : 0);
  take(rank_logits, has_peers ? logit_rows * slice.vocab_size() : 0);
  take(experts, expert_rows);
  take(routed_rows, expert_rows);
  take(expert_tokens, expert_rows);
  take(expert_first, int64_t{slice.num_experts()} + 1);
  take(operand, std::max({operand_bytes(tokens, width, 1), operand_bytes(tokens, query_width, slices),
                          operand_bytes(tokens, std::max(model.dense_width, 1), slices)}));
  take(float_operand, operand_bytes(rows_in, width, 1));
  take(expert_operand, operand_bytes(expert_rows, std::max(model.expert_width, 1), expert_slices));
  take(shared_operand, operand_bytes(tokens, std::max(model.shared_width, 1), slices));
  take(operand_scales, tokens * std::max({scales_of_row(width, 1), scales_of_row(query_width, slices),
                                          scales_of_row(model.dense_width, slices)}));
  take(expert_scales, expert_rows * scales_of_row(model.expert_width, expert_slices));
  take(shared_scales, tokens * scales_of_row(model.shared_width, slices));
  take(sampled, kSampleSlots * logit_rows);
  take(step_tokens, tokens);
  const int64_t mtp_rows = options.max_draft_tokens > 0 ? tokens : 0;
  take(mtp_input, mtp_rows * 2 * width);
  take(mtp_operand, operand_bytes(mtp_rows, 2 * width, 1));
}

}
