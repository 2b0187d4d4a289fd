#pragma once

#include "cuda/kernels/gemm/gemm_persistent_load.cuh"

namespace glint::cuda {

template <class Tile, class Epilogue>
struct TokenScales {
  static constexpr int kParts = (Tile::kGroups + 3) / 4;

  int32_t r_places[kParts];
  float r_scales[kParts];

  __device__ __forceinline__ TokenScales(const Epilogue& epilogue, const GemmTile& tile) {
    const int first = Tile::group_first() * kFragmentTokens + static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int part = 0; part < kParts; ++part) r_places[part] = epilogue.scale_place(tile, first + part * 32);
  }

  __device__ __forceinline__ void load(const Epilogue& epilogue) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) r_scales[part] = epilogue.token_scale(r_places[part]);
  }

  __device__ __forceinline__ float2 of_group(int group) const {
    const int lane = group % 4 * kFragmentTokens + threadIdx.x % 4 * 2;
    return {__shfl_sync(~0U, r_scales[group / 4], lane), __shfl_sync(~0U, r_scales[group / 4], lane + 1)};
  }
};

template <class Tile, class Epilogue>
struct RowsMetadata {
  typename Epilogue::RowMetadata of_fragment[Tile::kFragments];

  __device__ __forceinline__ RowsMetadata(const Epilogue& epilogue, const GemmTile& tile) {
#pragma unroll
    for (int fragment = 0; fragment < Tile::kFragments; ++fragment) {
      of_fragment[fragment] = epilogue.row_metadata(tile, Tile::fragment_first() + fragment);
    }
  }
};

template <class Shape>
__device__ __forceinline__ bool is_storing_thread() {
  return threadIdx.x % Shape::kTeamThreads == 0;
}

template <class Shape>
__device__ __forceinline__ void sync_team() {
  ptx::bar_sync(2 + Shape::team(), Shape::kTeamThreads);
}

template <class Shape>
__device__ __forceinline__ void wait_until_boxes_are_stored() {
  if (is_storing_thread<Shape>()) ptx::cp_async_bulk_wait_group_read();
  sync_team<Shape>();
}

template <class Shape, class Tile, class Epilogue>
__device__ __forceinline__ void stage_values(PersistentStorage<Shape>& s_storage, const Epilogue& epilogue,
                                             const float (&r_total)[Tile::kRegisters],
                                             const RowsMetadata<Tile, Epilogue>& rows,
                                             const TokenScales<Tile, Epilogue>& scales) {
  const int lane = threadIdx.x % 32;
  const int token = lane % 4 * 2;
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group) {
    const float2 pair = scales.of_group(group);
#pragma unroll
    for (int fragment = 0; fragment < Tile::kFragments; ++fragment) {
      const uint32_t place = Tile::fragment_first() + fragment;
      float* s_group = s_storage.values.boxes[place / 2] +
                       (Tile::group_first() + group) * kFragmentTokens * kStagedRows + lane / 4 % 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = static_cast<int>(place % 2) * 4 + half * 2 + lane / 16;
        const float* r_sums = r_total + (fragment * Tile::kGroups + group) * 4 + half * 2;
        const auto& metadata = rows.of_fragment[fragment];
        s_group[token * kStagedRows + (chunk ^ token) * 4] = epilogue.value(r_sums[0], pair.x, metadata, half);
        s_group[(token + 1) * kStagedRows + (chunk ^ (token + 1)) * 4] =
            epilogue.value(r_sums[1], pair.y, metadata, half);
      }
    }
  }
}

template <class Shape, class Tile, class Epilogue>
__device__ __forceinline__ void store_staged(PersistentStorage<Shape>& s_storage, const Epilogue& epilogue,
                                             const GemmTile& tile, const float (&r_total)[Tile::kRegisters],
                                             const RowsMetadata<Tile, Epilogue>& rows,
                                             const TokenScales<Tile, Epilogue>& scales) {
  wait_until_boxes_are_stored<Shape>();
  stage_values<Shape, Tile>(s_storage, epilogue, r_total, rows, scales);
  ptx::fence_proxy_async();
  sync_team<Shape>();
  if (is_storing_thread<Shape>()) {
    const int first = Shape::team() * Shape::kTeamBoxes;
    const int row = tile.row_tile * kGemmTileRows + first * kStagedRows;
#pragma unroll
    for (int box = 0; box < Shape::kTeamBoxes; ++box) {
      ptx::cp_async_bulk_tensor_store(epilogue.out_map, s_storage.values.boxes[first + box], row + box * kStagedRows,
                                      tile.tokens.row_first);
    }
    ptx::cp_async_bulk_commit_group();
  }
}

