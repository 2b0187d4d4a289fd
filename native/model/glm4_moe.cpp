#include "model/glm4_moe.h"

namespace glint {

ForwardPass::ForwardPass(Backend& backend, const glint_model& model)
    : backend_(backend), num_layers_(model.num_layers), num_dense_layers_(model.num_dense_layers) {}

void ForwardPass::run(const StepBatch& batch, int32_t slot) {
  count_ = static_cast<int64_t>(batch.tokens.size());
  ops::begin_step(backend_, batch, slot);
  if (!tap_ && ops::replay_step(backend_)) return;
  run_layers();
}

void ForwardPass::capture() {
  bool has_more = true;
  while (has_more) has_more = ops::capture_step(backend_, [this] { run_layers(); });
}

void ForwardPass::run_layers() {
  ops::embed(backend_);
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    tap(layer);
    attention(layer);
    feed_forward(layer);
  }
  tap(num_layers_);
}

void ForwardPass::attention(int64_t layer) {
  ops::norm_before_attention(backend_, layer);
  ops::project_query_key_value(backend_, layer);
  ops::rotate_and_store(backend_, layer);
  ops::attend(backend_, layer);
  ops::project_attended(backend_, layer);
  ops::exchange_update(backend_);
}

void ForwardPass::feed_forward(int64_t layer) {
  ops::norm_before_feed_forward(backend_, layer);
  if (layer < num_dense_layers_) {
    ops::dense_feed_forward(backend_, layer);
  } else {
    ops::route(backend_, layer);
    ops::expert_feed_forward(backend_, layer);
  }
  ops::exchange_update(backend_);
}

void ForwardPass::tap(int64_t layer) const {
  if (tap_) tap_(layer, count_);
}

}
