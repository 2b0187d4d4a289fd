#include "cuda/comm/exchange.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "base/faults.h"
#include "cuda/backend.h"
#include "cuda/check.h"
#include "model/load_progress.h"

namespace glint {

namespace {

std::shared_ptr<const cuda::Nccl> load_nccl(const glint_engine_options& options) {
  if (options.num_ranks == 1) return nullptr;
  cuda::prepare_nccl_environment(options.shares_devices != 0);
  return cuda::Nccl::load("");
}

}

World::World(const glint_engine_options& options)
    : group(options.num_ranks, options.shares_devices != 0, load_nccl(options)) {
  load_progress().begin(0);
}

WorldOwner make_world(const glint_engine_options& options) { return WorldOwner(new World(options)); }

void WorldDeleter::operator()(World* world) const { delete world; }

void stop_world(World& world, const std::string& why) noexcept { world.group.abort(why); }

void join_world(Backend& backend) {
  if (!backend.has_peers()) return;
  constexpr double kSeconds = 60.0;
  backend.collectives->open({.scratch = reinterpret_cast<std::byte*>(backend.places.update),
                             .scratch_bytes = backend.update_bytes(),
                             .stream = backend.stream,
                             .side_stream = backend.side->stream(),
                             .deadline = cuda::deadline_after(kSeconds)});
  if (!backend.peers.has_value()) return;
  backend.peers->open(backend.stream, cuda::deadline_after(kSeconds));
  require(backend.peers->is_available() || backend.all_reduce != GLINT_ALL_REDUCE_CUSTOM, GLINT_STATUS_UNSUPPORTED,
          "--all-reduce custom cannot be used: ", backend.peers->refusal(), "; use --all-reduce auto or nccl");
  if (!backend.peers->is_available()) backend.peers.reset();
}

namespace cuda {

namespace {

int64_t rows_per_rank(const Backend& backend) {
  return (backend.num_rows + backend.limits.num_ranks - 1) / backend.limits.num_ranks;
}

uint64_t row_floats_bytes(const Backend& backend, int64_t rows) {
  return static_cast<uint64_t>(rows * backend.model.hidden_size) * sizeof(float);
}

bool sends_aside(const Backend& backend) {
  return backend.exchange == Exchange::kSharded && !backend.is_capturing;
}

void send_rows(Backend& backend, const SharedRows& shared, cudaStream_t stream) {
  const int64_t per_rank = rows_per_rank(backend);
  const auto bytes_of = [per_rank](int64_t row_bytes) { return static_cast<uint64_t>(per_rank * row_bytes); };
  if (backend.emulates_ranks()) {
    launch_repeat_rows(shared, per_rank, backend.limits.num_ranks, stream);
  } else if (shared.second == nullptr) {
    backend.collectives->all_gather(shared.first, bytes_of(shared.row_bytes), stream);
  } else {
    backend.collectives->all_gather(
        {{shared.first, bytes_of(shared.row_bytes)}, {shared.second, bytes_of(shared.second_row_bytes)}}, stream);
  }
}

}

Exchange choose_exchange(const Backend& backend, int64_t num_rows) {
  if (backend.limits.num_ranks == 1) return Exchange::kAlone;
  const bool fits_peers = num_rows <= backend.limits.peer_rows;
  if (fits_peers && backend.emulates_ranks()) return Exchange::kAlone;
  if (fits_peers && backend.peers.has_value()) return Exchange::kPeers;
  return num_rows <= backend.limits.gathered_rows ? Exchange::kGathered : Exchange::kSharded;
}

RowRange own_rows(const Backend& backend) {
  if (backend.exchange != Exchange::kSharded) return {.first = 0, .count = backend.num_rows};
  const int64_t per_rank = rows_per_rank(backend);
  const int64_t first = std::min(backend.slice.rank * per_rank, backend.num_rows);
  return {.first = first, .count = std::min(per_rank, backend.num_rows - first)};
}

float* update_target(Backend& backend, UpdateSource source) {
  backend.update_source = source;
  switch (backend.exchange) {
    case Exchange::kPeers:
      return backend.peers->part(static_cast<int32_t>(source));
    case Exchange::kGathered:
      return backend.places.update + backend.slice.rank * backend.num_rows * backend.model.hidden_size;
    case Exchange::kAlone:
    case Exchange::kSharded:
      break;
  }
  return backend.places.update;
}

void norm_update(Backend& backend, NormCall norm) {
  const PendingUpdate pending = backend.pending;
  backend.pending = {};
  norm.hidden_is_settled = std::exchange(backend.hidden_is_settled, false);
  if (pending.is_with_peers) {
    backend.peers->launch(norm, static_cast<int32_t>(backend.update_source), backend.stream);
    backend.collectives->add_counts({.collectives = 1, .bytes_sent = backend.peers->bytes_read(norm.count)});
    return;
  }
  norm.parts = pending.parts;
  norm.part_stride = pending.part_stride;
  norm.num_parts = pending.num_parts;
  launch_norm(norm, backend.stream);
}

void finish_with_peers(Backend& backend) {
  if (!backend.pending.is_with_peers) return;
  norm_update(backend, {.hidden = backend.places.hidden,
                        .normed = nullptr,
                        .fp8 = nullptr,
                        .scales = nullptr,
                        .fp8_stride = 0,
                        .parts = nullptr,
                        .part_stride = 0,
                        .num_parts = 0,
                        .weight = nullptr,
                        .count = backend.num_rows,
                        .width = backend.model.hidden_size,
                        .epsilon = 0.0F});
}

void share_rows(Backend& backend, const SharedRows& shared) {
  if (backend.exchange == Exchange::kSharded) send_rows(backend, shared, backend.stream);
}

void share_rows_aside(Backend& backend, const SharedRows& shared, Arrival arrival) {
  if (!sends_aside(backend)) return share_rows(backend, shared);
  send_rows(backend, shared, backend.side->begin_after(backend.stream));
  backend.side->end_with(arrival);
}

void await_rows(Backend& backend, Arrival arrival) {
  if (sends_aside(backend)) backend.side->await(arrival, backend.stream);
}

void gather_logits(Backend& backend, int64_t count) {
  if (!backend.has_peers()) return;
  const int64_t cols = backend.slice.vocab_size();
  backend.collectives->gather(backend.places.gathered_logits, backend.places.rank_logits,
                              static_cast<uint64_t>(count * cols) * sizeof(float), 0, backend.stream);
  if (!backend.slice.is_first()) return;
  launch_concat_columns({.out = backend.places.logits,
                         .in = backend.places.gathered_logits,
                         .num_parts = backend.slice.num_ranks,
                         .rows = count,
                         .cols = cols},
                        backend.stream);
}

void share_results(Backend& backend, void* results, int64_t byte_count) {
  if (!backend.has_peers() || byte_count == 0) return;
  backend.collectives->broadcast(results, static_cast<uint64_t>(byte_count), 0, backend.stream);
}

void wait_for_event(Backend& backend, cudaEvent_t event) {
  if (!backend.has_peers()) {
    GLINT_CHECK_CUDA(cudaEventSynchronize(event));
    return;
  }
  constexpr auto kPause = std::chrono::microseconds(20);
  for (;;) {
    const cudaError_t state = cudaEventQuery(event);
    backend.collectives->check_async();
    if (backend.peers.has_value()) backend.peers->check_async();
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) check(state, "cudaEventQuery");
    std::this_thread::sleep_for(kPause);
  }
}

}

