#include "cuda/comm/peer_sum.h"

#include <atomic>
#include <cstring>
#include <vector>

#include "cuda/check.h"

namespace glint::cuda {

namespace {

constexpr double kNanoseconds = 1e9;
constexpr int64_t kOneStepRows = 16;
constexpr int32_t kOneStepRanks = 2;

std::string access_refusal(int own, int other) {
  int can_reach = 0;
  if (own == other) return {};
  GLINT_CHECK_CUDA(cudaDeviceCanAccessPeer(&can_reach, own, other));
  if (can_reach == 0) return text("GPU ", own, " cannot read the memory of GPU ", other, " (nvidia-smi topo -m)");
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  if (error == cudaErrorPeerAccessAlreadyEnabled) return {};
  return text("GPU ", own, " gets no access to the memory of GPU ", other, ": ", cudaGetErrorString(error));
}

float test_value(int32_t rank, int64_t index, int32_t slot) {
  return static_cast<float>(1 + rank + 3 * slot) + 0.1F * static_cast<float>(index % 977);
}

float tree_of_tests(int32_t num_ranks, int64_t index, int32_t slot) {
  std::vector<float> parts;
  for (int32_t rank = 0; rank < num_ranks; ++rank) parts.push_back(test_value(rank, index, slot));
  for (size_t width = 1; width < parts.size(); width *= 2) {
    for (size_t part = 0; part + width < parts.size(); part += 2 * width) parts[part] += parts[part + width];
  }
  return parts[0];
}

}

PeerSumBuffers PeerSum::take_buffers(Arena& arena, int32_t num_ranks, int64_t max_rows, int64_t width) {
  PeerSumBuffers buffers{};
  for (float*& part : buffers.parts) part = arena.take<float>(max_rows * width);
  buffers.share = arena.take<float>((max_rows + num_ranks - 1) / num_ranks * width);
  buffers.state = arena.take<PeerSumState>(1);
  return buffers;
}

PeerSum::PeerSum(RankGroup& group, int32_t rank, const PeerSumBuffers& buffers, int64_t max_rows, int64_t width)
    : group_(group),
      rank_(rank),
      buffers_(buffers),
      max_rows_(max_rows),
      width_(width),
      pinned_(sizeof(PeerSumStatus)),
      refusal_("peer memory is not open yet") {
  require_argument(group.num_ranks() <= kMaxParts, "a peer sum joins at most ", kMaxParts, " ranks, not ",
                   group.num_ranks(), ": set options.all_reduce to nccl");
  std::memset(pinned_.data(), 0, sizeof(PeerSumStatus));
  GLINT_CHECK_CUDA(cudaMemset(buffers.state, 0, sizeof(PeerSumState)));
  group_.add(*this);
}

PeerSum::~PeerSum() { group_.remove(*this); }

PeerSumStatus* PeerSum::status() const { return reinterpret_cast<PeerSumStatus*>(pinned_.data()); }

void PeerSum::abort() noexcept { std::atomic_ref(status()->is_stopped).store(1, std::memory_order_release); }

void PeerSum::set_wait_seconds(double seconds) { wait_seconds_ = seconds; }

int64_t PeerSum::share_rows(int64_t rows) const {
  const int32_t num_ranks = group_.num_ranks();
  return rows <= kOneStepRows || num_ranks <= kOneStepRanks ? 0 : (rows + num_ranks - 1) / num_ranks;
}

uint64_t PeerSum::bytes_read(int64_t rows) const {
  const int64_t share = share_rows(rows);
  const int64_t rows_read = (share == 0 ? rows : 2 * share) * (group_.num_ranks() - 1);
  return static_cast<uint64_t>(rows_read * width_) * sizeof(float);
}

std::string PeerSum::reach_peers() const {
  const int own = group_.peers[static_cast<size_t>(rank_)].device;
  for (const PeerEntry& peer : group_.peers) {
    const std::string refusal = access_refusal(own, peer.device);
    if (!refusal.empty()) return refusal;
  }
  return {};
}

void PeerSum::open(cudaStream_t stream, Deadline deadline) {
  PeerEntry& own = group_.peers[static_cast<size_t>(rank_)];
  GLINT_CHECK_CUDA(cudaGetDevice(&own.device));
  own.parts[0] = buffers_.parts[0];
  own.parts[1] = buffers_.parts[1];
  own.share = buffers_.share;
  own.flags = buffers_.state->flags;
  group_.wait(rank_, "the table of peer memory", deadline);
  own.refusal = reach_peers();
  group_.wait(rank_, "the opening of peer memory", deadline);
  refusal_.clear();
  for (const PeerEntry& peer : group_.peers) {
    if (refusal_.empty()) refusal_ = peer.refusal;
  }
  if (!is_available()) return;
  for (int32_t slot = 0; slot < 2; ++slot) test_slot(slot, stream, deadline);
  group_.wait(rank_, "the end of the test of peer memory", deadline);
}

void PeerSum::test_slot(int32_t slot, cudaStream_t stream, Deadline deadline) {
  const int64_t count = width_;
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t index = 0; index < count; ++index) {
    values[static_cast<size_t>(index)] = test_value(rank_, index, slot);
  }
  float* hidden = buffers_.parts[1 - slot];
  const uint64_t byte_count = values.size() * sizeof(float);
  GLINT_CHECK_CUDA(cudaMemcpyAsync(buffers_.parts[slot], values.data(), byte_count, cudaMemcpyHostToDevice, stream));
  group_.wait_for_stream(stream);
  group_.wait(rank_, "the test of peer memory", deadline);
  GLINT_CHECK_CUDA(cudaMemsetAsync(hidden, 0, byte_count, stream));
  NormCall sum{};
  sum.hidden = hidden;
  sum.count = 1;
  sum.width = width_;
  launch(sum, slot, stream);
  group_.wait_for_stream(stream);
  check_async();
  GLINT_CHECK_CUDA(cudaMemcpyAsync(values.data(), hidden, byte_count, cudaMemcpyDeviceToHost, stream));
  group_.wait_for_stream(stream);
  for (int64_t index = 0; index < count; ++index) {
    const float wanted = 0.0F + tree_of_tests(group_.num_ranks(), index, slot);
    const float seen = values[static_cast<size_t>(index)];
    require(seen == wanted, GLINT_STATUS_RANK_FAILED, "rank ", rank_, " summed ", seen, " instead of ", wanted,
            " over peer memory: set options.all_reduce to nccl");
  }
  group_.wait(rank_, "the end of a test of peer memory", deadline);
}

