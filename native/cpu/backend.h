#pragma once

#include <vector>

#include "base/memory.h"
#include "cpu/kernels.h"
#include "cpu/team.h"
#include "model/backend.h"
#include "model/sampling.h"

namespace glint {

class Backend {
 public:
  explicit Backend(const BackendOptions& options);

  ThreadTeam& team() { return team_; }
  const KernelSet& kernels() const { return kernels_; }
  std::byte* scratch(int thread) const { return scratch_.data() + thread * scratch_bytes_; }
  std::vector<int64_t>& task_ends() { return task_ends_; }
  SamplerScratch& sampler(int thread) { return samplers_[static_cast<size_t>(thread)]; }
  uint64_t byte_count() const { return scratch_.byte_count(); }

 private:
  const KernelSet& kernels_;
  int64_t scratch_bytes_;
  ZeroedMemory scratch_;
  std::vector<int64_t> task_ends_;
  std::vector<SamplerScratch> samplers_;
  ThreadTeam team_;
};

int64_t query_rows_per_tile(int64_t group_heads);

}
