#pragma once

#include <cfloat>

#include "cuda/kernels/sampling/sample_plan.cuh"

namespace glint::cuda {

inline constexpr uint32_t kSeenBit = 0x80000000U;

__device__ __forceinline__ bool has_repetition(const SampleSettings& row) { return row.repetition_penalty != 1.0F; }
__device__ __forceinline__ bool has_counts(const SampleSettings& row) {
  return row.frequency_penalty != 0.0F || row.presence_penalty != 0.0F;
}
__device__ __forceinline__ bool has_changes(const SampleSettings& row) {
  return row.bias_count > 0 || row.allowed_words != nullptr || has_repetition(row) || has_counts(row);
}

__device__ __forceinline__ bool is_first_mention(const int32_t* g_tokens, int index) {
  for (int other = 0; other < index; ++other) {
    if (g_tokens[other] == g_tokens[index]) return false;
  }
  return true;
}

__device__ __forceinline__ void apply_bias(const SampleSlice& slice, const SampleSettings& row) {
  for (int index = SampleSlice::thread(); index < row.bias_count; index += kSampleThreads) {
    const int place = row.bias_tokens[index] - slice.first;
    if (place < 0 || place >= slice.count || !is_first_mention(row.bias_tokens, index)) continue;
    for (int other = index; other < row.bias_count; ++other) {
      if (row.bias_tokens[other] == row.bias_tokens[index]) slice.s_values[place] += row.bias_values[other];
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void apply_mask(const SampleSlice& slice, const SampleSettings& row) {
  if (row.allowed_words == nullptr) return;
  slice.for_each([&](int index) {
    const uint32_t word = row.allowed_words[slice.token(index) / 32];
    if (((word >> (slice.token(index) % 32)) & 1U) == 0) slice.s_values[index] = -INFINITY;
  });
  __syncthreads();
}

__device__ __forceinline__ void count_history(const SampleSlice& slice, const SampleSettings& row, uint32_t* s_counts) {
  slice.for_each([&](int index) { s_counts[index] = 0; });
  __syncthreads();
  for (int index = SampleSlice::thread(); index < row.history_count; index += kSampleThreads) {
    const int place = row.history[index] - slice.first;
    if (place < 0 || place >= slice.count) continue;
    atomicOr(s_counts + place, kSeenBit);
    if (index >= row.prompt_count) atomicAdd(s_counts + place, 1U);
  }
  __syncthreads();
}

__device__ __forceinline__ float repeated(float logit, float penalty) {
  const float changed = logit > 0.0F ? __fdiv_rn(logit, penalty) : __fmul_rn(logit, penalty);
  return logit == -INFINITY ? logit : fminf(fmaxf(changed, -FLT_MAX), FLT_MAX);
}

__device__ __forceinline__ void apply_penalties(const SampleSlice& slice, const SampleSettings& row,
                                                uint32_t* s_counts) {
  if (!has_repetition(row) && !has_counts(row)) return;
  count_history(slice, row, s_counts);
  slice.for_each([&](int index) {
    const uint32_t seen = s_counts[index];
    const uint32_t count = seen & ~kSeenBit;
    float logit = slice.s_values[index];
    if (has_repetition(row) && seen != 0) logit = repeated(logit, row.repetition_penalty);
    if (has_counts(row) && count > 0) {
      const float cost = __fadd_rn(__fmul_rn(row.frequency_penalty, static_cast<float>(count)), row.presence_penalty);
      logit = __fsub_rn(logit, cost);
    }
    slice.s_values[index] = logit;
  });
  __syncthreads();
}

}
