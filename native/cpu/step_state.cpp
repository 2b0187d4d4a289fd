#include "cpu/step_state.h"

#include <algorithm>

#include "cpu/layers.h"

namespace glint {

std::atomic<bool> cpu::defers_results = false;

void StepDeleter::operator()(StepState* step) const { delete step; }

StepOwner make_step() { return StepOwner(new StepState); }

namespace ops {

bool keeps_sampled_tokens(const Backend&) { return cpu::defers_results; }

void begin_step(Backend& backend, StepState& step, const StepBatch& batch, int32_t slot) {
  const int64_t previous_slot = (slot + 1) % GLINT_MAX_STEPS_IN_FLIGHT;
  const SampledRow* sampled = backend.workspace.sampled.data() + previous_slot * backend.max_step_items;
  const auto known_token = [sampled](int32_t token, int32_t row) {
    return row == kNoSampledRow ? token : sampled[row].token;
  };
  int32_t* tokens = backend.workspace.step_tokens.data();
  std::ranges::transform(batch.tokens, batch.sampled_rows, tokens, known_token);
  backend.calls.clear();
  step = {.batch = batch, .shard = cpu::choose_shard(backend, static_cast<int64_t>(batch.tokens.size()))};
  step.batch.tokens = {tokens, batch.tokens.size()};
}

bool replay_step(Backend&, StepState&, Pass) { return false; }

bool capture_step(Backend&, StepState&, Pass, const std::function<void()>&) { return false; }

void read_hidden(Backend& backend, StepState& step, float* out) {
  std::copy_n(backend.workspace.hidden.data(), step.num_rows() * backend.model.hidden_size, out);
}

void write_hidden(Backend& backend, StepState& step, const float* in) {
  std::copy_n(in, step.num_rows() * backend.model.hidden_size, backend.workspace.hidden.data());
}

}

}
