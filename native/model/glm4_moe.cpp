#include "model/glm4_moe.h"

namespace glint {

ForwardPass::ForwardPass(Backend& backend, const glint_model& model)
    : backend_(backend), step_(make_step()), num_layers_(model.num_layers), num_dense_layers_(model.num_dense_layers) {}

void ForwardPass::run(const StepBatch& batch, int32_t slot) {
  count_ = static_cast<int64_t>(batch.tokens.size());
  ops::begin_step(backend_, *step_, batch, slot);
  if (!tap_ && ops::replay_step(backend_, *step_, Pass::kMain)) return;
  run_layers();
}

void ForwardPass::run_layers() {
  ops::rope_table(backend_, *step_);
  ops::embed(backend_, *step_);
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    tap(layer);
    attention(layer);
    feed_forward(layer);
  }
  tap(num_layers_);
}

void ForwardPass::attention(int64_t layer) {
  ops::attention_norm(backend_, *step_, layer);
  ops::qkv_proj(backend_, *step_, layer);
  ops::rope_and_cache(backend_, *step_, layer);
  ops::attention(backend_, *step_, layer);
  ops::o_proj(backend_, *step_, layer);
  ops::all_reduce_residual(backend_, *step_);
}

void ForwardPass::feed_forward(int64_t layer) {
  ops::feed_forward_norm(backend_, *step_, layer);
  if (layer < num_dense_layers_) {
    ops::dense_feed_forward(backend_, *step_, layer);
  } else {
    ops::router(backend_, *step_, layer);
    ops::shared_expert(backend_, *step_, layer);
    ops::routed_experts(backend_, *step_, layer);
  }
  ops::all_reduce_residual(backend_, *step_);
}

void ForwardPass::compute_logits(std::span<const int32_t> rows) {
  ops::final_norm(backend_, *step_, rows);
  ops::lm_head(backend_, *step_);
}

void ForwardPass::run_mtp(const StepBatch& batch, std::span<const int32_t> hidden_rows,
                          std::span<const PageState> page_states, bool is_first_draft) {
  ops::mtp_hidden(backend_, *step_, hidden_rows, is_first_draft);
  ops::mtp_page_states(backend_, page_states);
  ops::begin_step(backend_, *step_, batch, kPromptSlot);
  if (!ops::replay_step(backend_, *step_, Pass::kDraft)) run_mtp_layer();
}

void ForwardPass::run_mtp_layer() {
  ops::rope_table(backend_, *step_);
  ops::mtp_proj(backend_, *step_);
  attention(num_layers_);
  feed_forward(num_layers_);
}

void ForwardPass::compute_draft_logits(std::span<const int32_t> rows) {
  ops::mtp_norm(backend_, *step_, rows);
  ops::mtp_head(backend_, *step_);
}

void ForwardPass::capture() {
  const auto run_all_rows = [this] {
    run_layers();
    compute_logits({});
  };
  const auto draft_all_rows = [this] {
    run_mtp_layer();
    compute_draft_logits({});
  };
  while (ops::capture_step(backend_, *step_, Pass::kMain, run_all_rows)) continue;
  while (ops::capture_step(backend_, *step_, Pass::kDraft, draft_all_rows)) continue;
}

void ForwardPass::tap(int64_t layer) const {
  if (tap_) tap_(*step_, layer, count_);
}

}