namespace ops {

void exchange_update(Backend& backend) {
  const int64_t floats = backend.num_rows * backend.model.hidden_size;
  const int32_t num_ranks = backend.limits.num_ranks;
  if (backend.has_peers()) pass_fault_place(FaultPlace::kCollective, backend.slice.rank);
  switch (backend.exchange) {
    case cuda::Exchange::kAlone:
      backend.pending = {.parts = backend.places.update, .part_stride = 0, .num_parts = 1};
      return;
    case cuda::Exchange::kPeers:
      backend.pending = {.is_with_peers = true};
      return;
    case cuda::Exchange::kGathered:
      backend.collectives->all_gather(backend.places.update, cuda::row_floats_bytes(backend, backend.num_rows),
                                      backend.stream);
      backend.pending = {.parts = backend.places.update, .part_stride = floats, .num_parts = num_ranks};
      return;
    case cuda::Exchange::kSharded: {
      const int64_t per_rank = cuda::rows_per_rank(backend);
      if (!backend.emulates_ranks()) {
        backend.collectives->all_to_all(backend.places.received, backend.places.update,
                                        cuda::row_floats_bytes(backend, per_rank),
                                        cuda::row_floats_bytes(backend, backend.num_rows), backend.stream);
      }
      backend.pending = {.parts = backend.emulates_ranks() ? backend.places.update : backend.places.received,
                         .part_stride = per_rank * backend.model.hidden_size,
                         .num_parts = num_ranks};
      return;
    }
  }
}

}

}
