#include "cuda/step_state.h"

#include <algorithm>
#include <functional>

#include "base/faults.h"
#include "cuda/all_reduce.h"
#include "cuda/check.h"
#include "cuda/memory/copies.h"

namespace glint {

namespace {

using cuda::DecodeTask;
using cuda::PrefillTask;
using cuda::StepBuffers;

struct StepWriter {
  const Backend& backend;
  StepState& step;
  const StepBuffers& buffers;
  const cuda::StepRows rows;
  int64_t num_pages = 0;
  int64_t num_spare_rows = 0;
  int32_t num_partials = 0;
  bool joins_tails = false;

  void add_rows(const StepBatch& batch) {
    std::ranges::copy(batch.tokens, rows.tokens);
    std::ranges::copy(batch.sampled_rows, rows.sampled_rows);
    std::ranges::copy(batch.positions, rows.positions);
    for (const BatchRequest& request : batch.requests) {
      for (int32_t row = 0; row < request.row_count; ++row) {
        const int32_t position = request.first_position + row;
        rows.slots[request.row_first + row] =
            request.pages[position / cuda::kPageTokens] * cuda::kPageTokens + position % cuda::kPageTokens;
      }
    }
  }

  void pad_rows() {
    for (int64_t row = step.num_rows; row < rows.count; ++row) {
      rows.tokens[row] = 0;
      rows.sampled_rows[row] = kNoSampledRow;
      rows.positions[row] = 0;
      rows.slots[row] = static_cast<int32_t>(backend.num_pages * cuda::kPageTokens);
    }
  }

  void choose_tails(const StepBatch& batch) {
    int64_t num_splits = 0;
    for (const BatchRequest& request : batch.requests) {
      if (request.row_count > backend.limits.max_drafts + 1) continue;
      num_splits += request.row_count * cuda::num_context_splits(request.first_position + request.row_count);
    }
    joins_tails = num_splits > cuda::kManySplits;
  }

  void add_tasks(const StepBatch& batch) {
    num_spare_rows = backend.limits.max_items - static_cast<int64_t>(batch.requests.size());
    for (const BatchRequest& request : batch.requests) {
      step.hides_earlier = step.hides_earlier || request.context_first > 0;
      if (!takes_rows_alone(request)) {
        add_prefill_tasks(request);
        continue;
      }
      step.verifies_drafts = step.verifies_drafts || request.row_count > 1;
      for (int32_t row = 0; row < request.row_count; ++row) add_decode_tasks(request, row);
    }
  }

  bool takes_rows_alone(const BatchRequest& request) {
    const int32_t more_rows = request.row_count - 1;
    if (more_rows > backend.limits.max_drafts || more_rows > num_spare_rows) return false;
    num_spare_rows -= more_rows;
    return true;
  }

  void add_decode_tasks(const BatchRequest& request, int32_t row) {
    const int32_t num_positions = request.first_position + row + 1;
    const int32_t num_splits = cuda::num_context_splits(num_positions);
    const int32_t num_tails = joins_tails ? cuda::num_context_tails(num_positions) : 0;
    const int32_t num_request_pages = (num_positions + cuda::kPageTokens - 1) / cuda::kPageTokens;
    for (int32_t split = 0; split < num_splits - num_tails; ++split) {
      DecodeTask& task = buffers.decode_tasks[step.num_decode_tasks++];
      task.row = request.row_first + row;
      task.num_positions = num_positions;
      task.split = split;
      task.num_splits = num_splits;
      task.partial_first = num_partials;
      task.num_tails = split + 1 + num_tails == num_splits ? num_tails : 0;
      task.context_first = request.context_first;
      const int32_t page_first = split * cuda::kSplitPages;
      const int32_t most_pages = cuda::kSplitPages + task.num_tails * cuda::kTailPages;
      std::copy_n(request.pages + page_first, std::min(most_pages, num_request_pages - page_first), task.pages);
    }
    num_partials += num_splits;
  }

  void sort_decode_tasks() {
    if (step.num_decode_tasks <= backend.device.num_multiprocessors) return;
    const auto num_tokens = [](const DecodeTask& task) {
      return std::min(cuda::kSplitTokens, task.num_positions - task.split * cuda::kSplitTokens);
    };
    const std::span tasks(buffers.decode_tasks, static_cast<size_t>(step.num_decode_tasks));
    const auto shorter =
        std::ranges::partition(tasks, [&](const DecodeTask& task) { return num_tokens(task) == cuda::kSplitTokens; });
    std::ranges::sort(shorter, std::ranges::greater(), num_tokens);
  }

