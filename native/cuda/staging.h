#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/activations.h"
#include "cuda/check.h"

namespace glint::cuda {

template <typename T>
void upload(cudaStream_t stream, T* target, const T* source, int64_t count) {
  if (count == 0) return;
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  GLINT_CHECK_CUDA(cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, stream));
}

struct Staging {
  static constexpr int32_t kStepSlots = GLINT_MAX_STEPS_IN_FLIGHT;

  Staging(const glint_model& model, const StepLimits& limits);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  static uint64_t pinned_bytes(const glint_model& model, const StepLimits& limits);

  PinnedMemory memory;
  StepPlaces steps[kStepSlots];
  SamplePlaces sampling;
  uint64_t* experts_touched[kSampleSlots] = {};
  cudaEvent_t sampled[kSampleSlots] = {};
};

}
