#include "cuda/comm/collectives.h"

#include <algorithm>
#include <chrono>

#include "cuda/check.h"
#include "cuda/comm/peer_sum.h"

namespace glint::cuda {

namespace {

constexpr std::chrono::milliseconds kLeaveTime(200);

uint64_t shard_bytes(int32_t rank, uint64_t bytes_per_rank, uint64_t total_bytes) {
  const uint64_t first = static_cast<uint64_t>(rank) * bytes_per_rank;
  return std::min(bytes_per_rank, total_bytes - std::min(total_bytes, first));
}

std::byte* place_of(void* buffer, int32_t rank, uint64_t bytes_per_rank) {
  return static_cast<std::byte*>(buffer) + static_cast<uint64_t>(rank) * bytes_per_rank;
}

const std::byte* place_of(const void* buffer, int32_t rank, uint64_t bytes_per_rank) {
  return static_cast<const std::byte*>(buffer) + static_cast<uint64_t>(rank) * bytes_per_rank;
}

uint64_t float_bytes(int64_t count) { return static_cast<uint64_t>(count) * sizeof(float); }

void require_scratch(const FloatScratch& scratch, int64_t count, const char* name) {
  require_argument(scratch.count >= count, name, " needs scratch for ", count, " floats and was given ", scratch.count);
}

}

struct Collectives::Call {
  explicit Call(Collectives& owner) : lock(owner.mutex_), comm(owner.comm_) {
    owner.group_.require_whole();
    require(comm != nullptr, GLINT_STATUS_INTERNAL, "the collectives of rank ", owner.rank_, " are not open");
  }

