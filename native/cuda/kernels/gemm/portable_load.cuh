#pragma once

#include <cstdint>

#include "cuda/kernels/ptx/tensor_core.cuh"
#include "cuda/kernels/gemm/portable.h"
#include "include/glint.h"

namespace glint::cuda::portable {

constexpr int kUnitRows = kPortableUnitRows;
constexpr int kUnitTokens = 8;
constexpr int kLineBytes = kPortableLineBytes;
constexpr int kStageLines = 2;
constexpr int kStageBytes = kStageLines * kLineBytes;
constexpr int kChunkBytes = 16;
constexpr int kStageChunks = kStageBytes / kChunkBytes;
constexpr int kFragmentBytes = 512;
constexpr int kUnitLineBytes = kUnitRows * kLineBytes;
constexpr int kMaxPieces = 8;

struct ProductPlan {
  int32_t num_units;
  int32_t num_lines;
  int32_t row_bytes;
  int32_t piece_stages;
  int32_t num_pieces;
  int32_t row_groups;
  int32_t tile_parts;

  __host__ __device__ int num_stages() const { return (num_lines + kStageLines - 1) / kStageLines; }
};

template <ProductElement kElementOfShape, bool kTileScales, int kRowUnitsOfWarp, int kTokenUnitsOfWarp,
          int kWarpsByRows, int kWarpsByTokens, int kStagesOfRing, int kBlocksPerMultiprocessor>
struct ProductShape {
  static constexpr ProductElement kElement = kElementOfShape;
  static constexpr bool kHasTileScales = kTileScales;
  static constexpr int kRowUnits = kRowUnitsOfWarp;
  static constexpr int kTokenUnits = kTokenUnitsOfWarp;
  static constexpr int kTokenWarps = kWarpsByTokens;
  static constexpr int kStages = kStagesOfRing;
  static constexpr int kMinBlocks = kBlocksPerMultiprocessor;
  static constexpr int kGroupWarps = kWarpsByRows * kWarpsByTokens;
  static constexpr int kGroupThreads = kGroupWarps * 32;
  static constexpr bool kIsSplit = kGroupWarps == 1;
  static constexpr int kMaxThreads = kIsSplit ? kMaxPieces * 32 : kGroupThreads;
  static constexpr int kGroupUnits = kWarpsByRows * kRowUnits;
  static constexpr int kGroupRows = kGroupUnits * kUnitRows;
  static constexpr int kGroupTokens = kWarpsByTokens * kTokenUnits * kUnitTokens;
  static constexpr int kWeightBytes = kGroupRows * kStageBytes;
  static constexpr int kTokenBytes = kGroupTokens * kStageBytes;
  static constexpr int kRingBytes = kStages * (kWeightBytes + kTokenBytes);
  static constexpr int kPieceStride = kGroupRows + 4;
  static constexpr int kPieceFloats = kGroupTokens * kPieceStride;
  static_assert(!kIsSplit || kPieceFloats * 4 <= kRingBytes, "the sums of a piece must fit where its ring was");
};

struct GroupTile {
  int32_t expert;
  int32_t unit_first;
  int32_t token_first;
  int32_t token_count;
};

__device__ __forceinline__ void copy_chunk(const uint8_t* s_target, const uint8_t* g_source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(s_target)), "l"(g_source) : "memory");
}

__device__ __forceinline__ void copy_part_of_chunk(const uint8_t* s_target, const uint8_t* g_source, int valid_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(s_target)), "l"(g_source),
               "r"(valid_bytes)
               : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kOpen>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

