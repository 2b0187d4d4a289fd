#pragma once

#include "cuda/kernels/gemm/gemm_tile.cuh"

namespace glint::cuda {

constexpr int kPersistentTokens = 128;
constexpr int kStagedRows = 32;

struct TensorTokens {
  static constexpr bool kIsGathered = false;
  static constexpr int kLoadRegisters = 40;
  static constexpr int kMultiplyRegisters = 232;
  static constexpr int kArrivals = 1;
  static constexpr uint64_t kWeightPolicy = ptx::kEvictNormal;

  CUtensorMap map;
};

struct GatheredTokens {
  static constexpr bool kIsGathered = true;
  static constexpr int kLoadRegisters = 72;
  static constexpr int kMultiplyRegisters = 216;
  static constexpr int kArrivals = 5;
  static constexpr uint64_t kWeightPolicy = ptx::kEvictFirst;
};

template <Multiply kMultiplyValue, GemmElement kElementValue, class TokensValue, bool kIsStagedValue>
struct PersistentShape {
  static constexpr Multiply kMultiply = kMultiplyValue;
  using Tokens = TokensValue;
  static constexpr GemmElement kElement = kElementValue;
  static constexpr bool kIsStaged = kIsStagedValue;
  static constexpr int kStages = kIsStaged ? 5 : 7;
  static constexpr int kLoadThreads = 128;
};

template <bool kIsStaged>
struct StagedTile {};

template <>
struct StagedTile<true> {
  alignas(1024) float outs[kGemmTileRows / kStagedRows][kPersistentTokens * kStagedRows];
};

template <class Shape>
struct PersistentStorage {
  alignas(1024) uint8_t weights[Shape::kStages][kGemmTileBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][kPersistentTokens * kGemmTileK];
  [[no_unique_address]] StagedTile<Shape::kIsStaged> staged;
  alignas(8) uint64_t stage_arrived[Shape::kStages];
  alignas(8) uint64_t stage_released[Shape::kStages];
};

template <class Shape>
__device__ __forceinline__ void prepare(PersistentStorage<Shape>& s_storage) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(s_storage.stage_arrived[stage], Shape::Tokens::kArrivals);
      ptx::mbarrier_init(s_storage.stage_released[stage], kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

struct PersistentExpertScheduler {
  static constexpr bool kIsKnownEarly = false;

  int32_t num_row_tiles;
  const TokenTile* token_tiles;
  const int32_t* num_token_tiles;

  __device__ __forceinline__ int num_tiles() const { return num_row_tiles * __ldg(num_token_tiles); }

  __device__ __forceinline__ GemmTile tile(int index) const {
    const int last = __ldg(num_token_tiles) - 1;
    const int place = last - index / num_row_tiles;
    return {even_tile(load(place), load(max(place - 1, 0)), load(min(place + 1, last))), index % num_row_tiles};
  }

  __device__ __forceinline__ int64_t weight_tile(const GemmTile& tile) const {
    return int64_t{tile.tokens.expert} * num_row_tiles + tile.row_tile;
  }

 private:
  __device__ __forceinline__ TokenTile load(int place) const {
    const int4 tile = __ldg(reinterpret_cast<const int4*>(token_tiles) + place);
    return {tile.x, tile.y, tile.z, tile.w};
  }

  static __device__ __forceinline__ int first_share(int count) { return ((count + 1) / 2 + 7) / 8 * 8; }

  static __device__ __forceinline__ TokenTile even_tile(TokenTile tile, const TokenTile& before,
                                                        const TokenTile& after) {
    const int last = tile.row_first + tile.row_count;
    if (before.expert == tile.expert && before.row_first < tile.row_first && tile.row_count < kPersistentTokens) {
      tile.row_first = before.row_first + first_share(last - before.row_first);
      tile.row_count = last - tile.row_first;
    } else if (after.expert == tile.expert && after.row_first > tile.row_first && after.row_count < kPersistentTokens) {
      tile.row_count = first_share(tile.row_count + after.row_count);
    }
    return tile;
  }
};

template <class Shape>
struct PersistentWeights {
  const uint8_t* g_weights;
  int num_steps;
  uint32_t token_bytes;

  __device__ __forceinline__ void load(PersistentStorage<Shape>& s_storage, int64_t weight_tile, int k_step,
                                       int stage) const {
    const uint8_t* g_tile = g_weights + (weight_tile * num_steps + k_step) * kGemmTileBytes;
    ptx::mbarrier_arrive_expect_tx(s_storage.stage_arrived[stage], kGemmTileBytes + token_bytes);
    ptx::cp_async_bulk(s_storage.weights[stage], g_tile, kGemmTileBytes, s_storage.stage_arrived[stage],
                       Shape::Tokens::kWeightPolicy);
  }
};

template <class Shape, class Scheduler>
__device__ __forceinline__ void load_boxes(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                           const TensorTokens& tokens, const Scheduler& scheduler) {
  const int num_steps = inputs.split_steps * inputs.num_splits;
  const auto token_bytes = static_cast<uint32_t>(scheduler.max_tokens * kGemmTileK);
  const PersistentWeights<Shape> weights = {inputs.weights, num_steps, token_bytes};
  const int num_tiles = scheduler.num_tiles();
  const int first_tile = scheduler.tile(blockIdx.x).row_tile;
  int num_early = min(num_steps, Shape::kStages);
  for (int k_step = 0; k_step < num_early; ++k_step) weights.load(s_storage, first_tile, k_step, k_step);
  ptx::griddepcontrol_wait();
  PipelineState<Shape::kStages> ring;
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const GemmTile tile = scheduler.tile(index);
    for (int k_step = 0; k_step < num_steps; ++k_step) {
      ptx::mbarrier_wait_suspended(s_storage.stage_released[ring.stage], ring.phase ^ 1U);
      if (num_early <= 0) weights.load(s_storage, tile.row_tile, k_step, ring.stage);
      --num_early;
      ptx::cp_async_bulk_tensor_load(s_storage.tokens[ring.stage], tokens.map, k_step * kGemmTileK,
                                     tile.tokens.row_first, s_storage.stage_arrived[ring.stage], ptx::kEvictNormal);
      ring.advance();
    }
  }
}

struct RowPasses {
  static constexpr int kRowsPerPass = 16;
  static constexpr int kPasses = kPersistentTokens / kRowsPerPass;

