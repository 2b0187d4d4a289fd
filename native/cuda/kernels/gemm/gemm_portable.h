#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/gemm/gemm.h"

namespace glint::cuda {

constexpr int32_t kPortableUnitRows = 16;
constexpr int32_t kPortableLineBytes = 64;
constexpr int32_t kPortableRowBytes = 128;
constexpr int32_t kPortableScaleTile = 128;

struct PortableWeight {
  const uint8_t* packed;
  const float* scales;
  int64_t rows;
  int64_t cols;
  GemmElement element;
  int32_t scale_kind;
  int64_t scale_stride;
  int64_t matrix_bytes;
  int64_t matrix_scales;
};

struct PortablePackCall {
  uint8_t* packed;
  const uint8_t* weights;
  int64_t rows;
  int64_t cols;
  int64_t weight_stride_bytes;
  GemmElement element;
};

struct PortableGemmCall {
  float* out;
  int64_t out_stride;
  PortableWeight weight;
  const float* bias;
  const uint8_t* activations;
  int64_t activation_stride_bytes;
  const float* token_scales;
  int64_t num_tokens;
  const int32_t* row_tokens;
  const TokenTile* tiles;
  const int32_t* num_tiles;
  int64_t max_tiles;
  int32_t tile_tokens;
};

struct ToBf16Call {
  uint8_t* out;
  const float* in;
  int64_t in_stride;
  int64_t count;
  int64_t width;
  int64_t out_stride_bytes;
};

int64_t portable_weight_bytes(int64_t rows, int64_t cols, GemmElement element);
int64_t portable_row_bytes(int64_t cols, GemmElement element);
void launch_portable_pack(const PortablePackCall& call, cudaStream_t stream);
void launch_gemm_portable(const PortableGemmCall& call, cudaStream_t stream);
void launch_to_bf16(const ToBf16Call& call, cudaStream_t stream);

}
