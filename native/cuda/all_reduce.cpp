#include "cuda/all_reduce.h"

#include <algorithm>
#include <utility>

#include "base/faults.h"

namespace glint {

namespace cuda {

namespace {

int64_t rows_per_rank(const Backend& backend, const StepState& step) {
  return (step.num_rows + backend.limits.num_ranks - 1) / backend.limits.num_ranks;
}

uint64_t row_floats_bytes(const Backend& backend, int64_t rows) {
  return static_cast<uint64_t>(rows * backend.model.hidden_size) * sizeof(float);
}

void run_all_gather(Backend& backend, const StepState& step, const GatheredRows& rows, cudaStream_t stream) {
  const int64_t per_rank = rows_per_rank(backend, step);
  const auto bytes_of = [per_rank](int64_t row_bytes) { return static_cast<uint64_t>(per_rank * row_bytes); };
  if (backend.emulates_ranks()) {
    launch_repeat_rows(rows, per_rank, backend.limits.num_ranks, stream);
  } else if (rows.second == nullptr) {
    backend.collectives->all_gather(rows.first, bytes_of(rows.row_bytes), stream);
  } else {
    backend.collectives->all_gather(
        {{rows.first, bytes_of(rows.row_bytes)}, {rows.second, bytes_of(rows.second_row_bytes)}}, stream);
  }
}

}

AllReduce choose_all_reduce(const Backend& backend, int64_t num_rows) {
  if (backend.limits.num_ranks == 1) return AllReduce::kSingleRank;
  const bool fits_peers = num_rows <= backend.limits.peer_rows;
  if (fits_peers && backend.emulates_ranks()) return AllReduce::kSingleRank;
  if (fits_peers && backend.peers.has_value()) return AllReduce::kPeerMemory;
  return num_rows <= backend.limits.gathered_rows ? AllReduce::kAllGather : AllReduce::kSequenceParallel;
}

RowRange own_rows(const Backend& backend, const StepState& step) {
  if (step.all_reduce != AllReduce::kSequenceParallel) return {.first = 0, .count = step.num_rows};
  const int64_t per_rank = rows_per_rank(backend, step);
  const int64_t first = std::min(backend.slice.rank * per_rank, step.num_rows);
  return {.first = first, .count = std::min(per_rank, step.num_rows - first)};
}

float* branch_output(Backend& backend, StepState& step, Branch branch) {
  step.branch = branch;
  switch (step.all_reduce) {
    case AllReduce::kPeerMemory:
      return backend.peers->part(static_cast<int32_t>(branch));
    case AllReduce::kAllGather:
      return backend.workspace.branch_output + backend.slice.rank * step.num_rows * backend.model.hidden_size;
    case AllReduce::kSingleRank:
    case AllReduce::kSequenceParallel:
      break;
  }
  return backend.workspace.branch_output;
}

void norm_residual(Backend& backend, StepState& step, NormCall norm) {
  const DeferredResidual deferred = std::exchange(step.deferred, {});
  norm.hidden_is_settled = std::exchange(step.hidden_is_settled, false);
  if (deferred.is_in_peer_memory) {
    backend.peers->launch(norm, static_cast<int32_t>(step.branch), backend.stream);
    backend.collectives->add_counts({.collectives = 1, .bytes_sent = backend.peers->bytes_read(norm.count)});
    return;
  }
  norm.parts = deferred.parts;
  norm.part_stride = deferred.part_stride;
  norm.num_parts = deferred.num_parts;
  launch_norm(norm, backend.stream);
}

void finish_peer_sum(Backend& backend, StepState& step) {
  if (!step.deferred.is_in_peer_memory) return;
  norm_residual(backend, step,
                {.hidden = backend.workspace.hidden, .count = step.num_rows, .width = backend.model.hidden_size});
}

void all_gather_rows(Backend& backend, const StepState& step, const GatheredRows& rows) {
  if (step.all_reduce == AllReduce::kSequenceParallel) run_all_gather(backend, step, rows, backend.stream);
}

void async_all_gather_rows(Backend& backend, const StepState& step, const GatheredRows& rows, AsyncGather gather) {
  if (!step.gathers_async) return all_gather_rows(backend, step, rows);
  run_all_gather(backend, step, rows, backend.communication->begin_after(backend.stream));
  backend.communication->end_with(gather);
}

void await_rows(Backend& backend, const StepState& step, AsyncGather gather) {
  if (step.gathers_async) backend.communication->await(gather, backend.stream);
}

void gather_logits(Backend& backend, int64_t count) {
  if (!backend.has_peers()) return;
  const int64_t cols = backend.slice.vocab_size();
  backend.collectives->gather(backend.workspace.gathered_logits, backend.workspace.rank_logits,
                              static_cast<uint64_t>(count * cols) * sizeof(float), 0, backend.stream);
  if (!backend.slice.is_first()) return;
  launch_concat_columns({.out = backend.workspace.logits,
                         .in = backend.workspace.gathered_logits,
                         .num_parts = backend.slice.num_ranks,
                         .rows = count,
                         .cols = cols},
                        backend.stream);
}

}

namespace ops {

void all_reduce_residual(Backend& backend, StepState& step) {
  const int64_t floats = step.num_rows * backend.model.hidden_size;
  const int32_t num_ranks = backend.limits.num_ranks;
  if (backend.has_peers() && !step.is_captured) pass_fault_point(FaultPoint::kCollective, backend.slice.rank);
  switch (step.all_reduce) {
    case cuda::AllReduce::kSingleRank:
      step.deferred = {.parts = backend.workspace.branch_output, .part_stride = 0, .num_parts = 1};
      return;
    case cuda::AllReduce::kPeerMemory:
      step.deferred = {.is_in_peer_memory = true};
      return;
    case cuda::AllReduce::kAllGather:
      backend.collectives->all_gather(backend.workspace.branch_output, cuda::row_floats_bytes(backend, step.num_rows),
                                      backend.stream);
      step.deferred = {.parts = backend.workspace.branch_output, .part_stride = floats, .num_parts = num_ranks};
      return;
    case cuda::AllReduce::kSequenceParallel: {
      const int64_t per_rank = cuda::rows_per_rank(backend, step);
      if (!backend.emulates_ranks()) {
        backend.collectives->all_to_all(backend.workspace.received_parts, backend.workspace.branch_output,
                                        cuda::row_floats_bytes(backend, per_rank),
                                        cuda::row_floats_bytes(backend, step.num_rows), backend.stream);
      }
      const cuda::Workspace& workspace = backend.workspace;
      step.deferred = {.parts = backend.emulates_ranks() ? workspace.branch_output : workspace.received_parts,
                       .part_stride = per_rank * backend.model.hidden_size,
                       .num_parts = num_ranks};
      return;
    }
  }
}

}

}
