#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/sampling/sampling.h"

namespace glint::cuda {

inline constexpr int32_t kMaxParts = 8;

struct NormCall {
  float* hidden;
  float* normed;
  uint8_t* fp8;
  float* scales;
  int64_t fp8_stride;
  const float* parts;
  int64_t part_stride;
  int32_t num_parts;
  const float* weight;
  int64_t count;
  int64_t width;
  float epsilon;
  bool hidden_is_settled = false;
};

struct EmbedCall {
  float* hidden;
  const uint16_t* table;
  const int32_t* tokens;
  int64_t count;
  int64_t width;
  const SampleResult* sampled;
  int32_t vocab_size;
};

struct GatherCall {
  float* out;
  const float* in;
  const int32_t* rows;
  int64_t count;
  int64_t width;
  const float* update;
};

void launch_norm(const NormCall& call, cudaStream_t stream);
void launch_embed(const EmbedCall& call, cudaStream_t stream);
void launch_add_rows(float* hidden, const float* update, int64_t count, cudaStream_t stream);
void launch_gather_rows(const GatherCall& call, cudaStream_t stream);

}
