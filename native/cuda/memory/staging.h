#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/memory/workspace.h"

namespace glint::cuda {

struct Staging {
  Staging(const glint_model& model, const StepLimits& limits);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  static uint64_t pinned_bytes(const glint_model& model, const StepLimits& limits);

  PinnedMemory memory;
  StepBuffers steps[kSampleSlots];
  SampleBuffers sampling;
  uint64_t* experts_touched[kSampleSlots] = {};
  cudaEvent_t sampled[kSampleSlots] = {};
  int32_t last_sampled_slot = 0;
};

}