template <class Shape>
__device__ __forceinline__ void group_barrier() {
  if constexpr (Shape::kIsSplit) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

template <class Shape>
struct GroupRing {
  static constexpr int kThreads = Shape::kGroupThreads;
  static constexpr int kUnitChunks = kStageLines * kUnitLineBytes / kChunkBytes;
  static constexpr int kUnitCopies = kThreads < kUnitChunks ? kUnitChunks / kThreads : 1;
  static constexpr int kUnitsAtOnce = kThreads < kUnitChunks ? 1 : kThreads / kUnitChunks;
  static constexpr int kWeightCopies = Shape::kGroupUnits * kUnitChunks / kThreads;
  static constexpr int kTokensAtOnce = kThreads / kStageChunks;
  static constexpr int kTokenCopies = (Shape::kGroupTokens + kTokensAtOnce - 1) / kTokensAtOnce;
  static constexpr uint32_t kNoRow = ~0U;
  static_assert(kTokensAtOnce % 2 == 0, "a thread keeps to odd or to even tokens");

  uint8_t* s_weights;
  uint8_t* s_tokens;
  const uint8_t* g_weights;
  const uint8_t* g_activations;
  int64_t unit_bytes;
  int32_t units_left;
  uint32_t r_rows[kTokenCopies];

  __device__ __forceinline__ static int slot_offset(int slot) {
    return slot * (Shape::kWeightBytes + Shape::kTokenBytes);
  }

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % kThreads; }

  __device__ __forceinline__ void start(uint8_t* s_ring, const PortableWeight& weight, const ProductPlan& plan,
                                        const GroupTile& tile) {
    const int unit = thread() / kUnitChunks;
    const int token = thread() / kStageChunks;
    const int chunk = thread() % kStageChunks ^ (token % 2 * 4);
    unit_bytes = int64_t{plan.num_lines} * kUnitLineBytes;
    units_left = plan.num_units - tile.unit_first - unit;
    s_weights = s_ring + thread() * kChunkBytes;
    s_tokens = s_ring + Shape::kWeightBytes + token * kStageBytes + chunk * kChunkBytes;
    g_weights = weight.packed + tile.expert * weight.matrix_bytes + (tile.unit_first + unit) * unit_bytes +
                thread() % kUnitChunks * kChunkBytes;
  }

  __device__ __forceinline__ void find_rows(const PortableProductCall& call, const GroupTile& tile) {
    g_activations = call.activations + thread() % kStageChunks * kChunkBytes;
    const auto row_chunks = static_cast<uint32_t>(call.activation_stride_bytes / kChunkBytes);
#pragma unroll
    for (int copy = 0; copy < kTokenCopies; ++copy) {
      const int token = thread() / kStageChunks + copy * kTokensAtOnce;
      const int row = tile.token_first + token;
      r_rows[copy] = kNoRow;
      if (token >= tile.token_count) continue;
      r_rows[copy] = row_chunks * static_cast<uint32_t>(call.row_tokens == nullptr ? row : call.row_tokens[row]);
    }
  }

  __device__ __forceinline__ void copy_weights(const ProductPlan& plan, int stage, int slot) const {
    const bool has_all_lines = (stage + 1) * kStageLines <= plan.num_lines;
    const uint8_t* g_stage = g_weights + stage * (kStageLines * kUnitLineBytes);
#pragma unroll
    for (int copy = 0; copy < kWeightCopies; ++copy) {
      const int unit = copy / kUnitCopies * kUnitsAtOnce;
      const int chunk = copy % kUnitCopies * kThreads;
      const bool is_first_line = thread() % kUnitChunks + chunk < kUnitChunks / kStageLines;
      if (unit >= units_left || !(has_all_lines || is_first_line)) continue;
      copy_chunk(s_weights + slot_offset(slot) + copy * kThreads * kChunkBytes,
                 g_stage + unit * unit_bytes + chunk * kChunkBytes);
    }
  }

  __device__ __forceinline__ void copy_tokens(const ProductPlan& plan, int stage, int slot) const {
    const bool is_whole = (stage + 1) * kStageBytes <= plan.row_bytes;
    const int offset = stage * kStageBytes;
    const int bytes_left = plan.row_bytes - offset - thread() % kStageChunks * kChunkBytes;
    const int valid_bytes = max(0, min(kChunkBytes, bytes_left));
#pragma unroll
    for (int copy = 0; copy < kTokenCopies; ++copy) {
      if (r_rows[copy] == kNoRow) continue;
      const uint8_t* s_target = s_tokens + slot_offset(slot) + copy * kTokensAtOnce * kStageBytes;
      const uint8_t* g_source = g_activations + offset + uint64_t{r_rows[copy]} * kChunkBytes;
      if (is_whole) {
        copy_chunk(s_target, g_source);
      } else {
        copy_part_of_chunk(s_target, valid_bytes > 0 ? g_source : g_activations, valid_bytes);
      }
    }
  }
};

}
