#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/comm/rank_group.h"

namespace glint::cuda {

struct CollectiveCounts {
  uint64_t collectives = 0;
  uint64_t bytes_sent = 0;
};

struct OpenCall {
  std::byte* scratch;
  uint64_t scratch_bytes;
  cudaStream_t stream;
  cudaStream_t communication_stream;
  Deadline deadline;
};

struct FloatScratch {
  float* data;
  int64_t count;
};

struct GatherBuffer {
  void* data;
  uint64_t bytes_per_rank;
};

class Collectives final : public Abortable {
 public:
  static constexpr uint64_t kLinkTestBytes = 65536;
  static constexpr int64_t scratch_floats(int32_t num_ranks) {
    return 2 * num_ranks * static_cast<int64_t>(kLinkTestBytes / sizeof(float));
  }
  static constexpr int64_t kMostGatheredFloats = 65536;

  Collectives(RankGroup& group, int32_t rank);
  ~Collectives();
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  void open(const OpenCall& call);

  int32_t rank() const { return rank_; }
  int32_t num_ranks() const { return group_.num_ranks(); }
  CollectiveCounts counts() const { return {.collectives = collectives_run_, .bytes_sent = bytes_sent_}; }
  void add_counts(const CollectiveCounts& counts);

  void all_gather(void* buffer, uint64_t bytes_per_rank, cudaStream_t stream);
  void all_gather(std::initializer_list<GatherBuffer> buffers, cudaStream_t stream);
  void all_to_all(void* out, const void* in, uint64_t bytes_per_rank, uint64_t total_bytes, cudaStream_t stream);
  void broadcast(void* buffer, uint64_t byte_count, int32_t root, cudaStream_t stream);
  void gather(void* out, const void* in, uint64_t bytes_per_rank, int32_t root, cudaStream_t stream);
  void all_reduce(float* values, int64_t count, const FloatScratch& scratch, cudaStream_t stream);
  void reduce_scatter(float* out, const float* in, int64_t count_per_rank, const FloatScratch& scratch,
                      cudaStream_t stream);

  void check_async();
  void abort() noexcept override;

 private:
  struct Call;
  class Group;
  struct Transfer {
    std::byte* place;
    int32_t peer;
  };

  void start_communicator(Deadline deadline);
  void exchange(const Transfer& out, const Transfer& in, uint64_t byte_count, cudaStream_t stream);
  void test_link(const OpenCall& call, int32_t distance);
  void warm_up(const OpenCall& call, uint64_t bytes_per_rank, cudaStream_t stream);
  void check(int32_t result, const char* name);
  void count(uint64_t bytes_sent);

  RankGroup& group_;
  std::shared_ptr<const Nccl> nccl_;
  int32_t rank_;
  std::timed_mutex mutex_;
  std::atomic<NcclComm> comm_ = nullptr;
  std::atomic<bool> is_given_up_ = false;
  std::atomic<uint64_t> collectives_run_ = 0;
  std::atomic<uint64_t> bytes_sent_ = 0;
};

}
