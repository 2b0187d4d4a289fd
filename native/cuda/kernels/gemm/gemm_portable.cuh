#pragma once

#include <cstdint>

#include "cuda/kernels/gemm/gemm_portable.h"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/copy.cuh"
#include "cuda/kernels/ptx/mma.cuh"
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
constexpr int kMaxSplits = 8;

struct GemmPlan {
  int32_t num_units;
  int32_t num_lines;
  int32_t row_bytes;
  int32_t split_stages;
  int32_t num_splits;
  int32_t row_groups;
  int32_t tile_parts;

  __host__ __device__ int num_stages() const { return (num_lines + kStageLines - 1) / kStageLines; }
};

template <GemmElement kElementOfShape, bool kTileScales, int kRowUnitsOfWarp, int kTokenUnitsOfWarp, int kWarpsByRows,
          int kWarpsByTokens, int kStagesOfRing, int kBlocksPerMultiprocessor>
struct GemmShape {
  static constexpr GemmElement kElement = kElementOfShape;
  static constexpr bool kHasTileScales = kTileScales;
  static constexpr int kRowUnits = kRowUnitsOfWarp;
  static constexpr int kTokenUnits = kTokenUnitsOfWarp;
  static constexpr int kTokenWarps = kWarpsByTokens;
  static constexpr int kStages = kStagesOfRing;
  static constexpr int kMinBlocks = kBlocksPerMultiprocessor;
  static constexpr int kGroupWarps = kWarpsByRows * kWarpsByTokens;
  static constexpr int kGroupThreads = kGroupWarps * 32;
  static constexpr bool kIsSplit = kGroupWarps == 1;
  static constexpr int kMaxThreads = kIsSplit ? kMaxSplits * 32 : kGroupThreads;
  static constexpr int kGroupUnits = kWarpsByRows * kRowUnits;
  static constexpr int kGroupRows = kGroupUnits * kUnitRows;
  static constexpr int kGroupTokens = kWarpsByTokens * kTokenUnits * kUnitTokens;
  static constexpr int kWeightBytes = kGroupRows * kStageBytes;
  static constexpr int kTokenBytes = kGroupTokens * kStageBytes;
  static constexpr int kRingBytes = kStages * (kWeightBytes + kTokenBytes);
  static constexpr int kSplitStride = kGroupRows + 4;
  static constexpr int kSplitFloats = kGroupTokens * kSplitStride;
  static_assert(!kIsSplit || kSplitFloats * 4 <= kRingBytes, "the sums of a split must fit where its ring was");
};

struct GroupTile {
  int32_t expert;
  int32_t unit_first;
  int32_t token_first;
  int32_t token_count;
};

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

  __device__ __forceinline__ void start(uint8_t* s_ring, const PortableWeight& weight, const GemmPlan& plan,
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

  __device__ __forceinline__ void find_rows(const PortableGemmCall& call, const GroupTile& tile) {
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

  __device__ __forceinline__ void copy_weights(const GemmPlan& plan, int stage, int slot) const {
    const bool has_all_lines = (stage + 1) * kStageLines <= plan.num_lines;
    const uint8_t* g_stage = g_weights + stage * (kStageLines * kUnitLineBytes);
#pragma unroll
    for (int copy = 0; copy < kWeightCopies; ++copy) {
      const int unit = copy / kUnitCopies * kUnitsAtOnce;
      const int chunk = copy % kUnitCopies * kThreads;
      const bool is_first_line = thread() % kUnitChunks + chunk < kUnitChunks / kStageLines;
      if (unit >= units_left || !(has_all_lines || is_first_line)) continue;
      ptx::cp_async(s_weights + slot_offset(slot) + copy * kThreads * kChunkBytes,
                    g_stage + unit * unit_bytes + chunk * kChunkBytes);
    }
  }

  __device__ __forceinline__ void copy_tokens(const GemmPlan& plan, int stage, int slot) const {
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
        ptx::cp_async(s_target, g_source);
      } else {
        ptx::cp_async_zfill(s_target, valid_bytes > 0 ? g_source : g_activations, valid_bytes);
      }
    }
  }
};

