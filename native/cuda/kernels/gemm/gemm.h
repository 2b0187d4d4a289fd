#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace glint::cuda {

constexpr int32_t kGemmTileRows = 128;
constexpr int32_t kGemmTileK = 128;
constexpr int32_t kGemmTileBytes = kGemmTileRows * kGemmTileK;

enum class GemmElement { kE4m3, kBf16 };

enum class Multiply { kWgmma, kMmaSync };

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

constexpr int64_t padded_k_bytes(int64_t k_bytes) { return (k_bytes + kGemmTileK - 1) / kGemmTileK * kGemmTileK; }

constexpr bool is_tiled_k(int64_t k_bytes) {
  return k_bytes % 8 == 0 && (padded_k_bytes(k_bytes) - k_bytes) * 16 <= k_bytes;
}

struct KSplitPlan {
  int32_t num_splits;
  int32_t split_steps;
};

constexpr int32_t kClusterSplits = 8;

constexpr KSplitPlan plan_k_splits(int64_t k_bytes) {
  const auto steps = static_cast<int32_t>(k_bytes / kGemmTileK);
  if (steps % 8 == 0 && steps >= 24) return {kClusterSplits, steps / 8};
  if (steps % 3 == 0 && steps >= 6) return {3, steps / 3};
  return {1, steps};
}

constexpr bool starts_next_after_wait(int64_t k_bytes, int64_t num_tokens) {
  return num_tokens <= 64 && plan_k_splits(k_bytes).num_splits == kClusterSplits;
}

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
  Multiply multiply;
};

int64_t packed_weight_bytes(int64_t rows, int64_t k_bytes);
int64_t packed_gate_up_bytes(int64_t width, int64_t k_bytes);
void launch_pack_rows(const PackCall& call, cudaStream_t stream);
void launch_pack_gate_up(const PackCall& call, cudaStream_t stream);

template <Multiply kMultiply>
void launch_gemm_with(const GemmCall& call, cudaStream_t stream);
extern template void launch_gemm_with<Multiply::kWgmma>(const GemmCall& call, cudaStream_t stream);
extern template void launch_gemm_with<Multiply::kMmaSync>(const GemmCall& call, cudaStream_t stream);

inline void launch_gemm(const GemmCall& call, cudaStream_t stream) {
  if (call.multiply == Multiply::kWgmma) return launch_gemm_with<Multiply::kWgmma>(call, stream);
  launch_gemm_with<Multiply::kMmaSync>(call, stream);
}

}
