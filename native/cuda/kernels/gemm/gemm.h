#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace glint::cuda {

constexpr int32_t kGemmTileRows = 128;
constexpr int32_t kGemmTileK = 128;
constexpr int32_t kGemmTileBytes = kGemmTileRows * kGemmTileK;

enum class GemmElement { kE4m3, kBf16 };

struct TokenTile {
  int32_t expert;
  int32_t row_first;
  int32_t row_count;
  int32_t index;
};

struct GemmInputs {
  const uint8_t* weights;
  const uint8_t* activations;
  const int32_t* row_tokens;
  int64_t activation_stride;
  int32_t split_steps;
  int32_t num_splits;
};

struct KSplitPlan {
  int32_t num_splits;
  int32_t split_steps;
};

KSplitPlan plan_k_splits(int64_t k_bytes);
bool starts_next_after_wait(int64_t k_bytes, int64_t num_tokens);

struct PackCall {
  uint8_t* packed;
  const uint8_t* weights;
  const uint8_t* up_weights;
  int64_t rows;
  int64_t k_bytes;
  int64_t num_matrices;
};

struct GemmCall {
  float* out;
  int64_t out_stride;
  const uint8_t* packed_weights;
  const float* row_scales;
  const float* bias;
  const uint8_t* activations;
  const float* token_scales;
  int64_t rows;
  int64_t k_bytes;
  int64_t num_tokens;
  GemmElement element;
};

int64_t packed_weight_bytes(int64_t rows, int64_t k_bytes);
int64_t packed_gate_up_bytes(int64_t width, int64_t k_bytes);
void launch_pack_rows(const PackCall& call, cudaStream_t stream);
void launch_pack_gate_up(const PackCall& call, cudaStream_t stream);
void launch_gemm(const GemmCall& call, cudaStream_t stream);

}
