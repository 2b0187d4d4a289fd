#pragma once

#include "cuda/kernels/gemm/gemm_persistent.cuh"
#include "cuda/kernels/moe/experts.h"

namespace glint::cuda {

template <Multiply kMultiply, class TileType>
struct DownRowsShape : PersistentShape<kMultiply, GemmElement::kE4m3, TensorTokens, true> {
  using Tile = TileType;
  using Steps = WgmmaSteps<Tile::kK>;
  static constexpr int kParts = Steps::kParts;
  static constexpr int kLastSteps = Steps::kSteps - (kParts - 1) * Steps::kPartSteps;
  static constexpr int kTileChunks = Tile::kK / kChunkBytes;
  static constexpr int kPartChunks = kGemmTileK / kChunkBytes;
  static constexpr int kLastChunks = kTileChunks - (kParts - 1) * kPartChunks;
  static constexpr int kColumnBytes = Tile::kRows * kChunkBytes;
  static constexpr int kTileOwners = kGemmTileRows / Tile::kRows;
  static constexpr int kBoxOwners = kTileOwners / 2;
  static constexpr int kBoxTokens = 32;
  static_assert(Steps::kPartSteps * 32 == kGemmTileK, "a part of K is one stage");
  static_assert(kBoxOwners * kColumnBytes == 8 * kCoreMatrixBytes, "a box of weights has the rows of one warp group");
};

struct DownRowsInputs {
  CUtensorMap tokens;
  CUtensorMap whole_parts;
  CUtensorMap last_parts;
  PersistentExpertScheduler scheduler;
  float* routed;
  const float* token_scales;
  const float* row_scales;
  int32_t hidden_size;
  int32_t num_owners;
  int32_t num_steps;

  struct RowMetadata {
    float scales[2];
  };

  __device__ __forceinline__ RowMetadata row_metadata(const GemmTile& tile, int fragment) const {
    const int row = tile.row_tile * kGemmTileRows + fragment * kFragmentRows + static_cast<int>(threadIdx.x) % 32 / 4;
    const float* g_scales = row_scales + int64_t{tile.tokens.expert} * hidden_size + row;
    return {{__ldg(g_scales), __ldg(g_scales + 8)}};
  }

  __device__ __forceinline__ int32_t scale_place(const GemmTile& tile, int column) const {
    return column < tile.tokens.row_count ? tile.tokens.row_first + column : -1;
  }

  __device__ __forceinline__ float token_scale(int32_t place) const {
    return place < 0 ? 1.0F : __ldcg(token_scales + place);
  }

  __device__ __forceinline__ float value(float sum, float token_scale, const RowMetadata& rows, int half) const {
    return __fmul_rn(__fmul_rn(sum, token_scale), rows.scales[half]);
  }
};

template <class Shape>
struct DownRowsLoader {
  PersistentStorage<Shape>& s_storage;
  const DownRowsInputs& inputs;
  PipelineState<Shape::kStages> ring;

  __device__ __forceinline__ void load_part(const GemmTile& tile, int k_step, int part) {
    const bool is_last = part + 1 == Shape::kParts;
    const int chunks = is_last ? Shape::kLastChunks : Shape::kPartChunks;
    const int boxes = (tile.tokens.row_count + Shape::kBoxTokens - 1) / Shape::kBoxTokens;
    const int owner = tile.tokens.expert * inputs.num_owners + tile.row_tile * Shape::kTileOwners;
    uint64_t& s_arrived = s_storage.stage_arrived[ring.stage];
    ptx::mbarrier_wait_suspended(s_storage.stage_released[ring.stage], ring.phase ^ 1U);
    ptx::mbarrier_arrive_expect_tx(
        s_arrived, chunks * Shape::kTileOwners * Shape::kColumnBytes + boxes * Shape::kBoxTokens * kGemmTileK);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::cp_async_bulk_tensor_load(
          s_storage.weights[ring.stage] + half * kWarpgroupBytes, is_last ? inputs.last_parts : inputs.whole_parts, 0,
          owner + half * Shape::kBoxOwners, k_step * Shape::kTileChunks + part * Shape::kPartChunks, s_arrived,
          ptx::kEvictNormal);
    }
    for (int box = 0; box < boxes; ++box) {
      const int first = box * Shape::kBoxTokens;
      ptx::cp_async_bulk_tensor_load(s_storage.tokens[ring.stage] + first * kGemmTileK, inputs.tokens,
                                     k_step * Shape::Tile::kK + part * kGemmTileK, tile.tokens.row_first + first,
                                     s_arrived, ptx::kEvictNormal);
    }
    ring.advance();
  }

