#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/memory.h"
#include "cpu/kernels.h"
#include "cpu/sampling.h"
#include "cpu/team.h"

namespace glint::cpu {

struct GemmCall;

struct alignas(64) PackedCall {
  const GemmCall* call = nullptr;
};

struct WorkerOptions {
  int num_threads;
  int32_t kernels;
  int64_t max_gemm_calls;
  int64_t max_step_items;
  int32_t vocab_size;
  int64_t max_cols;
  int64_t group_heads;
  int64_t head_dim;
  int64_t page_tokens;
};

class Workers {
 public:
  explicit Workers(const WorkerOptions& options);

  static uint64_t bytes_for(const WorkerOptions& options);
  ThreadTeam& team() { return team_; }
  const KernelSet& kernels() const { return kernels_; }
  std::byte* scratch(int thread) const { return scratch_.data() + thread * scratch_bytes_; }
  std::vector<int64_t>& task_ends() { return task_ends_; }
  std::vector<PackedCall>& packed_calls() { return packed_calls_; }
  SamplerScratch& sampler(int thread) { return samplers_[static_cast<size_t>(thread)]; }

 private:
  const KernelSet& kernels_;
  int64_t scratch_bytes_;
  ZeroedMemory scratch_;
  std::vector<int64_t> task_ends_;
  std::vector<PackedCall> packed_calls_;
  std::vector<SamplerScratch> samplers_;
  ThreadTeam team_;
};

int64_t query_rows_per_tile(int64_t group_heads);

}