template <class Shape>
struct WarpSums {
  ptx::FragmentC values[Shape::kRowUnits][Shape::kTokenUnits];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int unit = 0; unit < Shape::kRowUnits; ++unit) {
#pragma unroll
      for (int column = 0; column < Shape::kTokenUnits; ++column) values[unit][column] = {};
    }
  }

  __device__ __forceinline__ void take(WarpSums& finished, float scale) {
#pragma unroll
    for (int unit = 0; unit < Shape::kRowUnits; ++unit) {
#pragma unroll
      for (int column = 0; column < Shape::kTokenUnits; ++column) {
#pragma unroll
        for (int index = 0; index < 4; ++index) {
          float& sum = values[unit][column].values[index];
          sum = fmaf(finished.values[unit][column].values[index], scale, sum);
        }
      }
    }
    finished.clear();
  }
};

__device__ __forceinline__ uint32_t halves_of_fp8(uint32_t fp8, int pair) {
  return ptx::cvt_f16x2_e4m3x2(static_cast<uint16_t>(fp8 >> (16 * pair)));
}

template <class Shape, int kColumns>
__device__ __forceinline__ void multiply_fp8(WarpSums<Shape>& sums, const uint8_t* s_fragments,
                                             const ptx::FragmentB (&r_tokens)[kColumns]) {
  ptx::FragmentB r_halves[2][kColumns];
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
#pragma unroll
    for (int index = 0; index < 4; ++index) {
      r_halves[index / 2][column].regs[index % 2] = halves_of_fp8(r_tokens[column].regs[index % 2], index / 2);
    }
  }
#pragma unroll
  for (int unit = 0; unit < Shape::kRowUnits; ++unit) {
    const uint4 fp8 = *reinterpret_cast<const uint4*>(s_fragments + unit * kStageLines * kUnitLineBytes);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const ptx::FragmentA r_rows = {{halves_of_fp8(fp8.x, pair), halves_of_fp8(fp8.y, pair),
                                      halves_of_fp8(fp8.z, pair), halves_of_fp8(fp8.w, pair)}};
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        ptx::mma_m16n8k16_f16(sums.values[unit][column], r_rows, r_halves[pair][column]);
      }
    }
  }
}

template <class Shape, int kColumns>
__device__ __forceinline__ void multiply_bf16(WarpSums<Shape>& sums, const uint8_t* s_fragments,
                                              const ptx::FragmentB (&r_tokens)[kColumns]) {
#pragma unroll
  for (int unit = 0; unit < Shape::kRowUnits; ++unit) {
    const uint4 rows = *reinterpret_cast<const uint4*>(s_fragments + unit * kStageLines * kUnitLineBytes);
    const ptx::FragmentA r_rows = {{rows.x, rows.y, rows.z, rows.w}};
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      ptx::mma_m16n8k16_bf16(sums.values[unit][column], r_rows, r_tokens[column].regs[0], r_tokens[column].regs[1]);
    }
  }
}

template <class Shape, int kColumns>
__device__ __forceinline__ void multiply_line(WarpSums<Shape>& sums, const uint8_t* s_weights, const uint8_t* s_tokens,
                                              int line) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % 4 + (lane / 4 % 2 ^ line) * 4;
  uint4 r_loaded[kColumns];
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
    const int token = column * kUnitTokens + lane / 4;
    r_loaded[column] = *reinterpret_cast<const uint4*>(s_tokens + token * kStageBytes + chunk * kChunkBytes);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint8_t* s_fragments = s_weights + (line * 2 + half) * kFragmentBytes + lane * kChunkBytes;
    ptx::FragmentB r_tokens[kColumns];
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const uint4& loaded = r_loaded[column];
      r_tokens[column] = half == 0 ? ptx::FragmentB{{loaded.x, loaded.y}} : ptx::FragmentB{{loaded.z, loaded.w}};
    }
    if constexpr (Shape::kElement == GemmElement::kE4m3) {
      multiply_fp8<Shape, kColumns>(sums, s_fragments, r_tokens);
    } else {
      multiply_bf16<Shape, kColumns>(sums, s_fragments, r_tokens);
    }
  }
}

