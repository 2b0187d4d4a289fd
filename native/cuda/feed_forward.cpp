#include <algorithm>

#include "cuda/layers.h"
#include "cuda/kernels/gemm/gemm_portable.h"
#include "cuda/kernels/gemm/quantise.h"
#include "cuda/kernels/router/router.h"
#include "cuda/kernels/norm/rows.h"

namespace glint {

namespace cuda {

namespace {

int64_t max_tiles(const Backend& backend) {
  const int64_t tiles =
      max_token_tiles(backend.num_rows, backend.model.experts_per_token, backend.limits.num_local_experts);
  return std::min(tiles, backend.num_rows * (backend.model.experts_per_token + 1));
}

void run_feed_forward(Backend& backend, const PlacedFeedForward& weights, float* out) {
  run_sections(backend, weights.gate_up, backend.operand(backend.model.hidden_size), backend.places.gate_up,
               2 * weights.width);
  const Operand gated = prepare_gated(backend, weights.width);
  run_product(backend, weights.down, nullptr, gated, out, backend.model.hidden_size, backend.num_rows);
}

GroupCall group_call(const Backend& backend, bool has_shared) {
  return {.grouped = backend.places.moe.grouped,
          .experts = backend.places.moe.experts,
          .weights = backend.places.moe.weights,
          .num_tokens = static_cast<int32_t>(backend.num_rows),
          .experts_per_token = backend.model.experts_per_token,
          .expert_first = backend.slice.expert_first,
          .expert_last = backend.slice.expert_last,
          .has_shared = has_shared ? 1 : 0,
          .num_real_tokens = backend.places.step.counts + kRowCount,
          .experts_touched = backend.places.moe.experts_touched};
}

void run_hopper_experts(Backend& backend, const PlacedLayer& layer, float* out) {
  const PlacedExperts& experts = layer.experts;
  const ExpertActivations& moe = backend.places.moe;
  const Operand operand = backend.operand(backend.model.hidden_size);
  float* hidden = streams_gate_up(backend.num_rows) ? moe.handed : moe.hidden;
  launch_group_tokens(group_call(backend, experts.holds_shared), backend.stream);
  launch_expert_gate_up({.hidden = hidden,
                         .grouped = moe.grouped,
                         .packed_weights = experts.packed_gate_up,
                         .gate_scales = experts.gate_scales,
                         .up_scales = experts.up_scales,
                         .activations = operand.rows,
                         .token_scales = operand.scales,
                         .width = backend.model.expert_width,
                         .k_bytes = backend.model.hidden_size,
                         .num_tokens = backend.num_rows,
                         .max_tiles = max_tiles(backend),
                         .tiles_taken = moe.tiles_taken},
                        backend.stream);
  launch_expert_down({.out = out,
                      .packed_tiles = moe.records,
                      .arrivals = moe.arrivals,
                      .grouped = moe.grouped,
                      .packed_weights = experts.packed_down,
                      .row_scales = experts.down_scales,
                      .hidden = hidden,
                      .width = backend.model.expert_width,
                      .hidden_size = backend.model.hidden_size,
                      .num_tokens = backend.num_rows,
                      .max_rows = backend.num_rows * (backend.model.experts_per_token + 1)},
                     backend.stream);
  if (starts_next_after_wait(backend.model.hidden_size, backend.num_rows)) backend.hidden_is_settled = true;
  if (experts.holds_shared) return;
  launch_add_rows(out, moe.shared, backend.num_rows * backend.model.hidden_size, backend.stream);
}

void run_grouped(Backend& backend, const PlacedWeight& weight, const Operand& operand, const int32_t* row_tokens,
                 float* out) {
  const ExpertActivations& moe = backend.places.moe;
  launch_gemm_portable({.out = out,
                        .out_stride = weight.rows,
                        .weight = portable_weight(weight),
                        .bias = nullptr,
                        .activations = operand.rows,
                        .activation_stride_bytes = operand.stride_bytes,
                        .token_scales = operand.scales,
                        .num_tokens = backend.num_rows,
                        .row_tokens = row_tokens,
                        .tiles = moe.grouped.gate_up_tiles,
                        .num_tiles = moe.grouped.num_gate_up_tiles,
                        .max_tiles = max_tiles(backend),
                        .tile_tokens = plan_tiles(backend.num_rows).gate_up_tokens},
                       backend.stream);
}

Operand gate_expert_rows(Backend& backend) {
  const ExpertActivations& moe = backend.places.moe;
  const int64_t width = backend.model.expert_width;
  const int64_t rows = backend.num_rows * backend.model.experts_per_token;
  const bool has_codes = weight_element(backend.model) == GemmElement::kE4m3;
  launch_swiglu({.out = has_codes ? nullptr : moe.gate,
                 .fp8 = has_codes ? moe.operand.rows : nullptr,
                 .scales = moe.operand.scales,
                 .gate = moe.gate,
                 .up = moe.up,
                 .in_stride = width,
                 .count = rows,
                 .width = width,
                 .row_slices = 1,
                 .slice_stride = moe.operand.stride_bytes},
                backend.stream);
  if (has_codes) return moe.operand;
  launch_to_bf16({.out = moe.operand.rows,
                  .in = moe.gate,
                  .in_stride = width,
                  .count = rows,
                  .width = width,
                  .out_stride_bytes = moe.operand.stride_bytes},
                 backend.stream);
  return {.rows = moe.operand.rows, .scales = nullptr, .stride_bytes = moe.operand.stride_bytes};
}

void combine_rows(Backend& backend, float* out) {
  const ExpertActivations& moe = backend.places.moe;
  launch_place_rows({.token_rows = moe.token_rows,
                     .row_tokens = moe.grouped.row_tokens,
                     .tiles = moe.grouped.gate_up_tiles,
                     .num_tiles = moe.grouped.num_gate_up_tiles,
                     .max_tiles = max_tiles(backend),
                     .experts = moe.experts,
                     .experts_per_token = backend.model.experts_per_token,
                     .expert_first = backend.slice.expert_first,
                     .expert_last = backend.slice.expert_last},
                    backend.stream);
  launch_combine_rows({.out = out,
                       .routed = moe.routed,
                       .row_weights = moe.grouped.row_weights,
                       .token_rows = moe.token_rows,
                       .experts = moe.experts,
                       .shared = moe.shared,
                       .num_tokens = backend.num_rows,
                       .hidden_size = backend.model.hidden_size,
                       .experts_per_token = backend.model.experts_per_token,
                       .expert_first = backend.slice.expert_first,
                       .expert_last = backend.slice.expert_last,
                       .has_shared = 0,
                       .num_real_tokens = backend.places.step.counts + kRowCount},
                      backend.stream);
}

void run_portable_experts(Backend& backend, const PlacedLayer& layer, float* out) {
  const ExpertActivations& moe = backend.places.moe;
  const Operand operand = backend.operand(backend.model.hidden_size);
  launch_group_tokens(group_call(backend, layer.experts.holds_shared), backend.stream);
  run_grouped(backend, layer.experts.gate, operand, moe.grouped.row_tokens, moe.gate);
  run_grouped(backend, layer.experts.up, operand, moe.grouped.row_tokens, moe.up);
  run_grouped(backend, layer.experts.down, gate_expert_rows(backend), nullptr, moe.routed);
  combine_rows(backend, out);
}

}

}

namespace ops {

void dense_feed_forward(Backend& backend, int64_t layer) {
  cuda::run_feed_forward(backend, backend.layer(layer).dense,
                         cuda::update_target(backend, cuda::UpdateSource::kFeedForward));
}

void route(Backend& backend, int64_t layer) {
  const glint_model& model = backend.model;
  const cuda::ExpertActivations& moe = backend.places.moe;
  const cuda::RowRange rows = cuda::own_rows(backend);
  const int64_t first_choice = rows.first * model.experts_per_token;
  cuda::launch_router({.experts = moe.experts + first_choice,
                       .weights = moe.weights + first_choice,
                       .splits = moe.router_splits,
                       .in = backend.places.normed + rows.first * model.hidden_size,
                       .weight = backend.layer(layer).router,
                       .bias = backend.layer(layer).router_bias,
                       .count = rows.count,
                       .width = model.hidden_size,
                       .num_experts = model.num_experts,
                       .num_groups = model.num_groups,
                       .groups_per_token = model.groups_per_token,
                       .experts_per_token = model.experts_per_token,
                       .routed_scaling = model.routed_scaling,
                       .normalises = model.normalise_weights != 0},
                      backend.stream);
  const auto choice_bytes = model.experts_per_token * static_cast<int64_t>(sizeof(float));
  cuda::share_rows_aside(backend, {moe.experts, choice_bytes, moe.weights, choice_bytes}, cuda::Arrival::kChoices);
}

void expert_feed_forward(Backend& backend, int64_t layer) {
  const cuda::PlacedLayer& weights = backend.layer(layer);
  float* out = cuda::update_target(backend, cuda::UpdateSource::kFeedForward);
  cuda::await_rows(backend, cuda::Arrival::kRows);
  if (!weights.experts.holds_shared) cuda::run_feed_forward(backend, weights.shared, backend.places.moe.shared);
  cuda::await_rows(backend, cuda::Arrival::kChoices);
  if (weights.experts.is_hopper) {
    cuda::run_hopper_experts(backend, weights, out);
  } else {
    cuda::run_portable_experts(backend, weights, out);
  }
}

}

}