  __device__ __forceinline__ void load_tiles() {
    const int num_tiles = inputs.scheduler.num_tiles();
    if (blockIdx.x >= num_tiles) return;
    GemmTile next_tile = inputs.scheduler.tile(blockIdx.x, num_tiles);
    for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
      const GemmTile tile = next_tile;
      next_tile = inputs.scheduler.tile(min(index + static_cast<int>(gridDim.x), num_tiles - 1), num_tiles);
      for (int k_step = 0; k_step < inputs.num_steps; ++k_step) {
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) load_part(tile, k_step, part);
      }
    }
  }
};

template <class Shape>
struct DownRowsMultiply {
  PersistentStorage<Shape>& s_storage;
  const DownRowsInputs& inputs;
  PipelineState<Shape::kStages> ring;

  template <int kTokens, int kSteps>
  __device__ __forceinline__ void add_part(float (&r_total)[kTokens / 2]) {
    using Step = StepMultiply<Shape::kMultiply, GemmElement::kE4m3, kTokens>;
    float r_part[kTokens / 2];
    ptx::mbarrier_wait_suspended(s_storage.stage_arrived[ring.stage], ring.phase);
    Step::template start<kSteps>(r_part, s_storage.weights[ring.stage] + Shape::team() * kWarpgroupBytes,
                                 s_storage.tokens[ring.stage]);
    Step::template wait<0>(r_part);
    Step::release(s_storage.stage_released[ring.stage], r_part);
    ring.advance();
    add_registers(r_total, r_part);
  }