template <class Tile, class Epilogue>
__device__ __forceinline__ void store_direct(const Epilogue& epilogue, const GemmTile& tile,
                                             const float (&r_total)[Tile::kRegisters],
                                             const RowsMetadata<Tile, Epilogue>& rows,
                                             const TokenScales<Tile, Epilogue>& scales) {
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group) {
    const int column = (Tile::group_first() + group) * kFragmentTokens + threadIdx.x % 4 * 2;
    const float2 pair = scales.of_group(group);
#pragma unroll
    for (int fragment = 0; fragment < Tile::kFragments; ++fragment) {
      epilogue.store_group(tile, Tile::fragment_first() + fragment, column,
                           r_total + (fragment * Tile::kGroups + group) * 4, rows.of_fragment[fragment], pair);
    }
  }
}

struct NoLoader {};

template <class Shape, int kTokens, Multiply kMultiply = Shape::kMultiply>
struct PersistentMultiply;

template <class Shape, int kTokens>
struct PersistentMultiply<Shape, kTokens, Multiply::kWgmma> {
  using Tile = ThreadTile<Shape, kTokens>;
  using Step = StepMultiply<Multiply::kWgmma, Shape::kElement, kTokens>;

  PersistentStorage<Shape>& s_storage;
  PipelineState<Shape::kStages>& ring;

  __device__ __forceinline__ void add_split(float (&r_split)[Tile::kRegisters], int num_steps) const {
    clear_registers(r_split);
    for (int k_step = 0; k_step < num_steps; ++k_step) {
      float r_stage[Tile::kRegisters];
      ptx::mbarrier_wait_suspended(s_storage.stage_arrived[ring.stage], ring.phase);
      Step::start(r_stage, s_storage.weights[ring.stage] + Shape::team() * kWarpgroupBytes,
                  s_storage.tokens[ring.stage]);
      Step::template wait<0>(r_stage);
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_storage.stage_released[ring.stage]);
      ring.advance();
      add_registers(r_split, r_stage);
    }
  }

  template <class Scales, class Epilogue>
  __device__ __forceinline__ void sum_splits(float (&r_total)[Tile::kRegisters], const GemmInputs& inputs, NoLoader&,
                                             Scales& scales, const Epilogue& epilogue) const {
    add_split(r_total, inputs.split_steps);
    scales.load(epilogue);
    for (int split = 1; split < inputs.num_splits; ++split) {
      float r_split[Tile::kRegisters];
      add_split(r_split, inputs.split_steps);
      add_registers(r_total, r_split);
    }
  }
};

template <class Shape, int kTokens>
struct PersistentMultiply<Shape, kTokens, Multiply::kMmaSync> {
  using Tile = ThreadTile<Shape, kTokens>;
  using Pair = MmaChunkPair<Shape::kElement, Tile::kFragments, Tile::kGroups>;
  static constexpr int kPairBytes = 2 * kChunkBytes;
  static constexpr int kPairs = kGemmTileK / kPairBytes;
  static constexpr int kChunkStride = kWarpgroupBytes / (kGemmTileK / kChunkBytes);
  static_assert(kPairs % 2 == 0, "the first pair of the next stage takes the registers of an even pair");

  PersistentStorage<Shape>& s_storage;
  PipelineState<Shape::kStages>& ring;
  Pair r_pairs[2];

  __device__ __forceinline__ PersistentMultiply(PersistentStorage<Shape>& storage, PipelineState<Shape::kStages>& state)
      : s_storage(storage), ring(state) {}

  __device__ __forceinline__ void load_pair(int pair) {
    const int row = Tile::fragment_first() * kFragmentRows;
    const int token = Tile::group_first() * kFragmentTokens;
    const uint32_t rows = ptx::shared_address(s_storage.weights[ring.stage]) + row / 64 * kWarpgroupBytes +
                          row % 64 / 8 * kCoreMatrixBytes + pair * 2 * kChunkStride;
    const uint32_t tokens = ptx::shared_address(s_storage.tokens[ring.stage]) + token * kGemmTileK;
    r_pairs[pair % 2].load(MmaOperands<Shape::kElement>::lane_of_rows(rows, kChunkStride),
                           Pair::lane_of_tokens(tokens) ^ pair * kPairBytes);
  }

  __device__ __forceinline__ void begin_stage() {
    ptx::mbarrier_wait_suspended(s_storage.stage_arrived[ring.stage], ring.phase);
    load_pair(0);
  }