  int r_tokens[kPasses];
  int count;

  __device__ __forceinline__ RowPasses(const GemmInputs& inputs, const TokenTile& tile) { find(inputs, tile); }

  __device__ __forceinline__ void find(const GemmInputs& inputs, const TokenTile& tile) {
    count = tile.row_count;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int place = min(static_cast<int>(threadIdx.x) / 8 + pass * kRowsPerPass, count - 1);
      r_tokens[pass] = __ldg(inputs.row_tokens + tile.row_first + place);
    }
  }
};

struct RowGather {
  const uint8_t* g_chunk;
  uint32_t r_offsets[RowPasses::kPasses];
  int num_passes;

  __device__ __forceinline__ RowGather(const GemmInputs& inputs, const RowPasses& rows)
      : g_chunk(inputs.activations + threadIdx.x % 8 * 16),
        num_passes((rows.count - static_cast<int>(threadIdx.x) / 8 + RowPasses::kRowsPerPass - 1) /
                   RowPasses::kRowsPerPass) {
#pragma unroll
    for (int pass = 0; pass < RowPasses::kPasses; ++pass) {
      r_offsets[pass] = static_cast<uint32_t>(rows.r_tokens[pass]) * static_cast<uint32_t>(inputs.activation_stride);
    }
  }

  __device__ __forceinline__ void load(const uint8_t* s_tokens, int k_step) const {
    const uint32_t row = threadIdx.x / 8;
    const uint32_t target = ptx::shared_address(s_tokens) + row * kGemmTileK + ((threadIdx.x % 8) ^ (row % 8)) * 16;
    const uint8_t* g_source = g_chunk + k_step * kGemmTileK;
#pragma unroll
    for (int pass = 0; pass < RowPasses::kPasses; ++pass) {
      if (pass >= num_passes) continue;
      ptx::cp_async(target + pass * RowPasses::kRowsPerPass * kGemmTileK, g_source + r_offsets[pass]);
    }
  }
};