  __device__ __forceinline__ void store_team_rows(const GemmTile& tile) const {
    constexpr int kVectors = Shape::kTeamRows / 4;
    constexpr int kBoxVectors = kStagedRows / 4;
    const int vector = static_cast<int>(threadIdx.x) % kVectors;
    const int first = static_cast<int>(threadIdx.x) % Shape::kTeamThreads / kVectors;
    const float* s_box = s_storage.values.boxes[Shape::team() * Shape::kTeamBoxes + vector / kBoxVectors];
    float* g_row = inputs.routed + int64_t{tile.tokens.row_first} * inputs.hidden_size + tile.row_tile * kGemmTileRows +
                   Shape::team() * Shape::kTeamRows + vector * 4;
#pragma unroll 4
    for (int token = first; token < tile.tokens.row_count; token += Shape::kTeamThreads / kVectors) {
      const float* s_values = s_box + token * kStagedRows + (vector % kBoxVectors ^ token % 8) * 4;
      __stcs(reinterpret_cast<float4*>(g_row + int64_t{token} * inputs.hidden_size),
             *reinterpret_cast<const float4*>(s_values));
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void multiply_tile(const GemmTile& tile) {
    using Tile = ThreadTile<Shape, kTokens>;
    TokenScales<Tile, DownRowsInputs> scales(inputs, tile);
    scales.load(inputs);
    float r_total[Tile::kRegisters];
    clear_registers(r_total);
    for (int k_step = 0; k_step < inputs.num_steps; ++k_step) {
#pragma unroll
      for (int part = 0; part + 1 < Shape::kParts; ++part) add_part<kTokens, Shape::Steps::kPartSteps>(r_total);
      add_part<kTokens, Shape::kLastSteps>(r_total);
    }
    const RowsMetadata<Tile, DownRowsInputs> rows(inputs, tile);
    sync_team<Shape>();
    stage_values<Shape, Tile>(s_storage, inputs, r_total, rows, scales);
    sync_team<Shape>();
    store_team_rows(tile);
  }

  __device__ __forceinline__ void multiply_tiles() {
    const int num_tiles = inputs.scheduler.num_tiles();
    if (blockIdx.x >= num_tiles) return;
    GemmTile next_tile = inputs.scheduler.tile(blockIdx.x, num_tiles);
    for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
      const GemmTile tile = next_tile;
      next_tile = inputs.scheduler.tile(min(index + static_cast<int>(gridDim.x), num_tiles - 1), num_tiles);
      const int count = tile.tokens.row_count;
      if (count > 112) {
        multiply_tile<128>(tile);
      } else if (count > 96) {
        multiply_tile<112>(tile);
      } else if (count > 64) {
        multiply_tile<96>(tile);
      } else if (count > 32) {
        multiply_tile<64>(tile);
      } else {
        multiply_tile<32>(tile);
      }
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    expert_down_rows_kernel(const __grid_constant__ DownRowsInputs inputs) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_storage = *reinterpret_cast<PersistentStorage<Shape>*>(s_bytes);
  prepare(s_storage);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < Shape::kLoadThreads) {
    ptx::setmaxnreg_dec<Shape::Tokens::kLoadRegisters>();
    if (threadIdx.x == 0) DownRowsLoader<Shape>{s_storage, inputs, {}}.load_tiles();
  } else {
    ptx::setmaxnreg_inc<Shape::Tokens::kMultiplyRegisters>();
    DownRowsMultiply<Shape>{s_storage, inputs, {}}.multiply_tiles();
  }
}

template <class Shape>
CUtensorMap down_weight_map(const DownCall& call, int chunks) {
  constexpr auto kWords = static_cast<cuuint64_t>(Shape::kColumnBytes / sizeof(int32_t));
  constexpr auto kBoxOwners = static_cast<cuuint32_t>(Shape::kBoxOwners);
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  const auto owners = static_cast<cuuint64_t>(kMaxLocalExperts * call.hidden_size / Shape::Tile::kRows);
  const auto columns = static_cast<cuuint64_t>(call.width / kChunkBytes);
  const cuuint64_t sizes[3] = {kWords, owners, columns};
  const cuuint64_t strides[2] = {columns * Shape::kColumnBytes, Shape::kColumnBytes};
  const cuuint32_t box[3] = {kWords, kBoxOwners, static_cast<cuuint32_t>(chunks)};
  const cuuint32_t element_steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_INT32, 3, const_cast<uint8_t*>(call.packed_weights), sizes, strides, box,
             element_steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require_argument(result == CUDA_SUCCESS, "the driver refuses a tensor map of down's tiles of ", call.hidden_size,
                   " rows by ", call.width, "; packed weights must start at a multiple of 16 bytes");
  return map;
}

template <class Shape>
CUtensorMap down_token_map(const DownCall& call, const QuantisedRows& rows) {
  return make_tensor_map(rows.fp8, {.type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                    .columns = static_cast<cuuint64_t>(call.width),
                                    .rows = static_cast<cuuint64_t>(call.max_rows),
                                    .row_bytes = static_cast<cuuint64_t>(call.width),
                                    .box_columns = kGemmTileK,
                                    .box_rows = Shape::kBoxTokens});
}

template <class Shape>
void launch_down_rows(const DownCall& call, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PersistentStorage<Shape>);
  static_assert(kBytes <= kSharedLimitBytes, "the shared storage is larger than one thread block may have");
  const auto kernel = expert_down_rows_kernel<Shape>;
  static PerDevice thread_blocks;
  const int blocks = thread_blocks.get([kernel] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return device_multiprocessors();
  });
  const auto hidden_size = static_cast<int32_t>(call.hidden_size);
  const auto width = static_cast<int32_t>(call.width);
  const QuantisedRows rows = QuantisedRows::in(call.packed_tiles, call.max_rows, call.width);
  const DownRowsInputs inputs = {
      .tokens = down_token_map<Shape>(call, rows),
      .whole_parts = down_weight_map<Shape>(call, Shape::kPartChunks),
      .last_parts = down_weight_map<Shape>(call, Shape::kLastChunks),
      .scheduler = {hidden_size / kGemmTileRows, call.grouped.gate_up_tiles, call.grouped.num_gate_up_tiles},
      .routed = call.routed,
      .token_scales = rows.scales,
      .row_scales = call.row_scales,
      .hidden_size = hidden_size,
      .num_owners = hidden_size / Shape::Tile::kRows,
      .num_steps = width / Shape::Tile::kK};
  launch_quantise_rows({rows, call.hidden, call.grouped.num_rows, call.max_rows, width}, stream);
  launch_dependent(kernel, {static_cast<unsigned>(blocks), Shape::kThreads, kBytes}, stream, inputs);
  launch_sum_rows({.out = call.out,
                   .routed = call.routed,
                   .row_weights = call.grouped.row_weights,
                   .token_rows = call.grouped.token_rows,
                   .num_tokens = call.num_tokens,
                   .hidden_size = hidden_size,
                   .rows_per_token = static_cast<int32_t>(call.max_rows / call.num_tokens)},
                  stream);
}

}