  template <class Loader>
  __device__ __forceinline__ void end_stage(Loader& loader, bool has_next) {
    r_pairs[(kPairs - 1) % 2].wait_until_loaded();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_storage.stage_released[ring.stage]);
    ring.advance();
    if (has_next) begin_stage();
    loader.load_next();
  }

  template <class Loader>
  __device__ __forceinline__ void multiply_stage(float (&r_stage)[Tile::kRegisters], Loader& loader, bool has_next) {
    clear_registers(r_stage);
#pragma unroll
    for (int pair = 0; pair + 1 < kPairs; ++pair) {
      load_pair(pair + 1);
#pragma unroll
      for (int step = 0; step < Pair::kSteps; ++step) r_pairs[pair % 2].add_step(r_stage, step);
    }
    const Pair& r_last = r_pairs[(kPairs - 1) % 2];
#pragma unroll
    for (int step = 0; step + 1 < Pair::kSteps; ++step) r_last.add_step(r_stage, step);
    end_stage(loader, has_next);
    r_last.add_step(r_stage, Pair::kSteps - 1);
  }

  template <class Loader>
  __device__ __forceinline__ void add_stage(float (&r_split)[Tile::kRegisters], Loader& loader, bool has_next) {
    float r_stage[Tile::kRegisters];
    multiply_stage(r_stage, loader, has_next);
    add_registers(r_split, r_stage);
  }

  __device__ __forceinline__ float4* shared_totals() const {
    return reinterpret_cast<float4*>(s_storage.values.boxes[Shape::team()]) + threadIdx.x % Shape::kTeamThreads;
  }

  __device__ __forceinline__ void keep_total(const float (&r_total)[Tile::kRegisters]) const {
    float4* s_totals = shared_totals();
#pragma unroll
    for (int index = 0; index < Tile::kRegisters; index += 4) {
      s_totals[index / 4 * Shape::kTeamThreads] = {r_total[index], r_total[index + 1], r_total[index + 2],
                                                   r_total[index + 3]};
    }
  }

  __device__ __forceinline__ void add_kept_total(float (&r_split)[Tile::kRegisters]) const {
    const float4* s_totals = shared_totals();
#pragma unroll
    for (int index = 0; index < Tile::kRegisters; index += 4) {
      const float4 total = s_totals[index / 4 * Shape::kTeamThreads];
      r_split[index] = __fadd_rn(total.x, r_split[index]);
      r_split[index + 1] = __fadd_rn(total.y, r_split[index + 1]);
      r_split[index + 2] = __fadd_rn(total.z, r_split[index + 2]);
      r_split[index + 3] = __fadd_rn(total.w, r_split[index + 3]);
    }
  }

  template <class Loader, class Scales, class Epilogue>
  __device__ __forceinline__ void sum_splits(float (&r_total)[Tile::kRegisters], const GemmInputs& inputs,
                                             Loader& loader, Scales& scales, const Epilogue& epilogue) {
    int num_left = inputs.split_steps * inputs.num_splits;
    begin_stage();
    for (int split = 0;; ++split) {
      multiply_stage(r_total, loader, --num_left > 0);
      for (int k_step = 1; k_step < inputs.split_steps; ++k_step) add_stage(r_total, loader, --num_left > 0);
      if (split > 0) {
        add_kept_total(r_total);
      } else {
        scales.load(epilogue);
      }
      if (num_left == 0) return;
      if (Shape::kIsStaged && split == 0) wait_until_boxes_are_stored<Shape>();
      keep_total(r_total);
    }
  }
};

template <class Shape, int kTokens, class Loader, class Epilogue>
__device__ __forceinline__ void multiply_persistent_tile(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                                         const Epilogue& epilogue, const GemmTile& tile,
                                                         PipelineState<Shape::kStages>& ring, Loader& loader) {
  using Tile = ThreadTile<Shape, kTokens>;
  TokenScales<Tile, Epilogue> scales(epilogue, tile);
  float r_total[Tile::kRegisters];
  PersistentMultiply<Shape, kTokens>{s_storage, ring}.sum_splits(r_total, inputs, loader, scales, epilogue);
  const RowsMetadata<Tile, Epilogue> rows(epilogue, tile);
  if constexpr (Shape::kIsStaged) {
    store_staged<Shape, Tile>(s_storage, epilogue, tile, r_total, rows, scales);
  } else {
    store_direct<Tile>(epilogue, tile, r_total, rows, scales);
  }
}