template <class Shape>
struct GatherSignal {
  static constexpr int kInFlight = 3;

  PipelineState<Shape::kStages> place;
  int num_issued = 0;

  __device__ __forceinline__ void issue(PersistentStorage<Shape>& s_storage) {
    ptx::cp_async_commit_group();
    if (++num_issued <= kInFlight) return;
    ptx::cp_async_wait_group<kInFlight>();
    signal_arrived(s_storage, 1);
  }

  __device__ __forceinline__ void flush(PersistentStorage<Shape>& s_storage) {
    ptx::cp_async_wait_group<0>();
    signal_arrived(s_storage, min(num_issued, kInFlight));
  }

 private:
  __device__ __forceinline__ void signal_arrived(PersistentStorage<Shape>& s_storage, int count) {
    ptx::fence_proxy_async();
    __syncwarp();
    for (int index = 0; index < count; ++index) {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_storage.stage_arrived[place.stage]);
      place.advance();
    }
  }
};

template <class Shape, class Scheduler>
__device__ __forceinline__ void gather_tiles(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                             const Scheduler& scheduler) {
  const int num_steps = inputs.split_steps * inputs.num_splits;
  const PersistentWeights<Shape> weights = {inputs.weights, num_steps, 0};
  const int num_tiles = scheduler.num_tiles();
  if (blockIdx.x >= num_tiles) return;
  PipelineState<Shape::kStages> ring;
  GatherSignal<Shape> signal;
  GemmTile next_tile = scheduler.tile(blockIdx.x);
  RowPasses next_rows(inputs, next_tile.tokens);
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const int64_t weight_tile = scheduler.weight_tile(next_tile);
    const RowGather gather(inputs, next_rows);
    next_tile = scheduler.tile(min(index + static_cast<int>(gridDim.x), num_tiles - 1));
    for (int k_step = 0; k_step < num_steps; ++k_step) {
      ptx::mbarrier_wait_suspended(s_storage.stage_released[ring.stage], ring.phase ^ 1U);
      if (threadIdx.x == 0) weights.load(s_storage, weight_tile, k_step, ring.stage);
      gather.load(s_storage.tokens[ring.stage], k_step);
      signal.issue(s_storage);
      ring.advance();
      if (k_step == 0) next_rows.find(inputs, next_tile.tokens);
    }
  }
  signal.flush(s_storage);
}

template <int kTokens, class Epilogue>
struct TokenScales {
  static constexpr int kParts = (kTokens + 31) / 32;

  float r_scales[kParts];

  __device__ __forceinline__ TokenScales(const Epilogue& epilogue, const GemmTile& tile) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      r_scales[part] = epilogue.token_scale(tile, part * 32 + static_cast<int>(threadIdx.x % 32));
    }
  }

  __device__ __forceinline__ float2 of_group(int group) const {
    const int lane = group % 4 * kFragmentTokens + threadIdx.x % 4 * 2;
    return {__shfl_sync(~0U, r_scales[group / 4], lane), __shfl_sync(~0U, r_scales[group / 4], lane + 1)};
  }
};

template <class Shape, int kTokens, class Epilogue>
__device__ __forceinline__ void stage_values(PersistentStorage<Shape>& s_storage, const Epilogue& epilogue,
                                             const float (&r_total)[kTokens / 2],
                                             const typename Epilogue::RowMetadata& rows,
                                             const TokenScales<kTokens, Epilogue>& scales) {
  const int warpgroup = threadIdx.x / 128 - 1;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int token = lane % 4 * 2;
  float* s_out = s_storage.staged.outs[warpgroup * 2 + warp / 2];
#pragma unroll
  for (int group = 0; group < kTokens / kFragmentTokens; ++group) {
    const float2 pair = scales.of_group(group);
    float* s_group = s_out + group * kFragmentTokens * kStagedRows + lane / 4 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = warp % 2 * 4 + half * 2 + lane / 16;
      const float* r_sums = r_total + group * 4 + half * 2;
      s_group[token * kStagedRows + (chunk ^ token) * 4] = epilogue.value(r_sums[0], pair.x, rows, half);
      s_group[(token + 1) * kStagedRows + (chunk ^ (token + 1)) * 4] = epilogue.value(r_sums[1], pair.y, rows, half);
    }
  }
}

