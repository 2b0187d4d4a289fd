#include "cpu/layers.h"

#include <algorithm>
#include <limits>

namespace glint {

namespace cpu {

int64_t max_gemm_calls(const glint_model& model, int32_t row_slices) {
  return (int64_t{model.num_experts} + 1) * std::max(2, row_slices) + 3;
}

GemmInput prepare(Backend& backend, const OperandBuffer& buffer, const float* in, int64_t count, int64_t width,
                  int32_t slices) {
  const int64_t stride = operand_stride(width, slices);
  if (!backend.is_fp8()) {
    prepare_floats(backend.workers, buffer, in, count, width, slices);
    return {buffer.operand, nullptr, stride};
  }
  const int64_t group_size = backend.model.input_group_size;
  prepare_fp8(backend.workers, buffer, in, count, width, slices, group_size);
  return {buffer.operand, buffer.scales, stride, num_input_groups(width / slices, group_size)};
}

GemmInput prepare_normed(Backend& backend, int64_t count) {
  const Workspace& rows = backend.workspace;
  return prepare(backend, {rows.operand.data(), rows.operand_scales.data()}, rows.normed.data(), count,
                 backend.model.hidden_size, 1);
}

GemmInput prepare_normed_floats(Backend& backend, int64_t count) {
  const Workspace& rows = backend.workspace;
  const int64_t width = backend.model.hidden_size;
  prepare_floats(backend.workers, {rows.float_operand.data(), nullptr}, rows.normed.data(), count, width, 1);
  return {rows.float_operand.data(), nullptr, operand_stride(width, 1)};
}

void add_gemm(Backend& backend, float* out, const GemmInput& input, int64_t count, const Weight& weight,
              const float* bias) {
  backend.calls.push_back({.out = out,
                           .out_stride = weight.rows,
                           .input = input,
                           .input_rows = nullptr,
                           .count = count,
                           .weight = weight,
                           .bias = bias});
}

void add_sliced_gemm(Backend& backend, const SlicedGemm& gemm) {
  const int64_t width = gemm.weight.cols / gemm.slices;
  const int64_t slice_stride = gemm.input.stride / gemm.slices;
  const int64_t element_bytes = backend.is_fp8() ? fp8_element_bytes(backend.workers) : kOperandElementBytes;
  for (int32_t slice = 0; slice < gemm.slices; ++slice) {
    const int64_t offset = gemm.input_first * gemm.input.stride + slice * slice_stride;
    const int64_t first_scale = (slice * gemm.input_count + gemm.input_first) * gemm.input.groups;
    const float* scales = gemm.input.scales == nullptr ? nullptr : gemm.input.scales + first_scale;
    add_gemm(backend, gemm.out + slice * gemm.part_stride + gemm.input_first * gemm.weight.rows,
             {gemm.input.operand + offset * element_bytes, scales, gemm.input.stride, gemm.input.groups}, gemm.count,
             gemm.weight.col_slice(slice * width, width), nullptr);
  }
}

void run_calls(Backend& backend) {
  gemm(backend.workers, backend.calls);
  backend.calls.clear();
}

void project_to_parts(Backend& backend, const float* in, int64_t count, int64_t width, const Weight& weight) {
  const Workspace& rows = backend.workspace;
  const int32_t slices = backend.row_slices;
  const GemmInput input = prepare(backend, {rows.operand.data(), rows.operand_scales.data()}, in, count, width, slices);
  add_sliced_gemm(backend, {.out = rows.parts.data(),
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

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct HeadColumns {
  int64_t of_each_rank;
  int64_t total;
};

void run_norm(Backend& backend, StepState& step, const float* weight) {
  const cpu::Workspace& rows = backend.workspace;
  const int64_t width = backend.model.hidden_size;
  const int64_t offset = step.shard.row_first * width;
  cpu::rms_norm(backend.workers, rows.normed.data() + offset, rows.hidden.data() + offset, weight, step.shard.row_count,
                width, backend.model.norm_epsilon);
  if (!step.shard.is_whole) cpu::all_gather_rows(backend, step, rows.normed.data());
}

void norm_logit_rows(Backend& backend, StepState& step, std::span<const int32_t> rows, const float* weight) {
  const int64_t width = backend.model.hidden_size;
  float* hidden = backend.workspace.hidden.data();
  float* normed = backend.workspace.normed.data();
  step.num_logit_rows = static_cast<int64_t>(rows.size());
  if (!step.shard.is_whole) {
    cpu::all_gather_rows(backend, step, hidden);
    step.shard = {.row_first = 0, .row_count = step.num_rows(), .rows_per_rank = step.num_rows(), .is_whole = true};
  }
  cpu::gather_rows(backend.workers, normed, hidden, rows, width);
  cpu::rms_norm(backend.workers, normed, normed, weight, step.num_logit_rows, width, backend.model.norm_epsilon);
}

void run_head(Backend& backend, const StepState& step, const Weight& head, const HeadColumns& columns) {
  const cpu::Workspace& rows = backend.workspace;
  const int64_t count = step.num_logit_rows;
  const int64_t stride = backend.model.vocab_size;
  float* out = backend.has_peers() ? rows.rank_logits.data() : rows.logits.data();
  const bool is_fp8 = head.dtype == GLINT_DTYPE_F8_E4M3;
  const cpu::GemmInput input =
      is_fp8 ? cpu::prepare_normed(backend, count) : cpu::prepare_normed_floats(backend, count);
  cpu::add_gemm(backend, out, input, count, head, nullptr);
  if (!backend.has_peers()) backend.calls.back().out_stride = stride;
  cpu::run_calls(backend);
  if (backend.has_peers()) {
    const cpu::ColumnParts parts{count, columns.of_each_rank, columns.total, stride};
    backend.collectives.gather_columns(parts, rows.logits.data(), out, 0);
  }
  if (!backend.slice.is_first() || columns.total == stride) return;
  backend.workers.team().run(count, [&](int64_t row, int) {
    std::fill_n(rows.logits.data() + row * stride + columns.total, stride - columns.total, -kInfinity);
  });
}

}

namespace ops {

void rope_table(Backend& backend, StepState& step) {
  const cpu::Workspace& rows = backend.workspace;
  cpu::fill_rotary(backend.workers, rows.cosines.data(), rows.sines.data(), step.batch.positions,
                   backend.heads.rotary_dim, backend.model.rope_theta);
}

void embed(Backend& backend, StepState& step) {
  cpu::embed(backend.workers, backend.workspace.hidden.data(), backend.weights.embedding, step.batch.tokens);
}

void attention_norm(Backend& backend, StepState& step, int64_t layer) {
  run_norm(backend, step, backend.layer(layer).input_norm);
}

void qkv_proj(Backend& backend, StepState& step, int64_t layer) {
  const LayerWeights& weights = backend.layer(layer);
  const cpu::Workspace& rows = backend.workspace;
  const int64_t count = step.num_rows();
  const cpu::GemmInput input = cpu::prepare_normed(backend, count);
  cpu::add_gemm(backend, rows.query.data(), input, count, weights.query, weights.query_bias);
  cpu::add_gemm(backend, rows.key.data(), input, count, weights.key, weights.key_bias);
  cpu::add_gemm(backend, rows.value.data(), input, count, weights.value, weights.value_bias);
  cpu::run_calls(backend);
}

void rope_and_cache(Backend& backend, StepState& step, int64_t layer) {
  const LayerWeights& weights = backend.layer(layer);
  const cpu::Workspace& rows = backend.workspace;
  cpu::rope_and_cache(backend.workers,
                      {.query = rows.query.data(),
                       .key = rows.key.data(),
                       .value = rows.value.data(),
                       .query_norm = weights.query_norm,
                       .key_norm = weights.key_norm,
                       .cosines = rows.cosines.data(),
                       .sines = rows.sines.data(),
                       .heads = backend.heads,
                       .norm_epsilon = backend.model.norm_epsilon},
                      backend.pages, layer, step.batch.requests);
}

void attention(Backend& backend, StepState& step, int64_t layer) {
  const cpu::Workspace& rows = backend.workspace;
  cpu::attention(backend.workers, rows.attention_output.data(), rows.query.data(), backend.pages, layer,
                 step.batch.requests, backend.heads);
}

void o_proj(Backend& backend, StepState& step, int64_t layer) {
  cpu::project_to_parts(backend, backend.workspace.attention_output.data(), step.num_rows(),
                        backend.heads.num_heads * backend.heads.head_dim, backend.layer(layer).output);
}

void feed_forward_norm(Backend& backend, StepState& step, int64_t layer) {
  run_norm(backend, step, backend.layer(layer).post_attention_norm);
}

void final_norm(Backend& backend, StepState& step, std::span<const int32_t> rows) {
  norm_logit_rows(backend, step, rows, backend.weights.final_norm);
}

void lm_head(Backend& backend, StepState& step) {
  run_head(backend, step, backend.weights.lm_head, {backend.slice.vocab_size(), backend.model.vocab_size});
}

void mtp_hidden(Backend& backend, StepState& step, std::span<const int32_t> rows, bool is_first_draft) {
  norm_logit_rows(backend, step, rows, is_first_draft ? backend.weights.final_norm : backend.weights.mtp.head_norm);
}

void mtp_page_states(Backend& backend, std::span<const PageState> states) {
  const int64_t width = backend.model.hidden_size;
  for (const PageState& state : states) {
    float* normed = backend.workspace.normed.data() + state.row * width;
    float* kept = backend.page_states.data() + state.page * width;
    std::copy_n(state.is_kept ? normed : kept, width, state.is_kept ? kept : normed);
  }
}

void mtp_proj(Backend& backend, StepState& step) {
  const MtpWeights& mtp = backend.weights.mtp;
  const cpu::Workspace& rows = backend.workspace;
  const int64_t count = step.num_rows();
  const int64_t width = backend.model.hidden_size;
  const double epsilon = backend.model.norm_epsilon;
  cpu::embed(backend.workers, rows.hidden.data(), mtp.embedding, step.batch.tokens);
  const RowKernels& kernels = backend.workers.kernels().rows;
  backend.workers.team().run(count, [&](int64_t row, int) {
    float* input = rows.mtp_input.data() + row * 2 * width;
    kernels.norm(input, rows.hidden.data() + row * width, mtp.embedding_norm, width, epsilon);
    kernels.norm(input + width, rows.normed.data() + row * width, mtp.hidden_norm, width, epsilon);
  });
  const cpu::OperandBuffer operand{rows.mtp_operand.data(), nullptr};
  cpu::prepare_floats(backend.workers, operand, rows.mtp_input.data(), count, 2 * width, 1);
  cpu::add_gemm(backend, rows.hidden.data(), {operand.operand, nullptr, cpu::operand_stride(2 * width, 1)}, count,
                mtp.eh_proj, nullptr);
  cpu::run_calls(backend);
}

void mtp_norm(Backend& backend, StepState& step, std::span<const int32_t> rows) {
  norm_logit_rows(backend, step, rows, backend.weights.mtp.head_norm);
}

void mtp_head(Backend& backend, StepState& step) {
  run_head(backend, step, backend.weights.mtp.head, {backend.slice.mtp_vocab_share(), backend.model.mtp_vocab_size});
}

}

}
