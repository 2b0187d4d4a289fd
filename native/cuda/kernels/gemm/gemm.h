#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace glint::cuda {

constexpr int32_t kProductTileRows = 128;
constexpr int32_t kProductTileK = 128;
constexpr int32_t kProductTileBytes = kProductTileRows * kProductTileK;

enum class GemmElement { kE4m3, kBf16 };

struct TokenTile {
  int32_t expert;
  int32_t row_first;
  int32_t row_count;
  int32_t index;
};

struct ProductInputs {
  const uint8_t* weights;
  const uint8_t* activations;
  const int32_t* row_tokens;
  int64_t activation_stride;
  int32_t piece_steps;
  int32_t num_pieces;
};

struct PiecePlan {
  int32_t num_pieces;
  int32_t piece_steps;
};

PiecePlan plan_pieces(int64_t k_bytes);
bool starts_next_after_wait(int64_t k_bytes, int64_t num_tokens);

struct PackCall {
  uint8_t* packed;
  const uint8_t* weights;
  const uint8_t* up_weights;
  int64_t rows;
  int64_t k_bytes;
  int64_t num_matrices;
};

struct DenseProductCall {
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

int64_t packed_product_bytes(int64_t rows, int64_t k_bytes);
int64_t packed_gate_up_bytes(int64_t width, int64_t k_bytes);
void launch_pack_rows(const PackCall& call, cudaStream_t stream);
void launch_pack_gate_up(const PackCall& call, cudaStream_t stream);
void launch_dense_product(const DenseProductCall& call, cudaStream_t stream);

}
