#pragma once

#include <atomic>
#include <vector>

#include "base/memory.h"
#include "cpu/activations.h"
#include "cpu/operations.h"
#include "cpu/workers.h"
#include "model/backend.h"

namespace glint {

namespace cpu {

extern std::atomic<bool> defers_results;

}

class Backend {
 public:
  Backend(const glint_model& the_model, const glint_engine_options& options, const ModelWeights& the_weights);

  int64_t count() const { return static_cast<int64_t>(batch.tokens.size()); }
  bool has_codes() const { return model.weight_scale_kind != GLINT_SCALE_NONE; }
  bool splits_experts() const { return expert_layout == GLINT_EXPERT_LAYOUT_TP; }
  const LayerWeights& layer(int64_t index) const { return weights.layers[static_cast<size_t>(index)]; }

  const glint_model model;
  const ModelWeights& weights;
  const int32_t row_slices;
  const int32_t expert_layout;
  const int64_t max_step_items;
  const cpu::HeadShape heads;
  cpu::PageLayout pages;
  ZeroedMemory page_memory;
  cpu::Activations activations;
  const uint64_t workspace_bytes;
  std::vector<cpu::ProductCall> calls;
  StepBatch batch;
  std::atomic<uint64_t> experts_read = 0;
  cpu::Workers workers;
};

}
