#pragma once

#include <cstdint>

#include "cuda/check.h"
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/kernels/gemm/multiply.cuh"
#include "cuda/kernels/ptx/mbarrier.cuh"
#include "cuda/kernels/ptx/copy.cuh"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/memory.cuh"
#include "cuda/launch.h"
#include "cuda/per_device.h"

namespace glint::cuda {

constexpr int kGemmThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr int kWarpgroupBytes = kGemmTileBytes / 2;
constexpr int kSharedHalfBytes = 113 * 1024;
constexpr int kSharedReserveBytes = 2048;
constexpr int kTakenPlaces = 8;
static_assert(kClusterSplits == kConsumerWarps, "a thread block of a cluster reduces the rows of one warp of each");

template <Multiply kMultiplyValue, GemmElement kElementValue, int kMaxTokensValue, int kMostStages = 12>
struct SplitKTilesShape {
  static constexpr Multiply kMultiply = kMultiplyValue;
  static constexpr GemmElement kElement = kElementValue;
  static constexpr int kMaxTokens = kMaxTokensValue;
  static constexpr int kTokenBytes = kMaxTokens * kGemmTileK;
  static constexpr int kBlocksPerMultiprocessor = kMaxTokens <= 32 ? 2 : 1;
  static constexpr int kGatherThreads = 64;
  static constexpr int kEpilogueThreads = 64;
  static constexpr int kFragmentFloats = kFragmentRows * kMaxTokens;
  static constexpr int kPartialBuffers = kMaxTokens <= 16 ? 2 : 1;
  static constexpr int kBufferFloats = kClusterSplits * kFragmentFloats;
  static constexpr int kPartialFloats = kPartialBuffers * kBufferFloats;
  static constexpr int kSharedBytes = kBlocksPerMultiprocessor == 2 ? kSharedHalfBytes : kSharedLimitBytes;
  static constexpr int kRingBytes = kSharedBytes - kSharedReserveBytes - kPartialFloats * 4;
  static constexpr int kFittingStages = kRingBytes / (kGemmTileBytes + kTokenBytes);
  static constexpr int kStages = kFittingStages < kMostStages ? kFittingStages : kMostStages;
  static_assert(kStages >= 3, "the ring needs three stages");
  static_assert(kMaxTokens % 8 == 0 && kMaxTokens <= 64, "a token tile is at most 64 tokens");
};

template <class Shape>
struct SplitKTilesStorage {
  alignas(1024) uint8_t weights[Shape::kStages][kGemmTileBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][Shape::kTokenBytes];
  alignas(128) float partials[Shape::kPartialFloats];
  alignas(8) uint64_t stage_arrived[Shape::kStages];
  alignas(8) uint64_t stage_released[Shape::kStages];
  alignas(8) uint64_t partials_arrived[Shape::kPartialBuffers];
  alignas(8) uint64_t partials_released[Shape::kPartialBuffers];
  float token_scales[Shape::kPartialBuffers][Shape::kMaxTokens];
  alignas(8) uint64_t taken_tiles[kTakenPlaces];
};

__device__ __forceinline__ int padded_tokens(int count) {
  int tokens = 8;
  while (tokens < count) tokens *= 2;
  return tokens;
}

__device__ __forceinline__ TokenTile load_tile_now(const TokenTile* g_tile) {
  const int4 tile = ptx::ld_relaxed_gpu(reinterpret_cast<const int4*>(g_tile));
  return {tile.x, tile.y, tile.z, tile.w};
}

struct GemmTile {
  TokenTile tokens;
  int32_t row_tile;
};

struct DenseTileScheduler {
  static constexpr bool kIsKnownEarly = true;

  int32_t num_row_tiles;
  int32_t num_tokens;
  int32_t max_tokens;

  __host__ __device__ __forceinline__ int num_tiles() const {
    return num_row_tiles * ((num_tokens + max_tokens - 1) / max_tokens);
  }

  __device__ __forceinline__ GemmTile tile(int index) const {
    const int token_tiles = (num_tokens + max_tokens - 1) / max_tokens;
    const int first = index % token_tiles * max_tokens;
    return {{0, first, min(max_tokens, num_tokens - first), 0}, index / token_tiles};
  }

  __device__ __forceinline__ GemmTile tile(int index, int) const { return tile(index); }

  __device__ __forceinline__ int64_t weight_tile(const GemmTile& tile) const { return tile.row_tile; }

  __device__ __forceinline__ int token(int row) const { return row; }
};

struct ExpertTileScheduler {
  static constexpr bool kIsKnownEarly = false;

  int32_t num_row_tiles;
  const TokenTile* token_tiles;
  const int32_t* num_token_tiles;
  const int32_t* row_tokens;
  uint32_t* tiles_taken;

  __device__ __forceinline__ int num_tiles() const { return num_row_tiles * __ldcg(num_token_tiles); }

  __device__ __forceinline__ GemmTile tile(int index) const {
    return {load_tile_now(token_tiles + index / num_row_tiles), index % num_row_tiles};
  }

  __device__ __forceinline__ int token(int row) const { return __ldcg(row_tokens + row); }
};

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTensorMap find_tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  GLINT_CHECK_CUDA(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
  require_argument(found == cudaDriverEntryPointSuccess,
                   "the CUDA driver has no cuTensorMapEncodeTiled; install one for CUDA 12 or newer");
  return reinterpret_cast<EncodeTensorMap>(function);
}

struct TensorShape {
  CUtensorMapDataType type;
  cuuint64_t columns;
  cuuint64_t rows;
  cuuint64_t row_bytes;
  cuuint32_t box_columns;
  cuuint32_t box_rows;
};

inline CUtensorMap make_tensor_map(const void* data, const TensorShape& shape) {
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  const cuuint64_t sizes[2] = {shape.columns, shape.rows};
  const cuuint32_t box[2] = {shape.box_columns, shape.box_rows};
  const cuuint32_t element_steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, shape.type, 2, const_cast<void*>(data), sizes, &shape.row_bytes, box,
                                 element_steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require_argument(result == CUDA_SUCCESS, "the driver refuses a tensor map of ", shape.rows, " rows of ",
                   shape.row_bytes, " bytes; rows must start at multiples of 16 bytes");
  return map;
}

inline CUtensorMap token_map(const GemmInputs& inputs, int64_t num_tokens, int32_t tile_tokens) {
  const auto row_bytes = static_cast<cuuint64_t>(inputs.activation_stride);
  return make_tensor_map(inputs.activations, {.type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                              .columns = row_bytes,
                                              .rows = static_cast<cuuint64_t>(num_tokens),
                                              .row_bytes = row_bytes,
                                              .box_columns = kGemmTileK,
                                              .box_rows = static_cast<cuuint32_t>(tile_tokens)});
}

}
