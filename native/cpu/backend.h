#pragma once

#include <atomic>
#include <vector>

#include "base/memory.h"
#include "cpu/workspace.h"
#include "cpu/collectives.h"
#include "cpu/operations.h"
#include "cpu/workers.h"
#include "model/backend.h"
#include "model/slices.h"

namespace glint {

namespace cpu {

extern std::atomic<bool> defers_results;

}

class Backend {
 public:
  Backend(const RankSlice& the_slice, const glint_engine_options& options, const ModelWeights& whole, World& world);

  bool is_fp8() const { return model.weight_scale_kind != GLINT_SCALE_NONE; }
  bool splits_experts() const { return expert_layout == GLINT_EXPERT_LAYOUT_TP; }
  bool has_peers() const { return slice.num_ranks > 1; }
  const LayerWeights& layer(int64_t index) const { return weights.layers[static_cast<size_t>(index)]; }

  const RankSlice slice;
  const glint_model& model;
  const ModelWeights weights;
  const int32_t row_slices;
  const int32_t expert_layout;
  const int32_t sequence_parallel;
  const int64_t max_step_items;
  const cpu::HeadShape heads;
  cpu::PageLayout pages;
  ZeroedMemory page_memory;
  Buffer<float> page_states;
  cpu::Workspace workspace;
  const uint64_t workspace_bytes;
  std::vector<cpu::GemmCall> calls;
  cpu::Collectives collectives;
  std::atomic<uint64_t> experts_read = 0;
  cpu::Workers workers;
};

}
