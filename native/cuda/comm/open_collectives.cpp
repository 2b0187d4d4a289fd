#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "cuda/check.h"
#include "cuda/comm/collectives.h"
#include "cuda/comm/watchdog.h"

namespace glint::cuda {

namespace {

constexpr std::chrono::milliseconds kStartPoll(5);
constexpr uint64_t kWarmUpAlignment = 256;
constexpr uint64_t kWarmUpGrowth = 16;

struct StartedCommunicator {
  int32_t result;
  NcclComm comm;
};

std::vector<uint64_t> link_pattern(int32_t from, int32_t to) {
  std::vector<uint64_t> words(Collectives::kLinkTestBytes / sizeof(uint64_t));
  const uint64_t key = row_key(static_cast<uint64_t>(from), static_cast<uint32_t>(to), 0);
  for (size_t index = 0; index < words.size(); ++index) words[index] = token_bits(key, static_cast<int32_t>(index));
  return words;
}

std::future<StartedCommunicator> start_aside(std::shared_ptr<const Nccl> nccl, const NcclUniqueId& id,
                                             int32_t num_ranks, int32_t rank) {
  int device = 0;
  GLINT_CHECK_CUDA(cudaGetDevice(&device));
  std::promise<StartedCommunicator> started;
  std::future<StartedCommunicator> future = started.get_future();
  std::thread([=, nccl = std::move(nccl), started = std::move(started)]() mutable {
    NcclComm comm = nullptr;
    cudaSetDevice(device);
    const int32_t result = nccl->init_rank(&comm, num_ranks, id, rank);
    started.set_value({result, comm});
  }).detach();
  return future;
}

}

void Collectives::start_communicator(Deadline deadline) {
  if (rank_ == 0) check(nccl_->get_unique_id(&group_.unique_id), "ncclGetUniqueId");
  group_.wait(rank_, "the start of the collectives", deadline);
  std::future<StartedCommunicator> future = start_aside(nccl_, group_.unique_id, num_ranks(), rank_);
  while (future.wait_for(kStartPoll) != std::future_status::ready) {
    group_.require_whole();
    require(std::chrono::steady_clock::now() < deadline, GLINT_STATUS_RANK_FAILED, "rank ", rank_,
            ": ncclCommInitRank did not return before the deadline; start with NCCL_DEBUG=INFO to see why");
  }
  const StartedCommunicator started = future.get();
  check(started.result, "ncclCommInitRank");
  comm_ = started.comm;
}

void Collectives::test_link(const OpenCall& call, int32_t distance) {
  const int32_t to = (rank_ + distance) % num_ranks();
  const int32_t from = (rank_ + num_ranks() - distance) % num_ranks();
  const std::vector<uint64_t> sent = link_pattern(rank_, to);
  const std::vector<uint64_t> wanted = link_pattern(from, rank_);
  std::vector<uint64_t> received(wanted.size());
  std::byte* place = call.scratch + kLinkTestBytes;
  GLINT_CHECK_CUDA(cudaMemcpyAsync(call.scratch, sent.data(), kLinkTestBytes, cudaMemcpyHostToDevice, call.stream));
  GLINT_CHECK_CUDA(cudaMemsetAsync(place, 0, kLinkTestBytes, call.stream));
  exchange({call.scratch, to}, {place, from}, kLinkTestBytes, call.stream);
  group_.wait_for_stream(call.stream);
  GLINT_CHECK_CUDA(cudaMemcpyAsync(received.data(), place, kLinkTestBytes, cudaMemcpyDeviceToHost, call.stream));
  group_.wait_for_stream(call.stream);
  require(received == wanted, GLINT_STATUS_RANK_FAILED, "rank ", rank_, " received other bytes than rank ", from,
          " sent: the link between their GPUs is broken; see nvidia-smi topo -m and nvidia-smi nvlink -e");
}

void Collectives::warm_up(const OpenCall& call, uint64_t bytes_per_rank, cudaStream_t stream) {
  const uint64_t total_bytes = bytes_per_rank * static_cast<uint64_t>(num_ranks());
  std::byte* upper = call.scratch + total_bytes;
  const auto synchronise = [&] {
    group_.wait_for_stream(stream);
    group_.wait(rank_, "the first collectives", call.deadline);
  };
  all_gather(call.scratch, 2 * bytes_per_rank, stream);
  synchronise();
  all_gather({{call.scratch, bytes_per_rank}, {upper, bytes_per_rank}}, stream);
  synchronise();
  all_to_all(upper, call.scratch, bytes_per_rank, total_bytes, stream);
  synchronise();
  for (int32_t root = 0; root < num_ranks(); ++root) {
    broadcast(call.scratch, bytes_per_rank, root, stream);
    synchronise();
    gather(upper, call.scratch, bytes_per_rank, root, stream);
    synchronise();
  }
}

void Collectives::open(const OpenCall& call) {
  const auto ranks = static_cast<uint64_t>(num_ranks());
  require_argument(call.scratch_bytes >= 2 * ranks * kLinkTestBytes, "the collectives of ", num_ranks(), " ranks need ",
                   2 * ranks * kLinkTestBytes, " bytes of scratch to start and were given ", call.scratch_bytes);
  start_communicator(call.deadline);
  Watchdog watchdog(group_, call.deadline, text("rank ", rank_, " waited for the others and they did not come"));
  for (int32_t distance = 0; distance < num_ranks(); ++distance) {
    const int32_t from = (rank_ + num_ranks() - distance) % num_ranks();
    watchdog.expect(text("rank ", rank_, " received nothing from rank ", from));
    test_link(call, distance);
  }
  const uint64_t most = call.scratch_bytes / (2 * ranks) / kWarmUpAlignment * kWarmUpAlignment;
  for (uint64_t bytes = kWarmUpAlignment; bytes < most; bytes *= kWarmUpGrowth) {
    watchdog.expect(text("rank ", rank_, " did not end the first collectives of ", bytes, " bytes"));
    warm_up(call, bytes, call.stream);
  }
  warm_up(call, most, call.stream);
  warm_up(call, most, call.communication_stream);
  group_.wait(rank_, "the end of the test of all links", call.deadline);
  collectives_run_ = 0;
  bytes_sent_ = 0;
}

}