struct WarpPlace {
  int32_t unit_first;
  int32_t token_first;

  template <class Shape>
  __device__ __forceinline__ static WarpPlace find() {
    const int warp = threadIdx.x % Shape::kGroupThreads / 32;
    return {warp / Shape::kTokenWarps * Shape::kRowUnits, warp % Shape::kTokenWarps * Shape::kTokenUnits * kUnitTokens};
  }
};

__device__ __forceinline__ const float* scales_of(const PortableWeight& weight, int expert) {
  return weight.scales + expert * weight.matrix_scales;
}

struct StageRange {
  int32_t first;
  int32_t last;
};

template <class Shape, int kColumns>
__device__ __forceinline__ void multiply_stages(WarpSums<Shape>& total, const PortableGemmCall& call,
                                                const GemmPlan& plan, const GroupTile& tile,
                                                const GroupRing<Shape>& ring, const uint8_t* s_ring,
                                                StageRange stages) {
  const WarpPlace place = WarpPlace::find<Shape>();
  const int unit = tile.unit_first + place.unit_first;
  const bool is_busy = unit < plan.num_units && place.token_first < tile.token_count;
  const uint8_t* s_weights = s_ring + place.unit_first * kStageLines * kUnitLineBytes;
  const uint8_t* s_tokens = s_ring + Shape::kWeightBytes + place.token_first * kStageBytes;
  const float* g_scales = nullptr;
  if (Shape::kHasTileScales && is_busy) {
    const int64_t tile_row = int64_t{unit} * kUnitRows / kPortableScaleTile;
    g_scales = scales_of(call.weight, tile.expert) + tile_row * call.weight.scale_stride;
  }
  WarpSums<Shape> r_sum;
  WarpSums<Shape> r_split;
  WarpSums<Shape>& split = Shape::kIsSplit ? total : r_split;
  WarpSums<Shape>& sum = Shape::kHasTileScales ? r_sum : split;
  r_sum.clear();
  r_split.clear();
  total.clear();
  int slot = 0;
  int split_last = stages.first + plan.split_stages;
  for (int stage = stages.first; stage < stages.last; ++stage) {
    ptx::cp_async_wait_group<Shape::kStages - 2>();
    group_barrier<Shape>();
    const int free_slot = slot == 0 ? Shape::kStages - 1 : slot - 1;
    if (stage + Shape::kStages - 1 < stages.last) {
      ring.copy_weights(plan, stage + Shape::kStages - 1, free_slot);
      ring.copy_tokens(plan, stage + Shape::kStages - 1, free_slot);
    }
    ptx::cp_async_commit_group();
    const int offset = GroupRing<Shape>::slot_offset(slot);
    slot = slot == Shape::kStages - 1 ? 0 : slot + 1;
    if (!is_busy) continue;
    const float scale = Shape::kHasTileScales ? __ldg(g_scales + stage) : 1.0F;
    multiply_line<Shape, kColumns>(sum, s_weights + offset, s_tokens + offset, 0);
    if ((stage + 1) * kStageLines <= plan.num_lines) {
      multiply_line<Shape, kColumns>(sum, s_weights + offset, s_tokens + offset, 1);
    }
    if constexpr (Shape::kHasTileScales) split.take(sum, scale);
    if (Shape::kIsSplit || (stage + 1 < split_last && stage + 1 < stages.last)) continue;
    total.take(split, 1.0F);
    split_last += plan.split_stages;
  }
}

struct RowMetadata {
  float scale;
  float shift;
};

