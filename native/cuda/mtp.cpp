#include <algorithm>

#include "cuda/check.h"
#include "cuda/kernels/norm/rows.h"
#include "cuda/layers.h"
#include "cuda/memory/copies.h"

namespace glint::ops {

void mtp_hidden(Backend& backend, StepState& step, std::span<const int32_t> rows, bool is_first_draft) {
  const cuda::StepBuffers& host = backend.staging.steps[kPromptSlot];
  const cuda::StepBuffers& device = backend.workspace.step;
  const std::span<const int32_t> g_rows(device.hidden_rows, rows.size());
  backend.wait_for_stream();
  std::ranges::copy(rows, host.hidden_rows);
  cuda::Copies uploads(cuda::CopyDirection::kToDevice, backend.stream);
  uploads.add(device.hidden_rows, host.hidden_rows, static_cast<int64_t>(rows.size()));
  uploads.send();
  if (step.has_logits) {
    return cuda::select_rows(backend, backend.workspace.mtp_hidden, backend.workspace.logit_normed, g_rows, nullptr);
  }
  const float* weight = is_first_draft ? backend.weights.final_norm : backend.weights.mtp.head_norm;
  cuda::norm_chosen_rows(backend, step, weight, g_rows, backend.workspace.mtp_hidden);
}

void mtp_page_states(Backend& backend, std::span<const PageState> states) {
  if (states.empty()) return;
  const cuda::StepBuffers& host = backend.staging.steps[kPromptSlot];
  const cuda::StepBuffers& device = backend.workspace.step;
  const auto count = static_cast<int64_t>(states.size());
  std::ranges::copy(states, host.page_states);
  cuda::Copies uploads(cuda::CopyDirection::kToDevice, backend.stream);
  uploads.add(device.page_states, host.page_states, count);
  uploads.send();
  cuda::launch_page_states({.rows = backend.workspace.mtp_hidden,
                            .kept = backend.page_states(),
                            .states = device.page_states,
                            .count = count,
                            .width = backend.model.hidden_size},
                           backend.stream);
}

void mtp_proj(Backend& backend, StepState& step) {
  const cuda::PlacedMtp& mtp = backend.weights.mtp;
  const cuda::Workspace& workspace = backend.workspace;
  const int64_t width = backend.model.hidden_size;
  const cuda::Operand operand = {.rows = workspace.mtp_operand,
                                 .scales = nullptr,
                                 .stride_bytes = cuda::portable_row_bytes(2 * width, cuda::GemmElement::kBf16)};
  cuda::launch_mtp_input({.out = operand.rows,
                          .out_stride_bytes = operand.stride_bytes,
                          .table = mtp.embedding,
                          .tokens = step.rows.tokens,
                          .hidden = workspace.mtp_hidden,
                          .embedding_norm = mtp.embedding_norm,
                          .hidden_norm = mtp.hidden_norm,
                          .count = step.num_rows,
                          .width = width,
                          .epsilon = static_cast<float>(backend.model.norm_epsilon)},
                         backend.stream);
  cuda::run_gemm(backend, step, mtp.eh_proj, nullptr, operand, workspace.hidden, width, step.num_rows);
  step.hidden_is_settled = false;
}

void mtp_norm(Backend& backend, StepState& step, std::span<const int32_t> rows) {
  cuda::norm_logit_rows(backend, step, backend.weights.mtp.head_norm, rows);
}

void mtp_head(Backend& backend, StepState& step) { cuda::run_head(backend, step, backend.weights.mtp.head); }

}
