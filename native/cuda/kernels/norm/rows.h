#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/sampling/sampling.h"
#include "model/ops.h"

namespace glint::cuda {

inline constexpr int32_t kMaxParts = 8;

struct NormCall {
  float* hidden = nullptr;
  float* normed = nullptr;
  uint8_t* fp8 = nullptr;
  float* scales = nullptr;
  int64_t fp8_stride = 0;
  const float* parts = nullptr;
  int64_t part_stride = 0;
  int32_t num_parts = 0;
  const float* weight = nullptr;
  int64_t count = 0;
  int64_t width = 0;
  float epsilon = 0.0F;
  bool hidden_is_settled = false;
};

struct EmbedCall {
  float* hidden;
  const uint16_t* table;
  const int32_t* tokens;
  const int32_t* sampled_rows;
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

struct MtpInputCall {
  uint8_t* out;
  int64_t out_stride_bytes;
  const uint16_t* table;
  const int32_t* tokens;
  const float* hidden;
  const float* embedding_norm;
  const float* hidden_norm;
  int64_t count;
  int64_t width;
  float epsilon;
};

struct PageStatesCall {
  float* rows;
  float* kept;
  const PageState* states;
  int64_t count;
  int64_t width;
};

void launch_norm(const NormCall& call, cudaStream_t stream);
void launch_embed(const EmbedCall& call, cudaStream_t stream);
void launch_add_rows(float* hidden, const float* update, int64_t count, cudaStream_t stream);
void launch_gather_rows(const GatherCall& call, cudaStream_t stream);
void launch_mtp_input(const MtpInputCall& call, cudaStream_t stream);
void launch_page_states(const PageStatesCall& call, cudaStream_t stream);

}
