#include "cuda/layers.h"

#include <algorithm>
#include <utility>

#include "cuda/all_reduce.h"
#include "cuda/check.h"
#include "cuda/kernels/gemm/quantise.h"
#include "cuda/kernels/norm/rows.h"
#include "cuda/memory/copies.h"

namespace glint {

namespace cuda {

namespace {

void run_norm(Backend& backend, StepState& step, const float* weight, bool keeps_normed) {
  const glint_model& model = backend.model;
  const Workspace& workspace = backend.workspace;
  const Operand operand = backend.operand(model.hidden_size);
  const RowRange rows = own_rows(backend, step);
  const Operand own = operand.from_row(rows.first);
  const int64_t offset = rows.first * model.hidden_size;
  norm_residual(backend, step,
                {.hidden = workspace.hidden + offset,
                 .normed = keeps_normed || !backend.is_fp8() ? workspace.normed + offset : nullptr,
                 .fp8 = backend.is_fp8() ? own.rows : nullptr,
                 .scales = own.scales,
                 .fp8_stride = operand.stride_bytes,
                 .weight = weight,
                 .count = rows.count,
                 .width = model.hidden_size,
                 .epsilon = static_cast<float>(model.norm_epsilon)});
  if (!backend.is_fp8()) round_rows(backend, workspace.normed + offset, own, rows.count, model.hidden_size);
  const GatheredRows gathered = {operand.rows, operand.stride_bytes, operand.scales, sizeof(float)};
  if (!keeps_normed) return all_gather_rows(backend, step, gathered);
  async_all_gather_rows(backend, step, gathered, AsyncGather::kRows);
}

RopeCall rotate_call(const Backend& backend, const StepState& step, int64_t layer) {
  const glint_model& model = backend.model;
  const int64_t query_width = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_width = int64_t{model.num_kv_heads} * model.head_dim;
  const int64_t stride = query_width + 2 * kv_width;
  const float* query = backend.workspace.qkv;
  return {.query_out = backend.workspace.query,
          .pages = backend.pages(layer),
          .query = query,
          .key = query + query_width,
          .value = query + query_width + kv_width,
          .query_stride = stride,
          .key_stride = stride,
          .query_norm = backend.layer(layer).query_norm,
          .key_norm = backend.layer(layer).key_norm,
          .cosines = backend.workspace.cosines,
          .sines = backend.workspace.sines,
          .slots = step.rows.slots,
          .count = step.num_rows,
          .num_heads = model.num_heads,
          .num_kv_heads = model.num_kv_heads,
          .head_dim = model.head_dim,
          .rotary_dim = model.rotary_dim,
          .epsilon = static_cast<float>(model.norm_epsilon)};
}

DecodeCall decode_call(const Backend& backend, int64_t layer) {
  const StepBuffers& buffers = backend.workspace.step;
  return {.attend = {.out = backend.workspace.attention_output,
                     .query = backend.workspace.query,
                     .pages = backend.pages(layer),
                     .page_table = buffers.page_table,
                     .num_heads = backend.model.num_heads,
                     .num_kv_heads = backend.model.num_kv_heads,
                     .head_dim = backend.model.head_dim},
          .tasks = buffers.decode_tasks,
          .num_tasks = buffers.counts + kDecodeCount,
          .max_tasks = static_cast<int32_t>(backend.limits.max_decode_tasks()),
          .partials = backend.workspace.partials,
          .arrivals = backend.workspace.arrivals};
}

void norm_rows(Backend& backend, StepState& step, const float* weight, float* hidden, float* normed, int64_t count) {
  norm_residual(backend, step,
                {.hidden = hidden,
                 .normed = normed,
                 .weight = weight,
                 .count = count,
                 .width = backend.model.hidden_size,
                 .epsilon = static_cast<float>(backend.model.norm_epsilon)});
}

void norm_and_gather_rows(Backend& backend, StepState& step, const float* weight) {
  const Workspace& workspace = backend.workspace;
  const RowRange rows = own_rows(backend, step);
  const int64_t offset = rows.first * backend.model.hidden_size;
  norm_rows(backend, step, weight, workspace.hidden + offset, workspace.normed + offset, rows.count);
  all_gather_rows(backend, step, {workspace.normed, backend.model.hidden_size * static_cast<int64_t>(sizeof(float))});
}

void norm_all_rows(Backend& backend, StepState& step, const float* weight) {
  const Workspace& workspace = backend.workspace;
  if (step.all_reduce != AllReduce::kSequenceParallel) {
    return norm_rows(backend, step, weight, workspace.hidden, workspace.logit_normed, step.num_rows);
  }
  norm_and_gather_rows(backend, step, weight);
  GLINT_CHECK_CUDA(cudaMemcpyAsync(workspace.logit_normed, workspace.normed,
                                   static_cast<size_t>(step.num_rows * backend.model.hidden_size) * sizeof(float),
                                   cudaMemcpyDeviceToDevice, backend.stream));
}

KvPages prefill_pages(Backend& backend, const StepState& step, const KvPages& pages) {
  if (!holds_fp8(pages.element)) return pages;
  const KvPages widened = backend.widened_pages();
  launch_dequantise_kv({.fp8 = pages,
                        .bf16 = widened,
                        .page_table = backend.workspace.step.page_table,
                        .num_pages = step.num_prefill_pages,
                        .num_kv_heads = backend.model.num_kv_heads,
                        .head_dim = backend.model.head_dim},
                       backend.stream);
  return widened;
}

void quantise_attention_step(Backend& backend, const StepState& step, const Operand& operand) {
  const glint_model& model = backend.model;
  if (attention_step_quantises(model.num_kv_heads)) return;
  launch_quantise_parts({.fp8 = operand.rows,
                         .scales = operand.scales,
                         .in = backend.workspace.attention_output,
                         .magnitudes = backend.workspace.attention_magnitudes,
                         .count = step.num_rows,
                         .part_width = int64_t{model.num_heads} / model.num_kv_heads * model.head_dim,
                         .num_parts = model.num_kv_heads,
                         .fp8_stride = operand.stride_bytes},
                        backend.stream);
}

void run_attention(Backend& backend, const StepState& step, int64_t layer) {
  const DecodeCall decode = decode_call(backend, layer);
  if (step.is_captured || step.num_decode_tasks > 0) launch_attention_decode(decode, backend.stream);
  if (step.num_prefill_tasks == 0) return;
  AttendCall attend = decode.attend;
  attend.pages = prefill_pages(backend, step, attend.pages);
  launch_attention_prefill({.attend = attend,
                            .tasks = backend.workspace.step.prefill_tasks,
                            .num_tasks = backend.workspace.step.counts + kPrefillCount,
                            .kernels = backend.device.kernels,
                            .hides_earlier = step.hides_earlier},
                           backend.stream);
}

}

PortableWeight portable_weight(const PlacedWeight& weight) {
  return {.packed = weight.packed,
          .scales = weight.scales,
          .rows = weight.rows,
          .cols = weight.cols,
          .element = weight.element,
          .scale_kind = weight.scale_kind,
          .scale_stride = weight.scale_stride,
          .matrix_bytes = weight.matrix_bytes,
          .matrix_scales = weight.matrix_scales};
}

void run_gemm(Backend& backend, StepState& step, const PlacedWeight& weight, const float* bias, const Operand& operand,
              float* out, int64_t out_stride, int64_t count) {
  if (weight.is_tiled) {
    launch_gemm({.out = out,
                 .out_stride = out_stride,
                 .packed_weights = weight.packed,
                 .row_scales = weight.scales,
                 .bias = bias,
                 .activations = operand.rows,
                 .token_scales = operand.scales,
                 .rows = weight.rows,
                 .k_bytes = operand.stride_bytes,
                 .num_tokens = count,
                 .element = weight.element,
                 .multiply = backend.device.multiply()},
                backend.stream);
    if (starts_next_after_wait(operand.stride_bytes, count)) step.hidden_is_settled = true;
    return;
  }
  launch_gemm_portable({.out = out,
                        .out_stride = out_stride,
                        .weight = portable_weight(weight),
                        .bias = bias,
                        .activations = operand.rows,
                        .activation_stride_bytes = operand.stride_bytes,
                        .token_scales = operand.scales,
                        .num_tokens = count,
                        .row_tokens = nullptr,
                        .tiles = nullptr,
                        .num_tiles = nullptr,
                        .max_tiles = 0,
                        .tile_tokens = 0},
                       backend.stream);
}

void run_sections(Backend& backend, StepState& step, const std::vector<PlacedSection>& sections, const Operand& operand,
                  float* out, int64_t out_stride) {
  for (const PlacedSection& section : sections) {
    run_gemm(backend, step, section.weight, section.bias, operand, out + section.out_first, out_stride, step.num_rows);
  }
}

void prepare_rows(Backend& backend, const float* rows, int64_t width, const Operand& operand, int64_t count) {
  if (backend.is_fp8()) {
    launch_quantise({.fp8 = operand.rows,
                     .scales = operand.scales,
                     .in = rows,
                     .in_stride = width,
                     .count = count,
                     .width = width,
                     .row_slices = 1,
                     .slice_stride = operand.stride_bytes},
                    backend.stream);
  } else {
    round_rows(backend, rows, operand, count, width);
  }
}

void round_rows(Backend& backend, const float* rows, const Operand& operand, int64_t count, int64_t width) {
  launch_to_bf16({.out = operand.rows,
                  .in = rows,
                  .in_stride = width,
                  .count = count,
                  .width = width,
                  .out_stride_bytes = operand.stride_bytes},
                 backend.stream);
}

void select_rows(Backend& backend, float* out, const float* in, std::span<const int32_t> g_rows,
                 const float* residual) {
  launch_gather_rows({.out = out,
                      .in = in,
                      .rows = g_rows.data(),
                      .count = static_cast<int64_t>(g_rows.size()),
                      .width = backend.model.hidden_size,
                      .update = residual},
                     backend.stream);
}

void norm_chosen_rows(Backend& backend, StepState& step, const float* weight, std::span<const int32_t> g_rows,
                      float* out) {
  const Workspace& workspace = backend.workspace;
  if (backend.has_peers()) {
    norm_and_gather_rows(backend, step, weight);
    return select_rows(backend, out, workspace.normed, g_rows, nullptr);
  }
  select_rows(backend, out, workspace.hidden, g_rows, step.deferred.parts);
  const DeferredResidual deferred = std::exchange(step.deferred, {});
  norm_rows(backend, step, weight, out, out, static_cast<int64_t>(g_rows.size()));
  step.deferred = deferred;
}

void norm_logit_rows(Backend& backend, StepState& step, const float* weight, std::span<const int32_t> rows) {
  if (step.has_logits) return;
  if (step.is_captured) return norm_all_rows(backend, step, weight);
  const StepBuffers& host = backend.staging.steps[step.slot];
  const int32_t* g_rows = backend.workspace.step.logit_rows;
  step.num_logit_rows = static_cast<int64_t>(rows.size());
  std::ranges::copy(rows, host.logit_rows);
  Copies uploads(CopyDirection::kToDevice, backend.stream);
  uploads.add(backend.workspace.step.logit_rows, host.logit_rows, step.num_logit_rows);
  uploads.send();
  norm_chosen_rows(backend, step, weight, {g_rows, rows.size()}, backend.workspace.logit_normed);
}

void run_head(Backend& backend, StepState& step, const PlacedWeight& head) {
  if (step.has_logits) return;
  const Workspace& workspace = backend.workspace;
  const int64_t hidden = backend.model.hidden_size;
  const int64_t count = step.num_logit_rows;
  const bool is_fp8 = head.element == GemmElement::kE4m3;
  const Operand rounded = {.rows = workspace.logit_operand,
                           .scales = nullptr,
                           .stride_bytes = portable_row_bytes(hidden, GemmElement::kBf16)};
  const Operand operand = is_fp8 ? backend.operand(hidden) : rounded;
  if (is_fp8) {
    prepare_rows(backend, workspace.logit_normed, hidden, operand, count);
  } else {
    round_rows(backend, workspace.logit_normed, operand, count, hidden);
  }
  run_gemm(backend, step, head, nullptr, operand, backend.has_peers() ? workspace.rank_logits : workspace.logits,
           backend.slice.vocab_size(), count);
  gather_logits(backend, count);
}

}

namespace ops {

void rope_table(Backend& backend, StepState& step) {
  cuda::launch_rotary_table({.cosines = backend.workspace.cosines,
                             .sines = backend.workspace.sines,
                             .positions = step.rows.positions,
                             .count = step.num_rows,
                             .rotary_dim = backend.model.rotary_dim,
                             .theta = backend.model.rope_theta},
                            backend.stream);
}

void embed(Backend& backend, StepState& step) {
  cuda::launch_embed({.hidden = backend.workspace.hidden,
                      .table = backend.weights.embedding,
                      .tokens = step.rows.tokens,
                      .sampled_rows = step.rows.sampled_rows,
                      .count = step.num_rows,
                      .width = backend.model.hidden_size,
                      .sampled = backend.workspace.sampling.results[0],
                      .vocab_size = backend.model.vocab_size},
                     backend.stream);
}

void attention_norm(Backend& backend, StepState& step, int64_t layer) {
  cuda::run_norm(backend, step, backend.layer(layer).input_norm, false);
}

void qkv_proj(Backend& backend, StepState& step, int64_t layer) {
  const int64_t width = (int64_t{backend.model.num_heads} + 2 * backend.model.num_kv_heads) * backend.model.head_dim;
  cuda::run_sections(backend, step, backend.layer(layer).qkv, backend.operand(backend.model.hidden_size),
                     backend.workspace.qkv, width);
}

void rope_and_cache(Backend& backend, StepState& step, int64_t layer) {
  if (step.fuses_rope_and_attention) return;
  cuda::launch_rope_and_cache(cuda::rotate_call(backend, step, layer), backend.stream);
}

void attention(Backend& backend, StepState& step, int64_t layer) {
  const int64_t width = int64_t{backend.model.num_heads} * backend.model.head_dim;
  const cuda::Operand operand = backend.operand(width);
  if (step.fuses_rope_and_attention) {
    cuda::launch_attention_step({cuda::decode_call(backend, layer), cuda::rotate_call(backend, step, layer),
                                 operand.rows, operand.scales, operand.stride_bytes,
                                 backend.workspace.attention_magnitudes},
                                backend.stream);
    return cuda::quantise_attention_step(backend, step, operand);
  }
  cuda::run_attention(backend, step, layer);
  cuda::prepare_rows(backend, backend.workspace.attention_output, width, operand, step.num_rows);
}

void o_proj(Backend& backend, StepState& step, int64_t layer) {
  cuda::run_gemm(backend, step, backend.layer(layer).output, nullptr,
                 backend.operand(int64_t{backend.model.num_heads} * backend.model.head_dim),
                 cuda::branch_output(backend, step, cuda::Branch::kAttention), backend.model.hidden_size,
                 step.num_rows);
}

void feed_forward_norm(Backend& backend, StepState& step, int64_t layer) {
  cuda::run_norm(backend, step, backend.layer(layer).post_attention_norm, layer >= backend.model.num_dense_layers);
}

void final_norm(Backend& backend, StepState& step, std::span<const int32_t> rows) {
  cuda::norm_logit_rows(backend, step, backend.weights.final_norm, rows);
}

void lm_head(Backend& backend, StepState& step) { cuda::run_head(backend, step, backend.weights.lm_head); }

}

}
