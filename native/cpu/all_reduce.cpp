#include "cpu/all_reduce.h"

#include <algorithm>

#include "cpu/layers.h"

namespace glint {

namespace cpu {

namespace {

constexpr int64_t kShardedTokens = 32;

void share_rows(Backend& backend, float* rows) {
  const auto row_bytes = backend.model.hidden_size * static_cast<int64_t>(sizeof(float));
  backend.collectives.all_gather(rows, backend.shard.rows_per_rank * row_bytes, backend.count() * row_bytes);
}

}

Shard choose_shard(const Backend& backend, int64_t count) {
  const bool is_auto = backend.exchange == GLINT_EXCHANGE_AUTO;
  const bool wants_shards = is_auto ? count >= kShardedTokens : backend.exchange == GLINT_EXCHANGE_SHARDED;
  if (!backend.has_peers() || !wants_shards) {
    return {.row_first = 0, .row_count = count, .rows_per_rank = count, .is_whole = true};
  }
  const int64_t rows_per_rank = (count + backend.slice.num_ranks - 1) / backend.slice.num_ranks;
  const int64_t first = std::min(backend.slice.rank * rows_per_rank, count);
  return {.row_first = first,
          .row_count = std::min(rows_per_rank, count - first),
          .rows_per_rank = rows_per_rank,
          .is_whole = false};
}

void norm_hidden(Backend& backend, const float* weight) {
  const Activations& rows = backend.activations;
  const int64_t width = backend.model.hidden_size;
  const int64_t offset = backend.shard.row_first * width;
  rms_norm(backend.workers, rows.normed.data() + offset, rows.hidden.data() + offset, weight, backend.shard.row_count,
           width, backend.model.norm_epsilon);
  if (!backend.shard.is_whole) share_rows(backend, rows.normed.data());
}

void share_hidden(Backend& backend) {
  if (backend.shard.is_whole) return;
  share_rows(backend, backend.activations.hidden.data());
  backend.shard = {.row_first = 0, .row_count = backend.count(), .rows_per_rank = backend.count(), .is_whole = true};
}

void project_logits(Backend& backend, const ProductInput& input, int64_t count) {
  const Activations& rows = backend.activations;
  float* out = backend.has_peers() ? rows.rank_logits.data() : rows.logits.data();
  add_product(backend, out, input, count, backend.weights.lm_head, nullptr);
  run_calls(backend);
  if (backend.has_peers()) {
    backend.collectives.gather_columns(rows.logits.data(), out, count, backend.slice.vocab_size(), 0);
  }
}

}

namespace ops {

void exchange_update(Backend& backend) {
  const cpu::Activations& rows = backend.activations;
  const cpu::Shard& shard = backend.shard;
  const int64_t width = backend.model.hidden_size;
  const int64_t floats = backend.count() * width;
  const int64_t first = shard.row_first * width;
  const int64_t count = shard.row_count * width;
  float* part = rows.parts.data();
  cpu::join_slices(backend.workers, part, floats, backend.row_slices, floats);
  if (!backend.has_peers()) {
    cpu::add_rows(backend.workers, rows.hidden.data(), part, floats);
    return;
  }
  if (shard.is_whole) {
    backend.collectives.all_reduce(rows.update.data(), part, floats);
  } else {
    backend.collectives.reduce_scatter(rows.update.data(), part, first, count, floats);
  }
  cpu::add_rows(backend.workers, rows.hidden.data() + first, rows.update.data(), count);
}

}

}