template <class Shape, class Scheduler, class Epilogue, class Loader>
__device__ __forceinline__ void multiply_persistent_tiles(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                                          const Scheduler& scheduler, const Epilogue& epilogue,
                                                          Loader& loader) {
  const int num_tiles = scheduler.num_tiles();
  if (blockIdx.x >= num_tiles) return;
  PipelineState<Shape::kStages> ring;
  GemmTile next_tile = scheduler.tile(blockIdx.x, num_tiles);
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const GemmTile tile = next_tile;
    next_tile = scheduler.tile(min(index + static_cast<int>(gridDim.x), num_tiles - 1), num_tiles);
    const int count = tile.tokens.row_count;
    if (count > 112) {
      multiply_persistent_tile<Shape, 128>(s_storage, inputs, epilogue, tile, ring, loader);
    } else if (count > 96) {
      multiply_persistent_tile<Shape, 112>(s_storage, inputs, epilogue, tile, ring, loader);
    } else if (count > 64) {
      multiply_persistent_tile<Shape, 96>(s_storage, inputs, epilogue, tile, ring, loader);
    } else if (count > 32) {
      multiply_persistent_tile<Shape, 64>(s_storage, inputs, epilogue, tile, ring, loader);
    } else {
      multiply_persistent_tile<Shape, 32>(s_storage, inputs, epilogue, tile, ring, loader);
    }
  }
  if constexpr (Shape::kIsStaged) ptx::cp_async_bulk_wait_group();
}

template <class Shape, class Scheduler, class Epilogue>
__device__ __forceinline__ void play_roles(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                           const typename Shape::Tokens& tokens, const Scheduler& scheduler,
                                           const Epilogue& epilogue) {
  if (!Scheduler::kIsKnownEarly || threadIdx.x >= Shape::kLoadThreads) ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < Shape::kLoadThreads) {
    ptx::setmaxnreg_dec<Shape::Tokens::kLoadRegisters>();
    if constexpr (Shape::Tokens::kIsGathered) {
      gather_tiles(s_storage, inputs, scheduler);
    } else if (threadIdx.x == 0) {
      load_boxes(s_storage, inputs, tokens, scheduler);
    }
  } else {
    ptx::setmaxnreg_inc<Shape::Tokens::kMultiplyRegisters>();
    NoLoader loader;
    multiply_persistent_tiles(s_storage, inputs, scheduler, epilogue, loader);
  }
}

template <class Shape, class Scheduler, class Epilogue>
__device__ __forceinline__ void load_and_multiply(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                                  const typename Shape::Tokens& tokens, const Scheduler& scheduler,
                                                  const Epilogue& epilogue) {
  if (!Scheduler::kIsKnownEarly) ptx::griddepcontrol_wait();
  if (blockIdx.x >= scheduler.num_tiles()) return;
  StageLoader<Shape, Scheduler> loader(s_storage, inputs, tokens, scheduler);
  ptx::griddepcontrol_launch_dependents();
  multiply_persistent_tiles(s_storage, inputs, scheduler, epilogue, loader);
}

template <class Shape, class Scheduler, class Epilogue>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    gemm_persistent_kernel(const __grid_constant__ GemmInputs inputs,
                           const __grid_constant__ typename Shape::Tokens tokens,
                           const __grid_constant__ Scheduler scheduler, const __grid_constant__ Epilogue epilogue) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_storage = *reinterpret_cast<PersistentStorage<Shape>*>(s_bytes);
  prepare(s_storage);
  if constexpr (Shape::kMultiply == Multiply::kWgmma) {
    play_roles(s_storage, inputs, tokens, scheduler, epilogue);
  } else {
    load_and_multiply(s_storage, inputs, tokens, scheduler, epilogue);
  }
}

template <class Shape, class Scheduler, class Epilogue>
void launch_gemm_persistent(const GemmInputs& inputs, const typename Shape::Tokens& tokens, const Scheduler& scheduler,
                            const Epilogue& epilogue, int64_t max_tiles, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PersistentStorage<Shape>);
  static_assert(kBytes <= kSharedLimitBytes, "the shared storage is larger than one thread block may have");
  if constexpr (Shape::kHasRowOffsets) {
    require_argument(inputs.split_steps * inputs.num_splits >= 3 * kConsumerWarps,
                     "rows are gathered for tiles of at least ", 3 * kConsumerWarps, " steps of K, not of ",
                     inputs.split_steps * inputs.num_splits);
  }
  const auto kernel = gemm_persistent_kernel<Shape, Scheduler, Epilogue>;
  static PerDevice thread_blocks;
  const int most = thread_blocks.get([kernel] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return device_multiprocessors();
  });
  launch_dependent(kernel, {static_cast<unsigned>(max_tiles < most ? max_tiles : most), Shape::kThreads, kBytes},
                   stream, inputs, tokens, scheduler, epilogue);
}

}
