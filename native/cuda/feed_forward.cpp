#include <algorithm>
#include <utility>

#include "cuda/all_reduce.h"
#include "cuda/kernels/gemm/quantise.h"
#include "cuda/kernels/norm/rows.h"
#include "cuda/kernels/router/router.h"
#include "cuda/layers.h"

namespace glint {

namespace cuda {

namespace {

int64_t max_tiles(const Backend& backend, const StepState& step) {
  const int64_t tiles =
      max_token_tiles(step.num_rows, backend.model.experts_per_token, backend.limits.num_local_experts);
  return std::min(tiles, step.num_rows * (backend.model.experts_per_token + 1));
}

Operand prepare_gated(Backend& backend, const StepState& step, int64_t width) {
  const Operand operand = backend.gated_operand(width);
  launch_swiglu({.out = backend.is_fp8() ? nullptr : backend.workspace.gated,
                 .fp8 = backend.is_fp8() ? operand.rows : nullptr,
                 .scales = operand.scales,
                 .gate = backend.workspace.gate_up,
                 .up = backend.workspace.gate_up + width,
                 .in_stride = 2 * width,
                 .count = step.num_rows,
                 .width = width,
                 .row_slices = 1,
                 .slice_stride = operand.stride_bytes},
                backend.stream);
  if (!backend.is_fp8()) prepare_rows(backend, backend.workspace.gated, width, operand, step.num_rows);
  return operand;
}

void run_feed_forward(Backend& backend, StepState& step, const PlacedFeedForward& weights, float* out) {
  run_sections(backend, step, weights.gate_up, backend.operand(backend.model.hidden_size), backend.workspace.gate_up,
               2 * weights.width);
  const Operand gated = prepare_gated(backend, step, weights.width);
  run_gemm(backend, step, weights.down, nullptr, gated, out, backend.model.hidden_size, step.num_rows);
}

bool fills_many_rounds(const Backend& backend) {
  constexpr int64_t kManyRounds = 8;
  constexpr int64_t kTileWidth = 64;
  const int64_t num_experts = backend.slice.expert_last - backend.slice.expert_first;
  return num_experts * backend.model.expert_width / kTileWidth >= kManyRounds * backend.device.num_multiprocessors;
}

GroupCall group_call(const Backend& backend, const StepState& step, bool has_shared) {
  return {.grouped = backend.workspace.moe.grouped,
          .experts = backend.workspace.moe.experts,
          .weights = backend.workspace.moe.weights,
          .num_tokens = static_cast<int32_t>(step.num_rows),
          .experts_per_token = backend.model.experts_per_token,
          .expert_first = backend.slice.expert_first,
          .expert_last = backend.slice.expert_last,
          .has_shared = has_shared ? 1 : 0,
          .num_real_tokens = backend.workspace.step.counts + kRowCount,
          .experts_touched = backend.workspace.moe.experts_touched,
          .is_in_expert_order = fills_many_rounds(backend)};
}

void run_tiled_experts(Backend& backend, StepState& step, const PlacedLayer& layer, float* out) {
  const PlacedExperts& experts = layer.experts;
  const ExpertBuffers& moe = backend.workspace.moe;
  const Operand operand = backend.operand(backend.model.hidden_size);
  float* hidden = step.streams_gate_up ? moe.streamed : moe.hidden;
  launch_expert_gate_up({.hidden = hidden,
                         .grouped = moe.grouped,
                         .packed_weights = experts.packed_gate_up,
                         .gate_scales = experts.gate_scales,
                         .up_scales = experts.up_scales,
                         .activations = operand.rows,
                         .token_scales = operand.scales,
                         .width = backend.model.expert_width,
                         .k_bytes = backend.model.hidden_size,
                         .num_tokens = step.num_rows,
                         .max_tiles = max_tiles(backend, step),
                         .multiply = backend.device.multiply(),
                         .tiles_taken = moe.tiles_taken},
                        backend.stream);
  launch_expert_down({.out = out,
                      .packed_tiles = moe.packed_tiles,
                      .arrivals = moe.arrivals,
                      .grouped = moe.grouped,
                      .packed_weights = experts.packed_down,
                      .row_scales = experts.down_scales,
                      .hidden = hidden,
                      .width = backend.model.expert_width,
                      .hidden_size = backend.model.hidden_size,
                      .num_tokens = step.num_rows,
                      .max_rows = step.num_rows * (backend.model.experts_per_token + 1),
                      .streams_gate_up = step.streams_gate_up,
                      .multiply = backend.device.multiply(),
                      .routed = moe.routed},
                     backend.stream);
  if (starts_next_after_wait(backend.model.hidden_size, step.num_rows)) step.hidden_is_settled = true;
  if (experts.holds_shared) return;
  launch_add_rows(out, moe.shared, step.num_rows * backend.model.hidden_size, backend.stream);
}

void run_grouped(Backend& backend, const StepState& step, const PlacedWeight& weight, const Operand& operand,
                 const int32_t* row_tokens, float* out) {
  const ExpertBuffers& moe = backend.workspace.moe;
  launch_gemm_portable({.out = out,
                        .out_stride = weight.rows,
                        .weight = portable_weight(weight),
                        .bias = nullptr,
                        .activations = operand.rows,
                        .activation_stride_bytes = operand.stride_bytes,
                        .token_scales = operand.scales,
                        .num_tokens = step.num_rows,
                        .row_tokens = row_tokens,
                        .tiles = moe.grouped.gate_up_tiles,
                        .num_tiles = moe.grouped.num_gate_up_tiles,
                        .max_tiles = max_tiles(backend, step),
                        .tile_tokens = plan_tiles(step.num_rows).gate_up_tokens},
                       backend.stream);
}

Operand gate_expert_rows(Backend& backend, const StepState& step) {
  const ExpertBuffers& moe = backend.workspace.moe;
  const int64_t width = backend.model.expert_width;
  const int64_t rows = step.num_rows * backend.model.experts_per_token;
  launch_swiglu({.out = backend.is_fp8() ? nullptr : moe.gate,
                 .fp8 = backend.is_fp8() ? moe.operand.rows : nullptr,
                 .scales = moe.operand.scales,
                 .gate = moe.gate,
                 .up = moe.up,
                 .in_stride = width,
                 .count = rows,
                 .width = width,
                 .row_slices = 1,
                 .slice_stride = moe.operand.stride_bytes},
                backend.stream);
  if (backend.is_fp8()) return moe.operand;
  round_rows(backend, moe.gate, moe.operand, rows, width);
  return {.rows = moe.operand.rows, .scales = nullptr, .stride_bytes = moe.operand.stride_bytes};
}

void combine_rows(Backend& backend, const StepState& step, float* out) {
  const ExpertBuffers& moe = backend.workspace.moe;
  launch_place_rows({.token_rows = moe.token_rows,
                     .row_tokens = moe.grouped.row_tokens,
                     .tiles = moe.grouped.gate_up_tiles,
                     .num_tiles = moe.grouped.num_gate_up_tiles,
                     .max_tiles = max_tiles(backend, step),
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
                       .num_tokens = step.num_rows,
                       .hidden_size = backend.model.hidden_size,
                       .experts_per_token = backend.model.experts_per_token,
                       .expert_first = backend.slice.expert_first,
                       .expert_last = backend.slice.expert_last,
                       .has_shared = 0,
                       .num_real_tokens = backend.workspace.step.counts + kRowCount},
                      backend.stream);
}

void run_portable_experts(Backend& backend, const StepState& step, const PlacedLayer& layer, float* out) {
  const ExpertBuffers& moe = backend.workspace.moe;
  const Operand operand = backend.operand(backend.model.hidden_size);
  run_grouped(backend, step, layer.experts.gate, operand, moe.grouped.row_tokens, moe.gate);
  run_grouped(backend, step, layer.experts.up, operand, moe.grouped.row_tokens, moe.up);
  run_grouped(backend, step, layer.experts.down, gate_expert_rows(backend, step), nullptr, moe.routed);
  combine_rows(backend, step, out);
}

}

}

namespace ops {

void dense_feed_forward(Backend& backend, StepState& step, int64_t layer) {
  cuda::run_feed_forward(backend, step, backend.layer(layer).dense,
                         cuda::branch_output(backend, step, cuda::Branch::kFeedForward));
}

void router(Backend& backend, StepState& step, int64_t layer) {
  const glint_model& model = backend.model;
  const cuda::ExpertBuffers& moe = backend.workspace.moe;
  const cuda::RowRange rows = cuda::own_rows(backend, step);
  const int64_t first_choice = rows.first * model.experts_per_token;
  const cuda::RouterCall call = {.experts = moe.experts + first_choice,
                                 .weights = moe.weights + first_choice,
                                 .splits = moe.router_splits,
                                 .in = backend.workspace.normed + rows.first * model.hidden_size,
                                 .weight = backend.layer(layer).router,
                                 .bias = backend.layer(layer).router_bias,
                                 .count = rows.count,
                                 .width = model.hidden_size,
                                 .num_experts = model.num_experts,
                                 .experts_per_token = model.experts_per_token,
                                 .routed_scaling = model.routed_scaling,
                                 .normalises = model.normalise_weights != 0};
  step.is_grouped =
      step.all_reduce != cuda::AllReduce::kSequenceParallel && cuda::groups_in_choice(rows.count, model.num_experts);
  if (step.is_grouped) {
    const bool has_shared = backend.layer(layer).experts.holds_shared;
    return cuda::launch_router_and_grouping(call, cuda::group_call(backend, step, has_shared), backend.stream);
  }
  cuda::launch_router(call, backend.stream);
  const auto choice_bytes = model.experts_per_token * static_cast<int64_t>(sizeof(float));
  cuda::async_all_gather_rows(backend, step, {moe.experts, choice_bytes, moe.weights, choice_bytes},
                              cuda::AsyncGather::kExperts);
}

void shared_expert(Backend& backend, StepState& step, int64_t layer) {
  const cuda::PlacedLayer& weights = backend.layer(layer);
  cuda::await_rows(backend, step, cuda::AsyncGather::kRows);
  if (weights.experts.holds_shared) return;
  cuda::run_feed_forward(backend, step, weights.shared, backend.workspace.moe.shared);
}

void routed_experts(Backend& backend, StepState& step, int64_t layer) {
  const cuda::PlacedLayer& weights = backend.layer(layer);
  float* out = cuda::branch_output(backend, step, cuda::Branch::kFeedForward);
  cuda::await_rows(backend, step, cuda::AsyncGather::kExperts);
  if (!std::exchange(step.is_grouped, false)) {
    cuda::launch_group_tokens(cuda::group_call(backend, step, weights.experts.holds_shared), backend.stream);
  }
  if (weights.experts.is_tiled) {
    cuda::run_tiled_experts(backend, step, weights, out);
  } else {
    cuda::run_portable_experts(backend, step, weights, out);
  }
}

}

}
