#include <algorithm>

#include "cpu/layers.h"

namespace glint {

namespace cpu {

namespace {

constexpr int64_t kShardedTokens = 32;

}

Shard choose_shard(const Backend& backend, int64_t count) {
  const bool is_auto = backend.sequence_parallel == GLINT_SEQUENCE_PARALLEL_AUTO;
  const bool wants_shards = is_auto ? count >= kShardedTokens : backend.sequence_parallel == GLINT_SEQUENCE_PARALLEL_ON;
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

void all_gather_rows(Backend& backend, const StepState& step, float* rows) {
  const auto row_bytes = backend.model.hidden_size * static_cast<int64_t>(sizeof(float));
  backend.collectives.all_gather(rows, step.shard.rows_per_rank * row_bytes, step.num_rows() * row_bytes);
}

}

namespace ops {

void all_reduce_residual(Backend& backend, StepState& step) {
  const cpu::Workspace& rows = backend.workspace;
  const cpu::Shard& shard = step.shard;
  const int64_t width = backend.model.hidden_size;
  const int64_t floats = step.num_rows() * width;
  const int64_t first = shard.row_first * width;
  const int64_t count = shard.row_count * width;
  float* part = rows.parts.data();
  cpu::reduce_slices(backend.workers, part, floats, backend.row_slices, floats);
  if (!backend.has_peers()) {
    cpu::add_rows(backend.workers, rows.hidden.data(), part, floats);
    return;
  }
  if (shard.is_whole) {
    backend.collectives.all_reduce(rows.branch_sum.data(), part, floats);
  } else {
    backend.collectives.reduce_scatter(rows.branch_sum.data(), part, first, count, floats);
  }
  cpu::add_rows(backend.workers, rows.hidden.data() + first, rows.branch_sum.data(), count);
}

}

}
