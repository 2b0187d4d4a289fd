#pragma once

#include <cstdint>

#include "cuda/check.h"
#include "cuda/kernels/ptx/hopper.cuh"
#include "cuda/kernels/ptx/wgmma.cuh"
#include "cuda/kernels/gemm/products.h"

namespace glint::cuda {

constexpr int kProductThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr int kSpreadPieces = 8;
constexpr int kWarpgroupBytes = kProductTileBytes / 2;
constexpr int kFragmentRows = 16;
constexpr int kGroupTokens = 8;
constexpr int kSharedHalfBytes = 113 * 1024;
constexpr int kSharedReserveBytes = 2048;
constexpr int kTakenPlaces = 8;
static_assert(kSpreadPieces == kConsumerWarps, "a thread block of a cluster joins the rows of one warp of each");

template <hopper::Element kElementValue, int kMaxTokensValue, int kMostStages = 12>
struct ProductShape {
  static constexpr hopper::Element kElement = kElementValue;
  static constexpr int kMaxTokens = kMaxTokensValue;
  static constexpr int kTokenBytes = kMaxTokens * kProductTileK;
  static constexpr int kBlocksPerMultiprocessor = kMaxTokens <= 32 ? 2 : 1;
  static constexpr int kGatherThreads = 64;
  static constexpr int kFinishThreads = 64;
  static constexpr int kFragmentFloats = kFragmentRows * kMaxTokens;
  static constexpr int kPartialBuffers = kMaxTokens <= 16 ? 2 : 1;
  static constexpr int kBufferFloats = kSpreadPieces * kFragmentFloats;
  static constexpr int kPartialFloats = kPartialBuffers * kBufferFloats;
  static constexpr int kSharedBytes = kBlocksPerMultiprocessor == 2 ? kSharedHalfBytes : kSharedLimitBytes;
  static constexpr int kRingBytes = kSharedBytes - kSharedReserveBytes - kPartialFloats * 4;
  static constexpr int kFittingStages = kRingBytes / (kProductTileBytes + kTokenBytes);
  static constexpr int kStages = kFittingStages < kMostStages ? kFittingStages : kMostStages;
  static_assert(kStages >= 3, "the ring needs three stages");
  static_assert(kMaxTokens % 8 == 0 && kMaxTokens <= 64, "a token tile is at most 64 tokens");
};

template <class Shape>
struct SharedPlan {
  alignas(1024) uint8_t weights[Shape::kStages][kProductTileBytes];
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

struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance(int num_stages) {
    ++stage;
    if (stage == num_stages) {
      stage = 0;
      phase ^= 1U;
    }
  }
};

template <hopper::Element kElement, int kTokens>
__device__ __forceinline__ void start_step(float (&r_step)[kTokens / 2], uint64_t rows, uint64_t tokens) {
  hopper::wgmma_fence();
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    hopper::Wgmma<kElement, kTokens>::multiply(r_step, rows + part * (2048 / 16), tokens + part * (32 / 16),
                                               part == 0 ? 0 : 1);
  }
  hopper::wgmma_commit_group();
}

__device__ __forceinline__ TokenTile load_tile_now(const TokenTile* g_tile) {
  TokenTile tile;
  asm volatile("ld.relaxed.gpu.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.expert), "=r"(tile.row_first), "=r"(tile.row_count), "=r"(tile.index)
               : "l"(g_tile));
  return tile;
}

struct ProductTile {
  TokenTile tokens;
  int32_t row_tile;
};

struct DenseWalk {
  static constexpr bool kIsKnownEarly = true;

  int32_t num_row_tiles;
  int32_t num_tokens;
  int32_t max_tokens;

  __host__ __device__ __forceinline__ int num_tiles() const {
    return num_row_tiles * ((num_tokens + max_tokens - 1) / max_tokens);
  }

  __device__ __forceinline__ ProductTile tile(int index) const {
    const int token_tiles = (num_tokens + max_tokens - 1) / max_tokens;
    const int first = index % token_tiles * max_tokens;
    return {{0, first, min(max_tokens, num_tokens - first), 0}, index / token_tiles};
  }

  __device__ __forceinline__ int token(int row) const { return row; }
};

struct ExpertWalk {
  static constexpr bool kIsKnownEarly = false;

  int32_t num_row_tiles;
  const TokenTile* token_tiles;
  const int32_t* num_token_tiles;
  const int32_t* row_tokens;
  uint32_t* tiles_taken;

  __device__ __forceinline__ int num_tiles() const { return num_row_tiles * __ldcg(num_token_tiles); }

  __device__ __forceinline__ ProductTile tile(int index) const {
    return {load_tile_now(token_tiles + index / num_row_tiles), index % num_row_tiles};
  }

  __device__ __forceinline__ int token(int row) const { return __ldcg(row_tokens + row); }
};

}