  void add_prefill_tasks(const BatchRequest& request) {
    const int32_t group_heads = backend.model.num_heads / backend.model.num_kv_heads;
    const int32_t last_position = request.first_position + request.row_count;
    const int32_t page_count = (last_position + cuda::kPageTokens - 1) / cuda::kPageTokens;
    std::copy_n(request.pages, page_count, buffers.page_table + num_pages);
    for (int32_t query = 0; query < request.row_count * group_heads; query += cuda::kPrefillTileQueries) {
      buffers.prefill_tasks[step.num_prefill_tasks++] = {.row_first = request.row_first,
                                                         .row_count = request.row_count,
                                                         .first_position = request.first_position,
                                                         .page_first = static_cast<int32_t>(num_pages),
                                                         .query_first = query,
                                                         .context_first = request.context_first};
    }
    num_pages += page_count;
  }

  void sort_prefill_tasks() {
    const int32_t group_heads = backend.model.num_heads / backend.model.num_kv_heads;
    const auto last_position = [group_heads](const PrefillTask& task) {
      return task.first_position + task.query_first / group_heads;
    };
    std::ranges::stable_sort(std::span(buffers.prefill_tasks, static_cast<size_t>(step.num_prefill_tasks)),
                             std::ranges::greater(), last_position);
  }
};

void choose_operations(const Backend& backend, StepState& step) {
  step.all_reduce = cuda::choose_all_reduce(backend, step.num_rows);
  step.gathers_async = step.all_reduce == cuda::AllReduce::kSequenceParallel && !step.is_captured;
  step.fuses_rope_and_attention = step.num_prefill_tasks == 0 && !step.verifies_drafts && !step.hides_earlier &&
                                  cuda::fits_fused_attention(backend);
  step.streams_gate_up = cuda::streams_gate_up(step.num_rows);
}

void add_deferred_residual(Backend& backend, StepState& step) {
  if (step.deferred.num_parts == 0) return;
  cuda::launch_add_rows(backend.workspace.hidden, step.deferred.parts, step.num_rows * backend.model.hidden_size,
                        backend.stream);
  step.deferred = {};
}

cuda::CollectiveCounts counts_of(const Backend& backend) {
  return backend.has_peers() ? backend.collectives->counts() : cuda::CollectiveCounts{};
}

void count_replayed_collectives(Backend& backend, const cuda::CollectiveCounts& counts) {
  for (uint64_t index = 0; index < counts.collectives; ++index) {
    pass_fault_point(FaultPoint::kCollective, backend.slice.rank);
  }
  backend.collectives->add_counts(counts);
}

cuda::Graphs* graphs_of(Backend& backend, Pass pass, bool verifies_drafts) {
  if (pass == Pass::kDraft) return backend.draft_graphs.has_value() ? &*backend.draft_graphs : nullptr;
  return verifies_drafts && backend.verify_graphs.has_value() ? &*backend.verify_graphs : &backend.graphs;
}

bool samples_every_row(const Backend& backend, const StepBatch& batch) {
  const auto has_few_rows = [most = backend.limits.max_drafts + 1](const BatchRequest& request) {
    return request.row_count <= most;
  };
  return batch.logit_rows.size() == batch.tokens.size() && std::ranges::all_of(batch.requests, has_few_rows);
}

}

bool cuda::fits_fused_attention(const Backend& backend) {
  const glint_model& model = backend.model;
  return backend.is_fp8() && backend.page_element == PageElement::kBf16 &&
         fits_attention_step(model.num_heads, model.num_kv_heads, model.head_dim, model.rotary_dim);
}

void StepDeleter::operator()(StepState* step) const { delete step; }

StepOwner make_step() { return StepOwner(new StepState); }

namespace ops {

bool keeps_sampled_tokens(const Backend&) { return true; }

void begin_step(Backend& backend, StepState& step, const StepBatch& batch, int32_t slot) {
  GLINT_CHECK_CUDA(cudaSetDevice(backend.device.index));
  cuda::finish_peer_sum(backend, step);
  step = {};
  step.num_rows = static_cast<int64_t>(batch.tokens.size());
  step.slot = slot;
  step.samples_all_rows = samples_every_row(backend, batch);
  const StepBuffers& host = backend.staging.steps[slot];
  const StepBuffers& device = backend.workspace.step;
  const int64_t padded_rows = step.samples_all_rows ? backend.graphs.padded_size(step.num_rows) : step.num_rows;
  step.rows = device.rows(padded_rows);
  StepWriter writer{backend, step, host, host.rows(padded_rows)};
  writer.add_rows(batch);
  writer.pad_rows();
  writer.choose_tails(batch);
  writer.add_tasks(batch);
  writer.sort_decode_tasks();
  writer.sort_prefill_tasks();
  step.num_prefill_pages = writer.num_pages;
  choose_operations(backend, step);
  host.counts[cuda::kRowCount] = static_cast<int32_t>(step.num_rows);
  host.counts[cuda::kDecodeCount] = static_cast<int32_t>(step.num_decode_tasks);
  host.counts[cuda::kPrefillCount] = static_cast<int32_t>(step.num_prefill_tasks);
  cuda::Copies uploads(cuda::CopyDirection::kToDevice, backend.stream);
  uploads.add(device.counts, host.counts, StepBuffers::words(padded_rows));
  uploads.add(device.decode_tasks, host.decode_tasks, step.num_decode_tasks);
  uploads.add(device.prefill_tasks, host.prefill_tasks, step.num_prefill_tasks);
  uploads.add(device.page_table, host.page_table, writer.num_pages);
  uploads.send();
}

bool replay_step(Backend& backend, StepState& step, Pass pass) {
  const cuda::Graphs* graphs = graphs_of(backend, pass, step.verifies_drafts);
  if (!step.samples_all_rows || graphs == nullptr || !graphs->is_complete()) return false;
  if (backend.has_peers()) count_replayed_collectives(backend, graphs->counts_of(step.num_rows));
  graphs->launch(step.num_rows, backend.stream);
  step.has_logits = true;
  if (pass == Pass::kMain) ++backend.steps_replayed;
  return true;
}

bool capture_step(Backend& backend, StepState& step, Pass pass, const std::function<void()>& run) {
  const bool verifies_drafts = pass == Pass::kMain && backend.graphs.is_complete();
  cuda::Graphs* graphs = graphs_of(backend, pass, verifies_drafts);
  if (graphs == nullptr || graphs->is_complete()) return false;
  step = {};
  step.verifies_drafts = verifies_drafts;
  step.hides_earlier = pass == Pass::kDraft;
  step.num_rows = graphs->next_size();
  step.num_logit_rows = step.num_rows;
  step.is_captured = true;
  step.rows = backend.workspace.step.rows(step.num_rows);
  choose_operations(backend, step);
  const cuda::CollectiveCounts before = counts_of(backend);
  GLINT_CHECK_CUDA(cudaSetDevice(backend.device.index));
  cuda::Capture capture(backend.stream);
  pass_fault_point(FaultPoint::kCapture, backend.slice.rank);
  run();
  const cuda::CollectiveCounts after = counts_of(backend);
  graphs->add(
      capture,
      {.collectives = after.collectives - before.collectives, .bytes_sent = after.bytes_sent - before.bytes_sent},
      backend.stream);
  return true;
}

void read_hidden(Backend& backend, StepState& step, float* out) {
  add_deferred_residual(backend, step);
  GLINT_CHECK_CUDA(cudaStreamSynchronize(backend.stream));
  GLINT_CHECK_CUDA(cudaMemcpy(out, backend.workspace.hidden,
                              static_cast<size_t>(step.num_rows * backend.model.hidden_size) * sizeof(float),
                              cudaMemcpyDeviceToHost));
}

void write_hidden(Backend& backend, StepState& step, const float* in) {
  add_deferred_residual(backend, step);
  GLINT_CHECK_CUDA(cudaMemcpyAsync(backend.workspace.hidden, in,
                                   static_cast<size_t>(step.num_rows * backend.model.hidden_size) * sizeof(float),
                                   cudaMemcpyHostToDevice, backend.stream));
  GLINT_CHECK_CUDA(cudaStreamSynchronize(backend.stream));
}

}

}