void PeerSum::launch(const NormCall& norm, int32_t slot, cudaStream_t stream) {
  require(is_available(), GLINT_STATUS_UNSUPPORTED, "no sum over peer memory: ", refusal_);
  require_argument(norm.count <= max_rows_ && norm.width == width_, "a peer sum of ", norm.count, " rows of ",
                   norm.width, " has buffers for ", max_rows_, " rows of ", width_);
  require_argument(slot == 0 || slot == 1, "a peer sum has slots 0 and 1, not ", slot);
  PeerSumCall call{};
  call.norm = norm;
  call.norm.num_parts = group_.num_ranks();
  call.state = buffers_.state;
  call.status = status();
  call.wait_nanoseconds = static_cast<uint64_t>(wait_seconds_ * kNanoseconds);
  call.rank = rank_;
  call.slot = slot;
  call.shares_device = group_.shares_devices();
  call.share_rows = share_rows(norm.count);
  for (size_t rank = 0; rank < group_.peers.size(); ++rank) {
    call.parts[rank] = group_.peers[rank].parts[slot];
    call.shares[rank] = group_.peers[rank].share;
    call.flags[rank] = group_.peers[rank].flags;
  }
  launch_peer_sum(call, stream);
}

void PeerSum::check_async() {
  group_.require_whole();
  const uint32_t failure = std::atomic_ref(status()->failure).load(std::memory_order_acquire);
  if (failure == static_cast<uint32_t>(PeerSumFailure::kNone)) return;
  if (failure == static_cast<uint32_t>(PeerSumFailure::kRepeatedSlot)) {
    throw Failure(GLINT_STATUS_INTERNAL, text("rank ", rank_, " used the same slot of peer memory twice in a row, at ",
                                              "all-reduce ", status()->epoch, ": uses must alternate"));
  }
  throw Failure(GLINT_STATUS_RANK_FAILED,
                text("rank ", rank_, " waited ", wait_seconds_, " s for rank ", status()->peer, " at all-reduce ",
                     status()->epoch, " over peer memory"));
}

}
