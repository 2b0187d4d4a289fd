#include <algorithm>

#include "base/contract.h"
#include "cpu/all_reduce.h"
#include "cpu/layers.h"

namespace glint {

namespace ops {

void begin_step(Backend& backend, const StepBatch& batch, int32_t slot) {
  const int64_t previous_slot = (slot + 1) % GLINT_MAX_STEPS_IN_FLIGHT;
  const SampledRow* sampled = backend.activations.sampled.data() + previous_slot * backend.max_step_items;
  const auto known_token = [sampled](int32_t token) { return token >= 0 ? token : sampled[sampled_row(token)].token; };
  int32_t* tokens = backend.activations.step_tokens.data();
  std::ranges::transform(batch.tokens, tokens, known_token);
  backend.batch = batch;
  backend.batch.tokens = {tokens, batch.tokens.size()};
  backend.calls.clear();
  backend.shard = cpu::choose_shard(backend, backend.count());
}

void embed(Backend& backend) {
  const cpu::Activations& rows = backend.activations;
  cpu::embed(backend.workers, rows.hidden.data(), backend.weights.embedding, backend.batch.tokens);
  cpu::fill_rotary(backend.workers, rows.cosines.data(), rows.sines.data(), backend.batch.positions,
                   backend.heads.rotary_dim, backend.model.rope_theta);
}

void norm_before_attention(Backend& backend, int64_t layer) {
  cpu::norm_hidden(backend, backend.layer(layer).input_norm);
}

void project_query_key_value(Backend& backend, int64_t layer) {
  const LayerWeights& weights = backend.layer(layer);
  const cpu::Activations& rows = backend.activations;
  const cpu::ProductInput input = cpu::prepare_normed(backend);
  cpu::add_product(backend, rows.query.data(), input, backend.count(), weights.query, weights.query_bias);
  cpu::add_product(backend, rows.key.data(), input, backend.count(), weights.key, weights.key_bias);
  cpu::add_product(backend, rows.value.data(), input, backend.count(), weights.value, weights.value_bias);
  cpu::run_calls(backend);
}

void rotate_and_store(Backend& backend, int64_t layer) {
  const LayerWeights& weights = backend.layer(layer);
  const cpu::Activations& rows = backend.activations;
  cpu::rotate_and_store(backend.workers,
                        {.query = rows.query.data(),
                         .key = rows.key.data(),
                         .value = rows.value.data(),
                         .query_norm = weights.query_norm,
                         .key_norm = weights.key_norm,
                         .cosines = rows.cosines.data(),
                         .sines = rows.sines.data(),
                         .heads = backend.heads,
                         .norm_epsilon = backend.model.norm_epsilon},
                        backend.pages, layer, backend.batch.requests);
}

void attend(Backend& backend, int64_t layer) {
  const cpu::Activations& rows = backend.activations;
  cpu::attend(backend.workers, rows.attended.data(), rows.query.data(), backend.pages, layer, backend.batch.requests,
              backend.heads);
}

void project_attended(Backend& backend, int64_t layer) {
  cpu::project_to_parts(backend, backend.activations.attended.data(),
                         backend.heads.num_heads * backend.heads.head_dim, backend.layer(layer).output);
}

void norm_before_feed_forward(Backend& backend, int64_t layer) {
  cpu::norm_hidden(backend, backend.layer(layer).post_attention_norm);
}

void compute_logits(Backend& backend, std::span<const int32_t> rows) {
  const auto count = static_cast<int64_t>(rows.size());
  const int64_t width = backend.model.hidden_size;
  float* normed = backend.activations.normed.data();
  cpu::share_hidden(backend);
  cpu::gather_rows(backend.workers, normed, backend.activations.hidden.data(), rows, width);
  cpu::rms_norm(backend.workers, normed, normed, backend.weights.final_norm, count, width,
                backend.model.norm_epsilon);
  const cpu::ProductInput input = cpu::prepare_normed_floats(backend, count);
  cpu::project_logits(backend, input, count);
}

void read_hidden(Backend& backend, float* out) {
  std::copy_n(backend.activations.hidden.data(), backend.count() * backend.model.hidden_size, out);
}

void write_hidden(Backend& backend, const float* in) {
  std::copy_n(in, backend.count() * backend.model.hidden_size, backend.activations.hidden.data());
}

void read_logits(Backend& backend, float* out, int64_t count) {
  std::copy_n(backend.activations.logits.data(), count * backend.model.vocab_size, out);
}

void fill_pages(Backend& backend, std::byte value) {
  std::fill_n(backend.page_memory.data(), backend.page_memory.byte_count(), value);
}

}

}
