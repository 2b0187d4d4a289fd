#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/memory/device_memory.h"
#include "cuda/comm/rank_group.h"
#include "cuda/kernels/norm/rows.h"

namespace glint::cuda {

enum class PeerSumFailure : uint32_t { kNone = 0, kNoAnswer = 1, kStopped = 2, kRepeatedSlot = 3 };

struct PeerSumState {
  uint32_t flags[kMaxParts];
  uint32_t epoch;
  uint32_t arrivals;
  uint32_t share_arrivals;
  uint32_t failed;
  uint32_t last_slot;
};

struct PeerSumStatus {
  uint32_t is_stopped;
  uint32_t failure;
  uint32_t peer;
  uint32_t epoch;
};

struct PeerSumBuffers {
  float* parts[2];
  float* share;
  PeerSumState* state;
};

struct PeerSumCall {
  NormCall norm;
  const float* parts[kMaxParts];
  float* shares[kMaxParts];
  int64_t share_rows;
  uint32_t* flags[kMaxParts];
  PeerSumState* state;
  PeerSumStatus* status;
  uint64_t wait_nanoseconds;
  int32_t rank;
  int32_t slot;
  bool shares_device;
};

void launch_peer_sum(const PeerSumCall& call, cudaStream_t stream);

struct SumCall {
  float* out;
  const float* parts;
  int64_t part_stride;
  int32_t num_parts;
  int64_t count;
  bool is_aligned = false;
};

void launch_sum(const SumCall& call, cudaStream_t stream);

class PeerSum final : public Abortable {
 public:
  static PeerSumBuffers take_buffers(Arena& arena, int32_t num_ranks, int64_t max_rows, int64_t width);

  PeerSum(RankGroup& group, int32_t rank, const PeerSumBuffers& buffers, int64_t max_rows, int64_t width);
  ~PeerSum();
  PeerSum(const PeerSum&) = delete;
  PeerSum& operator=(const PeerSum&) = delete;

  void open(cudaStream_t stream, Deadline deadline);
  bool is_available() const { return refusal_.empty(); }
  const std::string& refusal() const { return refusal_; }

  float* part(int32_t slot) const { return buffers_.parts[slot]; }
  void set_wait_seconds(double seconds);
  void launch(const NormCall& norm, int32_t slot, cudaStream_t stream);
  uint64_t bytes_read(int64_t rows) const;

  void check_async();
  void abort() noexcept override;

 private:
  std::string reach_peers() const;
  int64_t share_rows(int64_t rows) const;
  void test_slot(int32_t slot, cudaStream_t stream, Deadline deadline);
  PeerSumStatus* status() const;

  RankGroup& group_;
  int32_t rank_;
  PeerSumBuffers buffers_;
  int64_t max_rows_;
  int64_t width_;
  PinnedMemory pinned_;
  double wait_seconds_ = 10.0;
  std::string refusal_;
};

}