__device__ __forceinline__ RowMetadata row_metadata(const PortableGemmCall& call, int expert, int row) {
  RowMetadata metadata = {1.0F, 0.0F};
  if (call.weight.scale_kind == GLINT_SCALE_CHANNEL) metadata.scale = __ldg(scales_of(call.weight, expert) + row);
  if (call.weight.scale_kind == GLINT_SCALE_TENSOR) metadata.scale = __ldg(scales_of(call.weight, expert));
  if (call.bias != nullptr) metadata.shift = __ldg(call.bias + row);
  return metadata;
}

__device__ __forceinline__ float token_scale(const PortableGemmCall& call, int row) {
  if (call.token_scales == nullptr) return 1.0F;
  return call.token_scales[call.row_tokens == nullptr ? row : call.row_tokens[row]];
}

__device__ __forceinline__ void store_value(const PortableGemmCall& call, int token_row, int row, float sum,
                                            float by_token, const RowMetadata& metadata) {
  const float scaled = __fmul_rn(__fmul_rn(sum, by_token), metadata.scale);
  call.out[token_row * call.out_stride + row] = __fadd_rn(scaled, metadata.shift);
}

template <class Shape>
__device__ __forceinline__ void store_sums(const WarpSums<Shape>& total, const PortableGemmCall& call,
                                           const GroupTile& tile) {
  const WarpPlace place = WarpPlace::find<Shape>();
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int unit = 0; unit < Shape::kRowUnits; ++unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (tile.unit_first + place.unit_first + unit) * kUnitRows + half * 8 + lane / 4;
      if (row >= call.weight.rows) continue;
      const RowMetadata metadata = row_metadata(call, tile.expert, row);
#pragma unroll
      for (int index = 0; index < Shape::kTokenUnits * 2; ++index) {
        const int token = place.token_first + index / 2 * kUnitTokens + lane % 4 * 2 + index % 2;
        if (token >= tile.token_count) continue;
        const int token_row = tile.token_first + token;
        store_value(call, token_row, row, total.values[unit][index / 2].values[half * 2 + index % 2],
                    token_scale(call, token_row), metadata);
      }
    }
  }
}

template <class Shape>
__device__ __forceinline__ void share_split(const WarpSums<Shape>& total, float* s_split) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int unit = 0; unit < Shape::kRowUnits; ++unit) {
#pragma unroll
    for (int column = 0; column < Shape::kTokenUnits; ++column) {
#pragma unroll
      for (int index = 0; index < 4; ++index) {
        const int token = column * kUnitTokens + lane % 4 * 2 + index % 2;
        const int row = unit * kUnitRows + index / 2 * 8 + lane / 4;
        s_split[token * Shape::kSplitStride + row] = total.values[unit][column].values[index];
      }
    }
  }
}

template <class Shape>
__device__ __forceinline__ void reduce_splits(const float* s_splits, const PortableGemmCall& call, const GemmPlan& plan,
                                              const GroupTile& tile, int block_unit_first) {
  const int block_rows = plan.row_groups * Shape::kGroupRows;
  for (int index = threadIdx.x; index < block_rows * tile.token_count; index += blockDim.x) {
    const int token = index / block_rows;
    const int place = index % block_rows;
    const int row = block_unit_first * kUnitRows + place;
    if (row >= call.weight.rows) continue;
    const float* s_value = s_splits + place / Shape::kGroupRows * plan.num_splits * Shape::kSplitFloats +
                           token * Shape::kSplitStride + place % Shape::kGroupRows;
    float sum = 0.0F;
    for (int split = 0; split < plan.num_splits; ++split) sum = __fadd_rn(sum, s_value[split * Shape::kSplitFloats]);
    const int token_row = tile.token_first + token;
    store_value(call, token_row, row, sum, token_scale(call, token_row), row_metadata(call, tile.expert, row));
  }
}