template <class Shape, int kTokens, class Epilogue>
__device__ __forceinline__ void store_staged(PersistentStorage<Shape>& s_storage, const Epilogue& epilogue,
                                             const GemmTile& tile, const float (&r_total)[kTokens / 2],
                                             const typename Epilogue::RowMetadata& rows,
                                             const TokenScales<kTokens, Epilogue>& scales) {
  const int warpgroup = threadIdx.x / 128 - 1;
  const bool issues = threadIdx.x % 128 == 0;
  if (issues) ptx::cp_async_bulk_wait_group_read();
  ptx::bar_sync(2 + warpgroup, 128);
  stage_values<Shape, kTokens>(s_storage, epilogue, r_total, rows, scales);
  ptx::fence_proxy_async();
  ptx::bar_sync(2 + warpgroup, 128);
  if (issues) {
    const int row = tile.row_tile * kGemmTileRows + warpgroup * 64;
    ptx::cp_async_bulk_tensor_store(epilogue.out_map, s_storage.staged.outs[warpgroup * 2], row, tile.tokens.row_first);
    ptx::cp_async_bulk_tensor_store(epilogue.out_map, s_storage.staged.outs[warpgroup * 2 + 1], row + kStagedRows,
                                    tile.tokens.row_first);
    ptx::cp_async_bulk_commit_group();
  }
}

template <class Shape, int kTokens, class Epilogue>
__device__ __forceinline__ void store_direct(const Epilogue& epilogue, const GemmTile& tile,
                                             const float (&r_total)[kTokens / 2],
                                             const typename Epilogue::RowMetadata& rows,
                                             const TokenScales<kTokens, Epilogue>& scales) {
#pragma unroll
  for (int group = 0; group < kTokens / kFragmentTokens; ++group) {
    const int column = group * kFragmentTokens + threadIdx.x % 4 * 2;
    epilogue.store_group(tile, threadIdx.x / 32 - 4, column, r_total + group * 4, rows, scales.of_group(group));
  }
}

template <int kCount>
__device__ __forceinline__ void clear(float (&r_sum)[kCount]) {
#pragma unroll
  for (int index = 0; index < kCount; ++index) r_sum[index] = 0.0F;
}

template <int kCount>
__device__ __forceinline__ void add(float (&r_sum)[kCount], const float (&r_values)[kCount]) {
#pragma unroll
  for (int index = 0; index < kCount; ++index) r_sum[index] = __fadd_rn(r_sum[index], r_values[index]);
}

template <class Shape, int kTokens>
__device__ __forceinline__ void add_split(float (&r_split)[kTokens / 2], PersistentStorage<Shape>& s_storage,
                                          int num_steps, PipelineState<Shape::kStages>& ring) {
  const int warpgroup = threadIdx.x / 128 - 1;
  clear(r_split);
  for (int k_step = 0; k_step < num_steps; ++k_step) {
    using Step = StepMultiply<Shape::kMultiply, Shape::kElement, kTokens>;
    float r_stage[kTokens / 2];
    ptx::mbarrier_wait_suspended(s_storage.stage_arrived[ring.stage], ring.phase);
    Step::start(r_stage, s_storage.weights[ring.stage] + warpgroup * kWarpgroupBytes, s_storage.tokens[ring.stage]);
    Step::template wait<0>(r_stage);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_storage.stage_released[ring.stage]);
    ring.advance();
    add(r_split, r_stage);
  }
}

