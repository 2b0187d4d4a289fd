#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "cuda/check.h"
#include "cuda/comm/collectives.h"
#include "cuda/comm/peer_sum.h"
#include "testing/cuda/runner.h"

namespace {

using glint::cuda::Arena;
using glint::cuda::deadline_after;
using glint::cuda::Nccl;
using glint::cuda::NormCall;
using glint::cuda::RankGroup;
using glint::testing::DeviceArray;
using glint::testing::guarded;

constexpr double kDeadlineSeconds = 20.0;
constexpr double kPeerWaitSeconds = 20.0;
constexpr int64_t kRoomBytes = int64_t{48} << 20;
constexpr int kLatePeriod = 97;
constexpr std::chrono::microseconds kLateBy(300);
constexpr float kEpsilon = 1e-5F;

enum class Kind : int32_t { kAllGather, kAllToAll, kBroadcast, kGather, kAllReduce, kReduceScatter, kPeerNorms };

struct TestCollective {
  std::byte* data;
  const std::byte* in;
  const float* weight;
  int64_t data_bytes;
  int64_t in_bytes;
  int64_t count;
  int64_t total;
  Kind kind;
  int32_t root;
  int32_t second_slot;
  int32_t num_runs;
  int32_t num_replays;
};

class RankStream {
 public:
  explicit RankStream(int device) {
    GLINT_CHECK_CUDA(cudaSetDevice(device));
    GLINT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~RankStream() { cudaStreamDestroy(stream_); }
  RankStream(const RankStream&) = delete;
  RankStream& operator=(const RankStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

int num_devices() {
  int count = 0;
  GLINT_CHECK_CUDA(cudaGetDeviceCount(&count));
  return count;
}

glint::cuda::DeviceMemory peer_memory(int32_t num_ranks, int64_t max_rows, int64_t width) {
  Arena counted;
  glint::cuda::PeerSum::take_buffers(counted, num_ranks, max_rows, width);
  return {counted.used(), "a rank's peer memory"};
}

glint::cuda::PeerSumBuffers peer_buffers(const glint::cuda::DeviceMemory& memory, int32_t num_ranks, int64_t max_rows,
                                         int64_t width) {
  Arena arena(memory.data());
  return glint::cuda::PeerSum::take_buffers(arena, num_ranks, max_rows, width);
}

class Rank {
 public:
  Rank(RankGroup& group, int32_t rank, int64_t max_rows, int64_t width)
      : group_(group),
        rank_(rank),
        device_(rank % num_devices()),
        width_(width),
        stream_(device_),
        work_(kRoomBytes),
        before_(kRoomBytes),
        expected_(kRoomBytes),
        input_(kRoomBytes),
        scratch_(kRoomBytes),
        weight_(width),
        different_(std::vector<unsigned long long>{0}),
        peer_memory_(peer_memory(group.num_ranks(), max_rows, width)),
        collectives_(group, rank),
        peers_(group, rank, peer_buffers(peer_memory_, group.num_ranks(), max_rows, width), max_rows, width) {
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  }

  void use_device() const { GLINT_CHECK_CUDA(cudaSetDevice(device_)); }
  void set_peer_wait(double seconds) { peers_.set_wait_seconds(seconds); }

  void open(double seconds) {
    const glint::cuda::Deadline deadline = deadline_after(seconds);
    collectives_.open({.scratch = scratch_.data(),
                       .scratch_bytes = static_cast<uint64_t>(kRoomBytes),
                       .stream = stream_.get(),
                       .communication_stream = stream_.get(),
                       .deadline = deadline});
    peers_.set_wait_seconds(kPeerWaitSeconds);
    peers_.open(stream_.get(), deadline);
    glint::require(peers_.is_available(), GLINT_STATUS_UNSUPPORTED, "rank ", rank_, ": ", peers_.refusal());
  }

  void run(const TestCollective& test) {
    const auto once = [&] {
      copy(work_.data(), before_.data(), test.data_bytes, cudaMemcpyDeviceToDevice);
      launch(test);
    };
    const auto again = [&] {
      once();
      glint::testing::launch_count_different(different_.data(), work_.bytes(), expected_.bytes(), test.data_bytes,
                                             stream_.get());
    };
    upload(test);
    once();
    copy(expected_.data(), work_.data(), test.data_bytes, cudaMemcpyDeviceToDevice);
    for (int32_t index = 1; index < test.num_runs; ++index) {
      if (index % kLatePeriod == rank_) std::this_thread::sleep_for(kLateBy);
      again();
    }
    finish();
    if (test.num_replays > 0) replay(again, test.num_replays);
    copy(test.data, expected_.data(), test.data_bytes, cudaMemcpyDeviceToHost);
    copy(&num_different_, different_.data(), sizeof(num_different_), cudaMemcpyDeviceToHost);
    finish();
    glint::require(num_different_ == 0, GLINT_STATUS_INTERNAL, "rank ", rank_, ": ", num_different_,
                   " bytes differ between runs on the same input");
    work_.check_margin();
  }

 private:
  template <typename Body>
  void replay(const Body& body, int32_t num_replays) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t captured = nullptr;
    group_.wait(rank_, "a capture", deadline_after(kDeadlineSeconds));
    GLINT_CHECK_CUDA(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
    body();
    GLINT_CHECK_CUDA(cudaStreamEndCapture(stream_.get(), &graph));
    GLINT_CHECK_CUDA(cudaGraphInstantiate(&captured, graph, 0));
    GLINT_CHECK_CUDA(cudaGraphDestroy(graph));
    GLINT_CHECK_CUDA(cudaGraphUpload(captured, stream_.get()));
    const std::unique_ptr<CUgraphExec_st, decltype(&cudaGraphExecDestroy)> kept(captured, cudaGraphExecDestroy);
    group_.wait_for_stream(stream_.get());
    group_.wait(rank_, "the end of a capture", deadline_after(kDeadlineSeconds));
    for (int32_t index = 0; index < num_replays; ++index) GLINT_CHECK_CUDA(cudaGraphLaunch(captured, stream_.get()));
    finish();
    group_.wait(rank_, "the end of the replays", deadline_after(kDeadlineSeconds));
  }

  void finish() {
    group_.wait_for_stream(stream_.get());
    collectives_.check_async();
    peers_.check_async();
  }

  void copy(void* target, const void* source, int64_t byte_count, cudaMemcpyKind kind) const {
    GLINT_CHECK_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(byte_count), kind, stream_.get()));
  }

  void upload(const TestCollective& test) {
    glint::require_argument(std::max(test.data_bytes, test.in_bytes) <= kRoomBytes, "a test of ", test.data_bytes,
                            " and ", test.in_bytes, " bytes has room for ", kRoomBytes, " each");
    copy(before_.data(), test.data, test.data_bytes, cudaMemcpyHostToDevice);
    copy(input_.data(), test.in, test.in_bytes, cudaMemcpyHostToDevice);
    if (test.weight != nullptr) copy(weight_.data(), test.weight, width_ * 4, cudaMemcpyHostToDevice);
    GLINT_CHECK_CUDA(cudaMemsetAsync(different_.data(), 0, sizeof(num_different_), stream_.get()));
    group_.wait_for_stream(stream_.get());
  }

  void launch(const TestCollective& test) {
    const auto count = static_cast<uint64_t>(test.count);
    const glint::cuda::FloatScratch scratch{reinterpret_cast<float*>(scratch_.data()), kRoomBytes / 4};
    auto* floats = reinterpret_cast<float*>(work_.data());
    switch (test.kind) {
      case Kind::kAllGather:
        return collectives_.all_gather(work_.data(), count, stream_.get());
      case Kind::kAllToAll:
        return collectives_.all_to_all(work_.data(), input_.data(), count, static_cast<uint64_t>(test.total),
                                       stream_.get());
      case Kind::kBroadcast:
        return collectives_.broadcast(work_.data(), count, test.root, stream_.get());
      case Kind::kGather:
        return collectives_.gather(work_.data(), input_.data(), count, test.root, stream_.get());
      case Kind::kAllReduce:
        return collectives_.all_reduce(floats, test.count, scratch, stream_.get());
      case Kind::kReduceScatter:
        return collectives_.reduce_scatter(floats, reinterpret_cast<const float*>(input_.data()), test.count, scratch,
                                           stream_.get());
      case Kind::kPeerNorms:
        return launch_peer_norms(test);
    }
  }

  void launch_peer_norms(const TestCollective& test) {
    Arena arena(work_.data());
    for (int32_t use = 0; use < 2; ++use) {
      const int32_t slot = use == 0 ? 0 : test.second_slot;
      const int64_t part_bytes = test.count * width_ * 4;
      copy(peers_.part(slot), input_.data() + use * part_bytes, part_bytes, cudaMemcpyDeviceToDevice);
      peers_.launch(norm(arena, test.count), slot, stream_.get());
    }
  }

  NormCall norm(Arena& arena, int64_t count) const {
    NormCall call{};
    call.fp8_stride = (width_ + 15) / 16 * 16;
    call.hidden = arena.take<float>(count * width_);
    call.normed = arena.take<float>(count * width_);
    call.fp8 = arena.take<uint8_t>(count * call.fp8_stride);
    call.scales = arena.take<float>(count);
    call.weight = weight_.data();
    call.count = count;
    call.width = width_;
    call.epsilon = kEpsilon;
    return call;
  }

  RankGroup& group_;
  int32_t rank_;
  int device_;
  int64_t width_;
  RankStream stream_;
  DeviceArray<std::byte> work_;
  DeviceArray<std::byte> before_;
  DeviceArray<std::byte> expected_;
  DeviceArray<std::byte> input_;
  DeviceArray<std::byte> scratch_;
  DeviceArray<float> weight_;
  DeviceArray<unsigned long long> different_;
  unsigned long long num_different_ = 0;
  glint::cuda::DeviceMemory peer_memory_;
  glint::cuda::Collectives collectives_;
  glint::cuda::PeerSum peers_;
};

}

extern "C" {

GLINT_API int32_t glint_testing_load_nccl(const char* path) {
  return guarded([&] { Nccl::load(path); });
}

GLINT_API RankGroup* glint_testing_group_new(int32_t num_ranks) {
  std::unique_ptr<RankGroup> group;
  guarded([&] {
    glint::cuda::prepare_nccl_environment(false);
    const bool shares_devices = num_devices() < num_ranks;
    glint::cuda::prepare_nccl_environment(shares_devices);
    group = std::make_unique<RankGroup>(num_ranks, shares_devices, Nccl::load(""));
  });
  return group.release();
}

GLINT_API void glint_testing_group_free(RankGroup* group) { delete group; }

GLINT_API void glint_testing_group_abort(RankGroup* group, const char* why) { group->abort(why); }

GLINT_API Rank* glint_testing_rank_new(RankGroup* group, int32_t rank, int64_t max_rows, int64_t width) {
  std::unique_ptr<Rank> made;
  guarded([&] { made = std::make_unique<Rank>(*group, rank, max_rows, width); });
  return made.release();
}

GLINT_API void glint_testing_rank_free(Rank* rank) {
  guarded([&] { rank->use_device(); });
  delete rank;
}

GLINT_API int32_t glint_testing_rank_open(Rank* rank, double seconds) {
  return guarded([&] {
    rank->use_device();
    rank->open(seconds);
  });
}

GLINT_API int32_t glint_testing_rank_run(Rank* rank, const TestCollective* test) {
  return guarded([&] {
    rank->use_device();
    rank->run(*test);
  });
}

GLINT_API void glint_testing_rank_peer_wait(Rank* rank, double seconds) { rank->set_peer_wait(seconds); }
}
