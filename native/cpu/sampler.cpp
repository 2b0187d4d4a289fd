#include <algorithm>

#include "cpu/backend.h"

namespace glint {

namespace {

void sample_all(Backend& backend, SampledRow* out, std::span<const SamplingRow> rows) {
  const auto vocab_size = static_cast<size_t>(backend.model.vocab_size);
  backend.workers.team().run(static_cast<int64_t>(rows.size()), [&](int64_t index, int thread) {
    const SamplingRow& row = rows[static_cast<size_t>(index)];
    const std::span logits(backend.workspace.logits.data() + int64_t{row.logit_row} * backend.model.vocab_size,
                           vocab_size);
    if (row.has_given_token) {
      cpu::logprobs_row(out[index], logits, row.given_token, row.settings->num_prompt_logprobs);
    } else {
      cpu::sample_row(out[index], logits, row, backend.workers.sampler(thread));
    }
  });
}

}

namespace ops {

void sample_rows(Backend& backend, int32_t slot, std::span<const SamplingRow> rows) {
  SampledRow* out = backend.workspace.sampled.data() + slot * backend.max_step_items;
  if (backend.slice.is_first()) sample_all(backend, out, rows);
  if (!backend.has_peers()) return;
  backend.collectives.broadcast(out, static_cast<int64_t>(rows.size() * sizeof(SampledRow)), 0);
}

void collect_rows(Backend& backend, int32_t slot, std::span<SampledRow> out) {
  std::copy_n(backend.workspace.sampled.data() + slot * backend.max_step_items, out.size(), out.data());
}

}

}