template <class Shape, int kTokens, class Epilogue>
__device__ __forceinline__ void multiply_persistent_tile(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                                         const Epilogue& epilogue, const GemmTile& tile,
                                                         PipelineState<Shape::kStages>& ring) {
  const TokenScales<kTokens, Epilogue> scales(epilogue, tile);
  float r_total[kTokens / 2];
  add_split<Shape, kTokens>(r_total, s_storage, inputs.split_steps, ring);
  for (int split = 1; split < inputs.num_splits; ++split) {
    float r_split[kTokens / 2];
    add_split<Shape, kTokens>(r_split, s_storage, inputs.split_steps, ring);
    add(r_total, r_split);
  }
  const typename Epilogue::RowMetadata rows = epilogue.row_metadata(tile, threadIdx.x / 32 - 4);
  if constexpr (Shape::kIsStaged) {
    store_staged<Shape, kTokens>(s_storage, epilogue, tile, r_total, rows, scales);
  } else {
    store_direct<Shape, kTokens>(epilogue, tile, r_total, rows, scales);
  }
}

template <class Shape, class Scheduler, class Epilogue>
__device__ __forceinline__ void multiply_persistent_tiles(PersistentStorage<Shape>& s_storage, const GemmInputs& inputs,
                                                          const Scheduler& scheduler, const Epilogue& epilogue) {
  const int num_tiles = scheduler.num_tiles();
  PipelineState<Shape::kStages> ring;
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const GemmTile tile = scheduler.tile(index);
    const int count = tile.tokens.row_count;
    if (count > 112) {
      multiply_persistent_tile<Shape, 128>(s_storage, inputs, epilogue, tile, ring);
    } else if (count > 96) {
      multiply_persistent_tile<Shape, 112>(s_storage, inputs, epilogue, tile, ring);
    } else if (count > 64) {
      multiply_persistent_tile<Shape, 96>(s_storage, inputs, epilogue, tile, ring);
    } else if (count > 32) {
      multiply_persistent_tile<Shape, 64>(s_storage, inputs, epilogue, tile, ring);
    } else {
      multiply_persistent_tile<Shape, 32>(s_storage, inputs, epilogue, tile, ring);
    }
  }
  if constexpr (Shape::kIsStaged) ptx::cp_async_bulk_wait_group();
}

template <class Shape, class Scheduler, class Epilogue>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_persistent_kernel(const __grid_constant__ GemmInputs inputs,
                           const __grid_constant__ typename Shape::Tokens tokens,
                           const __grid_constant__ Scheduler scheduler, const __grid_constant__ Epilogue epilogue) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_storage = *reinterpret_cast<PersistentStorage<Shape>*>(s_bytes);
  prepare(s_storage);
  if (!Scheduler::kIsKnownEarly || threadIdx.x >= Shape::kLoadThreads) ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < Shape::kLoadThreads) {
    if constexpr (Shape::kMultiply == Multiply::kWgmma) ptx::setmaxnreg_dec<Shape::Tokens::kLoadRegisters>();
    if constexpr (Shape::Tokens::kIsGathered) {
      gather_tiles(s_storage, inputs, scheduler);
    } else if (threadIdx.x == 0) {
      load_boxes(s_storage, inputs, tokens, scheduler);
    }
  } else {
    if constexpr (Shape::kMultiply == Multiply::kWgmma) ptx::setmaxnreg_inc<Shape::Tokens::kMultiplyRegisters>();
    multiply_persistent_tiles(s_storage, inputs, scheduler, epilogue);
  }
}

template <class Shape, class Scheduler, class Epilogue>
void launch_gemm_persistent(const GemmInputs& inputs, const typename Shape::Tokens& tokens, const Scheduler& scheduler,
                            const Epilogue& epilogue, int64_t max_tiles, cudaStream_t stream) {
  constexpr int kBytes = sizeof(PersistentStorage<Shape>);
  static_assert(kBytes <= kSharedLimitBytes, "the shared storage is larger than one thread block may have");
  const auto kernel = gemm_persistent_kernel<Shape, Scheduler, Epilogue>;
  static PerDevice thread_blocks;
  const int most = thread_blocks.get([kernel] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return device_multiprocessors();
  });
  launch_dependent(kernel, {static_cast<unsigned>(max_tiles < most ? max_tiles : most), kGemmThreads, kBytes}, stream,
                   inputs, tokens, scheduler, epilogue);
}

}
