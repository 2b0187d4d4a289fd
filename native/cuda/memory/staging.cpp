#include "cuda/memory/staging.h"

#include "cuda/check.h"

namespace glint::cuda {

namespace {

void lay_out_staging(const glint_model& model, const StepLimits& limits, Staging* staging, Arena& arena) {
  const int32_t num_slots = limits.has_mtp() ? kSampleSlots : GLINT_MAX_STEPS_IN_FLIGHT;
  for (int32_t slot = 0; slot < num_slots; ++slot) {
    const StepBuffers buffers = lay_out_step(model, limits, arena);
    if (staging != nullptr) staging->steps[slot] = buffers;
  }
  const SampleBuffers sampling = lay_out_sampling(model, limits, arena);
  if (staging != nullptr) staging->sampling = sampling;
  for (int32_t slot = 0; slot < kSampleSlots; ++slot) {
    auto* touched = arena.take<uint64_t>(1);
    if (staging != nullptr) staging->experts_touched[slot] = touched;
  }
}

}

uint64_t Staging::pinned_bytes(const glint_model& model, const StepLimits& limits) {
  Arena arena;
  lay_out_staging(model, limits, nullptr, arena);
  return arena.used();
}

Staging::Staging(const glint_model& model, const StepLimits& limits) : memory(pinned_bytes(model, limits)) {
  Arena arena(memory.data());
  lay_out_staging(model, limits, this, arena);
  for (cudaEvent_t& event : sampled) {
    GLINT_CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
}

Staging::~Staging() {
  for (const cudaEvent_t event : sampled) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

}