  std::lock_guard<std::timed_mutex> lock;
  NcclComm comm;
};

class Collectives::Group {
 public:
  explicit Group(Collectives& owner) : owner_(owner) { owner.check(owner.nccl_->group_start(), "ncclGroupStart"); }
  ~Group() {
    if (is_open_) owner_.nccl_->group_end();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void end() {
    is_open_ = false;
    owner_.check(owner_.nccl_->group_end(), "ncclGroupEnd");
  }

 private:
  Collectives& owner_;
  bool is_open_ = true;
};

Collectives::Collectives(RankGroup& group, int32_t rank) : group_(group), nccl_(group.nccl()), rank_(rank) {
  require_argument(nccl_ != nullptr, "rank ", rank, " has no NCCL library: make the group with Nccl::load");
  group_.add(*this);
}

Collectives::~Collectives() {
  group_.remove(*this);
  const NcclComm comm = comm_;
  if (comm == nullptr || is_given_up_) return;
  if (group_.is_aborted()) {
    abort();
  } else {
    nccl_->destroy(comm);
  }
}

void Collectives::abort() noexcept {
  std::unique_lock lock(mutex_, std::defer_lock);
  const bool has_left_call = lock.try_lock_for(kLeaveTime);
  const NcclComm comm = comm_;
  if (comm == nullptr || is_given_up_.exchange(true)) return;
  group_.end_aside([nccl = nccl_, comm] { nccl->abort(comm); });
  if (has_left_call) lock.unlock();
}

void Collectives::check(int32_t result, const char* name) {
  if (result == kNcclSuccess) return;
  group_.require_whole();
  try {
    nccl_->check(result, name);
  } catch (const Failure& failure) {
    throw Failure(GLINT_STATUS_RANK_FAILED, text("rank ", rank_, ": ", failure.what()));
  }
}

void Collectives::check_async() {
  group_.require_whole();
  const Call call(*this);
  int32_t error = kNcclSuccess;
  check(nccl_->get_async_error(call.comm, &error), "ncclCommGetAsyncError");
  check(error, "a collective");
}

void Collectives::count(uint64_t bytes_sent) { add_counts({.collectives = 1, .bytes_sent = bytes_sent}); }

void Collectives::add_counts(const CollectiveCounts& counts) {
  collectives_run_ += counts.collectives;
  bytes_sent_ += counts.bytes_sent;
}

void Collectives::all_gather(void* buffer, uint64_t bytes_per_rank, cudaStream_t stream) {
  all_gather({{.data = buffer, .bytes_per_rank = bytes_per_rank}}, stream);
}

void Collectives::all_gather(std::initializer_list<GatherBuffer> buffers, cudaStream_t stream) {
  const Call call(*this);
  uint64_t bytes_sent = 0;
  Group group(*this);
  for (const GatherBuffer& buffer : buffers) {
    check(nccl_->all_gather(place_of(buffer.data, rank_, buffer.bytes_per_rank), buffer.data, buffer.bytes_per_rank,
                            NcclType::kBytes, call.comm, stream),
          "ncclAllGather");
    bytes_sent += buffer.bytes_per_rank * static_cast<uint64_t>(num_ranks() - 1);
  }
  group.end();
  count(bytes_sent);
}

void Collectives::all_to_all(void* out, const void* in, uint64_t bytes_per_rank, uint64_t total_bytes,
                             cudaStream_t stream) {
  const Call call(*this);
  const uint64_t own_bytes = shard_bytes(rank_, bytes_per_rank, total_bytes);
  uint64_t bytes_sent = 0;
  Group group(*this);
  for (int32_t peer = 0; peer < num_ranks(); ++peer) {
    const uint64_t peer_bytes = shard_bytes(peer, bytes_per_rank, total_bytes);
    if (peer_bytes > 0) {
      check(nccl_->send(place_of(in, peer, bytes_per_rank), peer_bytes, NcclType::kBytes, peer, call.comm, stream),
            "ncclSend");
    }
    if (own_bytes > 0) {
      check(nccl_->receive(place_of(out, peer, bytes_per_rank), own_bytes, NcclType::kBytes, peer, call.comm, stream),
            "ncclRecv");
    }
    if (peer != rank_) bytes_sent += peer_bytes;
  }
  group.end();
  count(bytes_sent);
}

void Collectives::broadcast(void* buffer, uint64_t byte_count, int32_t root, cudaStream_t stream) {
  const Call call(*this);
  check(nccl_->broadcast(buffer, buffer, byte_count, NcclType::kBytes, root, call.comm, stream), "ncclBroadcast");
  count(rank_ == root ? byte_count * static_cast<uint64_t>(num_ranks() - 1) : 0);
}

void Collectives::gather(void* out, const void* in, uint64_t bytes_per_rank, int32_t root, cudaStream_t stream) {
  const Call call(*this);
  Group group(*this);
  check(nccl_->send(in, bytes_per_rank, NcclType::kBytes, root, call.comm, stream), "ncclSend");
  for (int32_t peer = 0; rank_ == root && peer < num_ranks(); ++peer) {
    check(
        nccl_->receive(place_of(out, peer, bytes_per_rank), bytes_per_rank, NcclType::kBytes, peer, call.comm, stream),
        "ncclRecv");
  }
  group.end();
  count(rank_ == root ? 0 : bytes_per_rank);
}

void Collectives::exchange(const Transfer& out, const Transfer& in, uint64_t byte_count, cudaStream_t stream) {
  const Call call(*this);
  Group group(*this);
  check(nccl_->send(out.place, byte_count, NcclType::kBytes, out.peer, call.comm, stream), "ncclSend");
  check(nccl_->receive(in.place, byte_count, NcclType::kBytes, in.peer, call.comm, stream), "ncclRecv");
  group.end();
}

void Collectives::all_reduce(float* values, int64_t count, const FloatScratch& scratch, cudaStream_t stream) {
  const int64_t shard = count / num_ranks();
  if (count > kMostGatheredFloats && shard * num_ranks() == count) {
    reduce_scatter(values + rank_ * shard, values, shard, scratch, stream);
    return all_gather(values, float_bytes(shard), stream);
  }
  require_scratch(scratch, count * num_ranks(), "all_reduce");
  GLINT_CHECK_CUDA(
      cudaMemcpyAsync(scratch.data + rank_ * count, values, float_bytes(count), cudaMemcpyDeviceToDevice, stream));
  all_gather(scratch.data, float_bytes(count), stream);
  launch_sum({.out = values, .parts = scratch.data, .part_stride = count, .num_parts = num_ranks(), .count = count},
             stream);
}

void Collectives::reduce_scatter(float* out, const float* in, int64_t count_per_rank, const FloatScratch& scratch,
                                 cudaStream_t stream) {
  require_scratch(scratch, count_per_rank * num_ranks(), "reduce_scatter");
  all_to_all(scratch.data, in, float_bytes(count_per_rank), float_bytes(count_per_rank * num_ranks()), stream);
  launch_sum({.out = out,
              .parts = scratch.data,
              .part_stride = count_per_rank,
              .num_parts = num_ranks(),
              .count = count_per_rank},
             stream);
}

}
