#include "cuda/layers.h"

#include <utility>

#include "cuda/check.h"
#include "cuda/kernels/gemm/gemm_portable.h"
#include "cuda/kernels/gemm/quantise.h"
#include "cuda/kernels/norm/rows.h"

namespace glint {

namespace cuda {

namespace {

void round_rows(Backend& backend, const float* in, const Operand& operand, const RowRange& rows) {
  launch_to_bf16({.out = operand.rows + rows.first * operand.stride_bytes,
                  .in = in,
                  .in_stride = backend.model.hidden_size,
                  .count = rows.count,
                  .width = backend.model.hidden_size,
                  .out_stride_bytes = operand.stride_bytes},
                 backend.stream);
}

void run_norm(Backend& backend, const float* weight, bool keeps_normed) {
  const glint_model& model = backend.model;
  const Activations& places = backend.places;
  const Operand operand = backend.operand(model.hidden_size);
  const RowRange rows = own_rows(backend);
  const int64_t offset = rows.first * model.hidden_size;
  const bool has_codes = weight_element(model) == GemmElement::kE4m3;
  norm_update(backend, {.hidden = places.hidden + offset,
                        .normed = keeps_normed || !has_codes ? places.normed + offset : nullptr,
                        .fp8 = has_codes ? operand.rows + rows.first * operand.stride_bytes : nullptr,
                        .scales = has_codes ? operand.scales + rows.first : nullptr,
                        .fp8_stride = operand.stride_bytes,
                        .parts = nullptr,
                        .part_stride = 0,
                        .num_parts = 0,
                        .weight = weight,
                        .count = rows.count,
                        .width = model.hidden_size,
                        .epsilon = static_cast<float>(model.norm_epsilon)});
  if (!has_codes) round_rows(backend, places.normed + offset, operand, rows);
  const SharedRows shared = {operand.rows, operand.stride_bytes, operand.scales, sizeof(float)};
  if (!keeps_normed) return share_rows(backend, shared);
  share_rows_aside(backend, shared, Arrival::kRows);
}

bool attends_in_one_kernel(const Backend& backend) {
  const glint_model& model = backend.model;
  return (backend.is_capturing || backend.num_prefill_tasks == 0) && weight_element(model) == GemmElement::kE4m3 &&
         backend.page_element == PageElement::kBf16 &&
         fits_attention_step(model.num_heads, model.num_kv_heads, model.head_dim, model.rotary_dim);
}

RopeCall rotate_call(const Backend& backend, int64_t layer) {
  const glint_model& model = backend.model;
  const int64_t query_width = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_width = int64_t{model.num_kv_heads} * model.head_dim;
  const int64_t stride = query_width + 2 * kv_width;
  const float* query = backend.places.query_key_value;
  return {.query_out = backend.places.query,
          .pages = backend.pages(layer),
          .query = query,
          .key = query + query_width,
          .value = query + query_width + kv_width,
          .query_stride = stride,
          .key_stride = stride,
          .query_norm = backend.layer(layer).query_norm,
          .key_norm = backend.layer(layer).key_norm,
          .cosines = backend.places.cosines,
          .sines = backend.places.sines,
          .slots = backend.places.step.slots,
          .count = backend.num_rows,
          .num_heads = model.num_heads,
          .num_kv_heads = model.num_kv_heads,
          .head_dim = model.head_dim,
          .rotary_dim = model.rotary_dim,
          .epsilon = static_cast<float>(model.norm_epsilon)};
}

DecodeCall decode_call(const Backend& backend, int64_t layer) {
  const StepPlaces& step = backend.places.step;
  return {.attend = {.out = backend.places.attended,
                     .query = backend.places.query,
                     .pages = backend.pages(layer),
                     .page_table = step.page_table,
                     .num_heads = backend.model.num_heads,
                     .num_kv_heads = backend.model.num_kv_heads,
                     .head_dim = backend.model.head_dim},
          .tasks = step.decode_tasks,
          .num_tasks = step.counts + kDecodeCount,
          .max_tasks = static_cast<int32_t>(backend.limits.max_decode_tasks()),
          .partials = backend.places.partials,
          .arrivals = backend.places.arrivals};
}

void finish_logits(Backend& backend, int64_t count) {
  const int64_t hidden = backend.model.hidden_size;
  const Operand operand = {.rows = backend.places.logit_operand,
                           .scales = nullptr,
                           .stride_bytes = portable_row_bytes(hidden, GemmElement::kBf16)};
  launch_to_bf16({.out = operand.rows,
                  .in = backend.places.logit_normed,
                  .in_stride = hidden,
                  .count = count,
                  .width = hidden,
                  .out_stride_bytes = operand.stride_bytes},
                 backend.stream);
  run_product(backend, backend.weights.lm_head, nullptr, operand,
              backend.has_peers() ? backend.places.rank_logits : backend.places.logits, backend.slice.vocab_size(),
              count);
  gather_logits(backend, count);
}

void norm_for_logits(Backend& backend, float* hidden, float* normed, int64_t count) {
  norm_update(backend, {.hidden = hidden,
                        .normed = normed,
                        .fp8 = nullptr,
                        .scales = nullptr,
                        .fp8_stride = 0,
                        .parts = nullptr,
                        .part_stride = 0,
                        .num_parts = 0,
                        .weight = backend.weights.final_norm,
                        .count = count,
                        .width = backend.model.hidden_size,
                        .epsilon = static_cast<float>(backend.model.norm_epsilon)});
}

void share_final_rows(Backend& backend) {
  const RowRange rows = own_rows(backend);
  const int64_t offset = rows.first * backend.model.hidden_size;
  norm_for_logits(backend, backend.places.hidden + offset, backend.places.normed + offset, rows.count);
  share_rows(backend, {backend.places.normed, backend.model.hidden_size * static_cast<int64_t>(sizeof(float))});
}

void copy_rows(Backend& backend, float* out, const float* in, int64_t count) {
  GLINT_CHECK_CUDA(cudaMemcpyAsync(out, in, static_cast<size_t>(count * backend.model.hidden_size) * sizeof(float),
                                   cudaMemcpyDeviceToDevice, backend.stream));
}

void gather_logit_rows(Backend& backend, float* out, const float* in, const float* update, int64_t count) {
  launch_gather_rows({.out = out,
                      .in = in,
                      .rows = backend.places.step.logit_rows,
                      .count = count,
                      .width = backend.model.hidden_size,
                      .update = update},
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

void run_product(Backend& backend, const PlacedWeight& weight, const float* bias, const Operand& operand, float* out,
                 int64_t out_stride, int64_t count) {
  if (weight.is_hopper) {
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
                 .element = weight.element},
                backend.stream);
    if (starts_next_after_wait(operand.stride_bytes, count)) backend.hidden_is_settled = true;
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

void run_sections(Backend& backend, const std::vector<PlacedSection>& sections, const Operand& operand, float* out,
                  int64_t out_stride) {
  for (const PlacedSection& section : sections) {
    run_product(backend, section.weight, section.bias, operand, out + section.out_first, out_stride, backend.num_rows);
  }
}

void prepare_rows(Backend& backend, const float* rows, int64_t width, const Operand& operand) {
  if (weight_element(backend.model) == GemmElement::kE4m3) {
    launch_quantise({.fp8 = operand.rows,
                     .scales = operand.scales,
                     .in = rows,
                     .in_stride = width,
                     .count = backend.num_rows,
                     .width = width,
                     .row_slices = 1,
                     .slice_stride = operand.stride_bytes},
                    backend.stream);
  } else {
    launch_to_bf16({.out = operand.rows,
                    .in = rows,
                    .in_stride = width,
                    .count = backend.num_rows,
                    .width = width,
                    .out_stride_bytes = operand.stride_bytes},
                   backend.stream);
  }
}

Operand prepare_gated(Backend& backend, int64_t width) {
  const Operand operand = backend.gated_operand(width);
  const bool has_codes = weight_element(backend.model) == GemmElement::kE4m3;
  launch_swiglu({.out = has_codes ? nullptr : backend.places.gated,
                 .fp8 = has_codes ? operand.rows : nullptr,
                 .scales = operand.scales,
                 .gate = backend.places.gate_up,
                 .up = backend.places.gate_up + width,
                 .in_stride = 2 * width,
                 .count = backend.num_rows,
                 .width = width,
                 .row_slices = 1,
                 .slice_stride = operand.stride_bytes},
                backend.stream);
  if (!has_codes) prepare_rows(backend, backend.places.gated, width, operand);
  return operand;
}

void add_update(Backend& backend) {
  if (backend.pending.num_parts == 0) return;
  launch_add_rows(backend.places.hidden, backend.pending.parts, backend.num_rows * backend.model.hidden_size,
                  backend.stream);
  backend.pending = {};
}

void compute_all_logits(Backend& backend) {
  if (backend.exchange == Exchange::kSharded) {
    share_final_rows(backend);
    copy_rows(backend, backend.places.logit_normed, backend.places.normed, backend.num_rows);
  } else {
    norm_for_logits(backend, backend.places.hidden, backend.places.logit_normed, backend.num_rows);
  }
  finish_logits(backend, backend.num_rows);
}

void compute_row_logits(Backend& backend, int64_t count) {
  const Activations& places = backend.places;
  if (backend.has_peers()) {
    share_final_rows(backend);
    gather_logit_rows(backend, places.logit_normed, places.normed, nullptr, count);
  } else {
    gather_logit_rows(backend, places.logit_hidden, places.hidden, backend.pending.parts, count);
    const PendingUpdate pending = std::exchange(backend.pending, {});
    norm_for_logits(backend, places.logit_hidden, places.logit_normed, count);
    backend.pending = pending;
  }
  finish_logits(backend, count);
}

KvPages prefill_pages(Backend& backend, const KvPages& pages) {
  if (!holds_fp8(pages.element)) return pages;
  const KvPages widened = backend.widened_pages();
  launch_dequantise_kv({.fp8 = pages,
                        .bf16 = widened,
                        .page_table = backend.places.step.page_table,
                        .num_pages = backend.num_prefill_pages,
                        .num_kv_heads = backend.model.num_kv_heads,
                        .head_dim = backend.model.head_dim},
                       backend.stream);
  return widened;
}

}

namespace ops {

void embed(Backend& backend) {
  const cuda::StepPlaces& step = backend.places.step;
  cuda::launch_rotary_table({.cosines = backend.places.cosines,
                             .sines = backend.places.sines,
                             .positions = step.positions,
                             .count = backend.num_rows,
                             .rotary_dim = backend.model.rotary_dim,
                             .theta = backend.model.rope_theta},
                            backend.stream);
  cuda::launch_embed({.hidden = backend.places.hidden,
                      .table = backend.weights.embedding,
                      .tokens = step.tokens,
                      .count = backend.num_rows,
                      .width = backend.model.hidden_size,
                      .sampled = backend.places.sampling.results[0],
                      .vocab_size = backend.model.vocab_size},
                     backend.stream);
}

void norm_before_attention(Backend& backend, int64_t layer) {
  cuda::run_norm(backend, backend.layer(layer).input_norm, false);
}

void project_query_key_value(Backend& backend, int64_t layer) {
  const int64_t width = (int64_t{backend.model.num_heads} + 2 * backend.model.num_kv_heads) * backend.model.head_dim;
  cuda::run_sections(backend, backend.layer(layer).query_key_value, backend.operand(backend.model.hidden_size),
                     backend.places.query_key_value, width);
}

void rotate_and_store(Backend& backend, int64_t layer) {
  if (cuda::attends_in_one_kernel(backend)) return;
  cuda::launch_rope_and_cache(cuda::rotate_call(backend, layer), backend.stream);
}

void attend(Backend& backend, int64_t layer) {
  const cuda::DecodeCall decode = cuda::decode_call(backend, layer);
  if (cuda::attends_in_one_kernel(backend)) {
    const int64_t width = int64_t{backend.model.num_heads} * backend.model.head_dim;
    const cuda::Operand operand = backend.operand(width);
    return cuda::launch_attention_step(
        {decode, cuda::rotate_call(backend, layer), operand.rows, operand.scales, operand.stride_bytes},
        backend.stream);
  }
  if (backend.is_capturing || backend.num_decode_tasks > 0) cuda::launch_attention_decode(decode, backend.stream);
  if (!backend.is_capturing && backend.num_prefill_tasks > 0) {
    cuda::AttendCall attend = decode.attend;
    attend.pages = cuda::prefill_pages(backend, attend.pages);
    cuda::launch_attention_prefill({.attend = attend,
                                    .tasks = backend.places.step.prefill_tasks,
                                    .num_tasks = backend.places.step.counts + cuda::kPrefillCount},
                                   backend.stream);
  }
}

void project_attended(Backend& backend, int64_t layer) {
  const int64_t width = int64_t{backend.model.num_heads} * backend.model.head_dim;
  const cuda::Operand operand = backend.operand(width);
  if (!cuda::attends_in_one_kernel(backend)) cuda::prepare_rows(backend, backend.places.attended, width, operand);
  cuda::run_product(backend, backend.layer(layer).output, nullptr, operand,
                    cuda::update_target(backend, cuda::UpdateSource::kAttention), backend.model.hidden_size,
                    backend.num_rows);
}

void norm_before_feed_forward(Backend& backend, int64_t layer) {
  cuda::run_norm(backend, backend.layer(layer).post_attention_norm, layer >= backend.model.num_dense_layers);
}

}

}