template <class Shape>
__device__ __forceinline__ bool find_tokens(const PortableGemmCall& call, const GemmPlan& plan, GroupTile& tile) {
  if (call.tiles == nullptr) {
    tile.token_first = static_cast<int>(blockIdx.y) * Shape::kGroupTokens;
    tile.token_count = min(Shape::kGroupTokens, static_cast<int>(call.num_tokens) - tile.token_first);
    return true;
  }
  const int index = static_cast<int>(blockIdx.y) / plan.tile_parts;
  if (index >= *call.num_tiles) return false;
  const TokenTile tokens = call.tiles[index];
  const int skipped = static_cast<int>(blockIdx.y) % plan.tile_parts * Shape::kGroupTokens;
  tile.expert = tokens.expert;
  tile.token_first = tokens.row_first + skipped;
  tile.token_count = min(Shape::kGroupTokens, tokens.row_count - skipped);
  return tile.token_count > 0;
}

template <class Shape>
__device__ __forceinline__ void fill_ring(const GroupRing<Shape>& ring, const GemmPlan& plan, StageRange stages) {
#pragma unroll
  for (int slot = 0; slot < Shape::kStages - 1; ++slot) {
    if (stages.first + slot < stages.last) ring.copy_tokens(plan, stages.first + slot, slot);
    ptx::cp_async_commit_group();
  }
}

template <class Shape>
__device__ __forceinline__ void accumulate(WarpSums<Shape>& total, const PortableGemmCall& call, const GemmPlan& plan,
                                           const GroupTile& tile, const GroupRing<Shape>& ring, const uint8_t* s_ring,
                                           StageRange stages) {
  constexpr int kFewColumns = (Shape::kTokenUnits + 1) / 2;
  if (Shape::kTokenWarps == 1 && tile.token_count <= kFewColumns * kUnitTokens) {
    multiply_stages<Shape, kFewColumns>(total, call, plan, tile, ring, s_ring, stages);
  } else {
    multiply_stages<Shape, Shape::kTokenUnits>(total, call, plan, tile, ring, s_ring, stages);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kMaxThreads, Shape::kMinBlocks)
    gemm_portable_kernel(const __grid_constant__ PortableGemmCall call, const __grid_constant__ GemmPlan plan) {
  extern __shared__ __align__(128) uint8_t s_memory[];
  const int group = static_cast<int>(threadIdx.x) / Shape::kGroupThreads;
  const int block_unit_first = static_cast<int>(blockIdx.x) * plan.row_groups * Shape::kGroupUnits;
  uint8_t* s_ring = s_memory + group * Shape::kRingBytes;
  GroupTile tile = {0, block_unit_first, 0, 0};
  StageRange stages = {0, plan.num_stages()};
  if constexpr (Shape::kIsSplit) {
    tile.unit_first += group / plan.num_splits * Shape::kGroupUnits;
    stages.first = group % plan.num_splits * plan.split_stages;
    stages.last = min(stages.first + plan.split_stages, stages.last);
  }
  ptx::griddepcontrol_launch_dependents();
  if (call.tiles != nullptr) ptx::griddepcontrol_wait();
  if (!find_tokens<Shape>(call, plan, tile)) return;
  GroupRing<Shape> ring;
  ring.start(s_ring, call.weight, plan, tile);
#pragma unroll
  for (int slot = 0; slot < Shape::kStages - 1; ++slot) {
    if (stages.first + slot < stages.last) ring.copy_weights(plan, stages.first + slot, slot);
  }
  if (call.tiles == nullptr) ptx::griddepcontrol_wait();
  ring.find_rows(call, tile);
  fill_ring<Shape>(ring, plan, stages);
  WarpSums<Shape> total;
  accumulate<Shape>(total, call, plan, tile, ring, s_ring, stages);
  if constexpr (Shape::kIsSplit) {
    __syncthreads();
    auto* s_splits = reinterpret_cast<float*>(s_memory);
    share_split<Shape>(total, s_splits + group * Shape::kSplitFloats);
    __syncthreads();
    reduce_splits<Shape>(s_splits, call, plan, tile, block_unit_first);
  } else {
    store_sums<Shape>(total, call, tile);
  }
}

}
