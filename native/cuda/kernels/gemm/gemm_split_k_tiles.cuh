#pragma once

#include "cuda/kernels/gemm/gemm_tile.cuh"

namespace glint::cuda {

template <class Shape, class Scheduler>
struct ClusterScheduler {
  SplitKTilesStorage<Shape>& s_storage;
  const Scheduler& scheduler;
  int cluster = static_cast<int>(blockIdx.x) / kClusterSplits;
  int num_clusters = static_cast<int>(gridDim.x) / kClusterSplits;
  GemmTile first_tile = scheduler.tile(cluster);
  int num_tiles = scheduler.num_tiles();

  __device__ __forceinline__ bool is_taker() const { return threadIdx.x == 0 && ptx::cluster_ctarank() == 0; }

  __device__ __forceinline__ uint32_t take() const {
    if constexpr (!Scheduler::kIsKnownEarly) {
      if (is_taker()) return num_clusters + atomicInc(scheduler.tiles_taken, num_tiles - 1);
    }
    return 0;
  }

  __device__ __forceinline__ void signal(uint32_t round, uint32_t taken) const {
    if constexpr (!Scheduler::kIsKnownEarly) {
      for (uint32_t rank = 0; is_taker() && rank < kClusterSplits; ++rank) {
        ptx::st_relaxed_cluster(s_storage.taken_tiles[round % kTakenPlaces], rank, uint64_t{round} << 32U | taken);
      }
    }
  }

  __device__ __forceinline__ int tile_index(uint32_t round) const {
    if (Scheduler::kIsKnownEarly || round == 0) return cluster + static_cast<int>(round) * num_clusters;
    uint64_t signalled = 0;
    while (signalled >> 32U != round) signalled = ptx::ld_relaxed_shared(s_storage.taken_tiles[round % kTakenPlaces]);
    return static_cast<int>(signalled & ~0U);
  }

  __device__ __forceinline__ GemmTile tile(int index) const { return scheduler.tile(min(index, num_tiles - 1)); }
};

template <class Shape>
__device__ __forceinline__ void prepare(SplitKTilesStorage<Shape>& s_storage) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(s_storage.stage_arrived[stage], Shape::kGatherThreads + 1);
      ptx::mbarrier_init(s_storage.stage_released[stage], kConsumerWarps);
    }
    for (int buffer = 0; buffer < Shape::kPartialBuffers; ++buffer) {
      ptx::mbarrier_init(s_storage.partials_arrived[buffer], 1);
      ptx::mbarrier_init(s_storage.partials_released[buffer], kClusterSplits);
    }
    for (uint64_t& taken : s_storage.taken_tiles) taken = 0;
    ptx::fence_mbarrier_init();
    ptx::fence_acq_rel_cluster();
  }
  ptx::barrier_cluster_sync_relaxed();
}

template <class Shape>
struct TokenPasses {
  static constexpr int kTokensPerPass = Shape::kGatherThreads / 8;
  static constexpr int kPasses = (Shape::kMaxTokens + kTokensPerPass - 1) / kTokensPerPass;

  int r_tokens[kPasses];
  int count;

  template <class Scheduler>
  __device__ __forceinline__ void load(const Scheduler& scheduler, const TokenTile& tokens) {
    count = tokens.row_count;
    const int last = max(count, 1) - 1;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      r_tokens[pass] =
          scheduler.token(tokens.row_first + min(static_cast<int>(threadIdx.x) / 8 + pass * kTokensPerPass, last));
    }
  }
};

template <class Shape>
struct TokenGather {
  using Passes = TokenPasses<Shape>;

  const uint8_t* g_rows[Passes::kPasses];
  int first_token;
  int count;
  uint32_t row_offset;

  __device__ __forceinline__ TokenGather(const GemmInputs& inputs, const Passes& passes, int64_t k_first) {
    const int chunk = threadIdx.x % 8;
    first_token = threadIdx.x / 8;
    count = passes.count;
    row_offset = first_token * kGemmTileK + (chunk ^ first_token % 8) * 16;
#pragma unroll
    for (int pass = 0; pass < Passes::kPasses; ++pass) {
      g_rows[pass] = inputs.activations + passes.r_tokens[pass] * inputs.activation_stride + k_first + chunk * 16;
    }
  }

  __device__ __forceinline__ void load(const uint8_t* s_tokens, int k_step) const {
    const uint32_t target = ptx::shared_address(s_tokens) + row_offset;
#pragma unroll
    for (int pass = 0; pass < Passes::kPasses; ++pass) {
      if (first_token + pass * Passes::kTokensPerPass < count) {
        ptx::cp_async(target + pass * Passes::kTokensPerPass * kGemmTileK, g_rows[pass] + k_step * kGemmTileK);
      }
    }
  }
};

template <class Shape>
struct WeightStream {
  const uint8_t* g_first;
  int64_t tile_bytes;
  int num_steps;
  int step_first;

  __device__ __forceinline__ explicit WeightStream(const GemmInputs& inputs)
      : tile_bytes(int64_t{inputs.split_steps} * inputs.num_splits * kGemmTileBytes),
        num_steps(inputs.split_steps),
        step_first(static_cast<int>(ptx::cluster_ctarank()) * inputs.split_steps) {
    g_first = inputs.weights + int64_t{step_first} * kGemmTileBytes;
  }

  __device__ __forceinline__ int num_first() const { return min(num_steps, Shape::kStages); }

  __device__ __forceinline__ void load(SplitKTilesStorage<Shape>& s_storage, int64_t row_tile, int k_step,
                                       int stage) const {
    ptx::mbarrier_arrive_expect_tx(s_storage.stage_arrived[stage], kGemmTileBytes);
    ptx::cp_async_bulk(s_storage.weights[stage], g_first + row_tile * tile_bytes + int64_t{k_step} * kGemmTileBytes,
                       kGemmTileBytes, s_storage.stage_arrived[stage], ptx::kEvictFirst);
  }
};

template <class Scheduler>
__device__ __forceinline__ int64_t weight_tile(const Scheduler& scheduler, const GemmTile& tile) {
  return int64_t{tile.tokens.expert} * scheduler.num_row_tiles + tile.row_tile;
}

template <class Shape>
__device__ __forceinline__ void load_first_weights(SplitKTilesStorage<Shape>& s_storage,
                                                   const WeightStream<Shape>& weights, int64_t weight_tile) {
  for (int k_step = 0; threadIdx.x == 0 && k_step < weights.num_first(); ++k_step) {
    weights.load(s_storage, weight_tile, k_step, k_step);
  }
}

template <class Shape, class Scheduler>
__device__ __forceinline__ void load_tiles(const ClusterScheduler<Shape, Scheduler>& clusters,
                                           const GemmInputs& inputs) {
  SplitKTilesStorage<Shape>& s_storage = clusters.s_storage;
  const Scheduler& scheduler = clusters.scheduler;
  const WeightStream<Shape> weights(inputs);
  const int64_t k_first = int64_t{weights.step_first} * kGemmTileK;
  ptx::griddepcontrol_wait();
  int index = clusters.tile_index(0);
  GemmTile next_tile = clusters.first_tile;
  if (index >= clusters.num_tiles) return;
  if (!Scheduler::kIsKnownEarly) load_first_weights(s_storage, weights, weight_tile(scheduler, next_tile));
  int num_loaded = weights.num_first();
  PipelineState<Shape::kStages> ring;
  TokenPasses<Shape> next_passes;
  next_passes.load(scheduler, next_tile.tokens);
  for (uint32_t round = 0; index < clusters.num_tiles; ++round) {
    const GemmTile tile = next_tile;
    const TokenGather<Shape> gather(inputs, next_passes, k_first);
    const uint32_t taken = clusters.take();
    for (int k_step = 0; k_step < weights.num_steps; ++k_step) {
      if (k_step == weights.num_steps - 2) {
        clusters.signal(round + 1, taken);
        index = clusters.tile_index(round + 1);
        next_tile = clusters.tile(index);
      }
      if (k_step == weights.num_steps - 1) next_passes.load(scheduler, next_tile.tokens);
      ptx::mbarrier_wait_suspended(s_storage.stage_released[ring.stage], ring.phase ^ 1U);
      if (threadIdx.x == 0 && num_loaded <= 0) {
        weights.load(s_storage, weight_tile(scheduler, tile), k_step, ring.stage);
      }
      --num_loaded;
      gather.load(s_storage.tokens[ring.stage], k_step);
      ptx::cp_async_mbarrier_arrive(s_storage.stage_arrived[ring.stage]);
      ring.advance();
    }
  }
}

template <class Shape, int kTokens>
struct Accumulator {
  static constexpr int kRegisters = kTokens / 2;

  float r_sum[kRegisters];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int index = 0; index < kRegisters; ++index) r_sum[index] = 0.0F;
  }

  __device__ __forceinline__ void add(const float (&r_values)[kRegisters]) {
#pragma unroll
    for (int index = 0; index < kRegisters; ++index) r_sum[index] = __fadd_rn(r_sum[index], r_values[index]);
  }

  __device__ __forceinline__ void add_stage(SplitKTilesStorage<Shape>& s_storage, PipelineState<Shape::kStages>& ring,
                                            int warpgroup) {
    using Step = StepMultiply<Shape::kMultiply, Shape::kElement, kTokens>;
    float r_stage[kRegisters];
    ptx::mbarrier_wait_suspended(s_storage.stage_arrived[ring.stage], ring.phase);
    Step::acquire_copied_tokens();
    Step::start(r_stage, s_storage.weights[ring.stage] + warpgroup * kWarpgroupBytes, s_storage.tokens[ring.stage]);
    Step::template wait<0>(r_stage);
    Step::release(s_storage.stage_released[ring.stage], r_stage);
    ring.advance();
    add(r_stage);
  }
};

template <class Shape, int kTokens>
__device__ __forceinline__ void send_partials(SplitKTilesStorage<Shape>& s_storage, const float (&r_sum)[kTokens / 2],
                                              const PipelineState<Shape::kPartialBuffers>& buffer) {
  const int owner = threadIdx.x / 32 - 4;
  const int lane = threadIdx.x % 32;
  const int split = static_cast<int>(ptx::cluster_ctarank());
  const float* s_target =
      s_storage.partials + buffer.stage * Shape::kBufferFloats + split * Shape::kFragmentFloats + lane * 4;
  ptx::mbarrier_wait_suspended(s_storage.partials_released[buffer.stage], buffer.phase ^ 1U);
  const uint32_t target = ptx::mapa(ptx::shared_address(s_target), owner);
  const uint32_t barrier = ptx::mapa(ptx::shared_address(&s_storage.partials_arrived[buffer.stage]), owner);
#pragma unroll
  for (int group = 0; group < kTokens / kFragmentTokens; ++group) {
    ptx::st_async(target + group * 512, r_sum + group * 4, barrier);
  }
}

template <class Shape, int kTokens>
__device__ __forceinline__ void multiply_tile(SplitKTilesStorage<Shape>& s_storage, int num_steps,
                                              PipelineState<Shape::kStages>& ring,
                                              const PipelineState<Shape::kPartialBuffers>& buffer) {
  const int warpgroup = threadIdx.x / 128 - 1;
  Accumulator<Shape, kTokens> split;
  split.clear();
  for (int k_step = 0; k_step < num_steps; ++k_step) split.add_stage(s_storage, ring, warpgroup);
  send_partials<Shape, kTokens>(s_storage, split.r_sum, buffer);
}

template <class Shape, class Scheduler>
__device__ __forceinline__ void multiply_tiles(const ClusterScheduler<Shape, Scheduler>& clusters, int num_steps) {
  SplitKTilesStorage<Shape>& s_storage = clusters.s_storage;
  PipelineState<Shape::kStages> ring;
  PipelineState<Shape::kPartialBuffers> buffer;
  int index = clusters.tile_index(0);
  int count = clusters.first_tile.tokens.row_count;
  for (uint32_t round = 0; index < clusters.num_tiles; buffer.advance()) {
    if (Shape::kMaxTokens <= 8 || count <= 8) {
      multiply_tile<Shape, 8>(s_storage, num_steps, ring, buffer);
    } else if (Shape::kMaxTokens <= 16 || count <= 16) {
      multiply_tile < Shape, Shape::kMaxTokens<16 ? 8 : 16>(s_storage, num_steps, ring, buffer);
    } else if (Shape::kMaxTokens <= 32 || count <= 32) {
      multiply_tile < Shape, Shape::kMaxTokens<32 ? 8 : 32>(s_storage, num_steps, ring, buffer);
    } else {
      multiply_tile < Shape, Shape::kMaxTokens<64 ? 8 : 64>(s_storage, num_steps, ring, buffer);
    }
    index = clusters.tile_index(++round);
    count = clusters.tile(index).tokens.row_count;
  }
}

template <class Shape>
__device__ __forceinline__ void reduce_splits(float (&r_sum)[4], const float* s_partials, int group) {
  const auto* s_fragments = reinterpret_cast<const float4*>(s_partials) + group * 32 + threadIdx.x % 32;
  const float4 first = s_fragments[0];
  r_sum[0] = first.x;
  r_sum[1] = first.y;
  r_sum[2] = first.z;
  r_sum[3] = first.w;
#pragma unroll
  for (int split = 1; split < kClusterSplits; ++split) {
    const float4 values = s_fragments[split * (Shape::kFragmentFloats / 4)];
    r_sum[0] = __fadd_rn(r_sum[0], values.x);
    r_sum[1] = __fadd_rn(r_sum[1], values.y);
    r_sum[2] = __fadd_rn(r_sum[2], values.z);
    r_sum[3] = __fadd_rn(r_sum[3], values.w);
  }
}

template <class Shape, class Scheduler, class Epilogue>
struct TileMetadata {
  typename Epilogue::RowMetadata r_rows;
  float r_token_scale;

  __device__ __forceinline__ TileMetadata(const Scheduler& scheduler, const Epilogue& epilogue, const GemmTile& tile,
                                          int rank, int thread) {
    const bool has_scale = epilogue.token_scales != nullptr && thread < tile.tokens.row_count;
    r_token_scale = has_scale ? __ldcg(epilogue.token_scales + scheduler.token(tile.tokens.row_first + thread)) : 1.0F;
    r_rows = epilogue.row_metadata(tile, rank);
  }
};

template <class Shape, class Scheduler, class Epilogue>
__device__ __forceinline__ void run_epilogue(SplitKTilesStorage<Shape>& s_storage, const Epilogue& epilogue,
                                             const GemmTile& tile,
                                             const TileMetadata<Shape, Scheduler, Epilogue>& metadata, int buffer,
                                             int rank, int num_groups) {
  const int warp = threadIdx.x / 32 % 2;
  const float* s_partials = s_storage.partials + buffer * Shape::kBufferFloats;
  const float* s_scales = s_storage.token_scales[buffer];
  for (int group = warp; group < num_groups; group += 2) {
    float r_sum[4];
    reduce_splits<Shape>(r_sum, s_partials, group);
    const int column = group * kFragmentTokens + threadIdx.x % 4 * 2;
    const float2 scales = {s_scales[column], s_scales[column + 1]};
    epilogue.store_group(tile, rank, column, r_sum, metadata.r_rows, scales);
  }
}

template <class Shape, class Scheduler, class Epilogue>
__device__ __forceinline__ void run_epilogues(const ClusterScheduler<Shape, Scheduler>& clusters,
                                              const Epilogue& epilogue) {
  constexpr int kBarrier = 1;
  SplitKTilesStorage<Shape>& s_storage = clusters.s_storage;
  const Scheduler& scheduler = clusters.scheduler;
  const int rank = static_cast<int>(ptx::cluster_ctarank());
  const int thread = threadIdx.x - Shape::kGatherThreads;
  int index = clusters.tile_index(0);
  GemmTile next_tile = clusters.first_tile;
  if (index >= clusters.num_tiles) return;
  PipelineState<Shape::kPartialBuffers> buffer;
  TileMetadata<Shape, Scheduler, Epilogue> next_metadata(scheduler, epilogue, next_tile, rank, thread);
  for (uint32_t round = 0; index < clusters.num_tiles; ++round, buffer.advance()) {
    const GemmTile tile = next_tile;
    const TileMetadata<Shape, Scheduler, Epilogue> metadata = next_metadata;
    const int num_groups = padded_tokens(tile.tokens.row_count) / kFragmentTokens;
    if (thread == 0) {
      ptx::mbarrier_arrive_expect_tx(s_storage.partials_arrived[buffer.stage], kClusterSplits * num_groups * 512);
    }
    if (thread < Shape::kMaxTokens) s_storage.token_scales[buffer.stage][thread] = metadata.r_token_scale;
    index = clusters.tile_index(round + 1);
    next_tile = clusters.tile(index);
    next_metadata = TileMetadata<Shape, Scheduler, Epilogue>(scheduler, epilogue, next_tile, rank, thread);
    ptx::bar_sync(kBarrier, Shape::kEpilogueThreads);
    ptx::mbarrier_wait_suspended(s_storage.partials_arrived[buffer.stage], buffer.phase);
    run_epilogue(s_storage, epilogue, tile, metadata, buffer.stage, rank, num_groups);
    ptx::bar_sync(kBarrier, Shape::kEpilogueThreads);
    const bool has_successor =
        index < clusters.num_tiles && clusters.tile_index(round + Shape::kPartialBuffers) < clusters.num_tiles;
    if (has_successor && thread < kClusterSplits) {
      ptx::mbarrier_arrive_cluster(s_storage.partials_released[buffer.stage], thread);
    }
  }
}

template <class Shape, class Scheduler, class Epilogue>
__device__ __forceinline__ void play_role(SplitKTilesStorage<Shape>& s_storage, const GemmInputs& inputs,
                                          const Scheduler& scheduler, const Epilogue& epilogue) {
  const ClusterScheduler<Shape, Scheduler> clusters = {s_storage, scheduler};
  if (threadIdx.x >= 128) {
    multiply_tiles(clusters, inputs.split_steps);
  } else if (threadIdx.x < Shape::kGatherThreads) {
    load_tiles(clusters, inputs);
  } else {
    run_epilogues(clusters, epilogue);
  }
}

template <class Shape, class Scheduler, class Epilogue>
__global__ void __launch_bounds__(kGemmThreads, Shape::kBlocksPerMultiprocessor)
    gemm_split_k_tiles_kernel(const __grid_constant__ GemmInputs inputs, const __grid_constant__ Scheduler scheduler,
                              const __grid_constant__ Epilogue epilogue) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_storage = *reinterpret_cast<SplitKTilesStorage<Shape>*>(s_bytes);
  prepare(s_storage);
  if constexpr (Scheduler::kIsKnownEarly) {
    const int first = static_cast<int>(blockIdx.x) / kClusterSplits;
    if (first < scheduler.num_tiles()) {
      load_first_weights(s_storage, WeightStream<Shape>(inputs), weight_tile(scheduler, scheduler.tile(first)));
    }
  }
  if (!Scheduler::kIsKnownEarly || threadIdx.x >= Shape::kGatherThreads) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
  }
  play_role(s_storage, inputs, scheduler, epilogue);
}

template <class Shape, class Scheduler, class Epilogue>
int max_gemm_clusters() {
  static PerDevice count;
  return count.get([] {
    const auto kernel = gemm_split_k_tiles_kernel<Shape, Scheduler, Epilogue>;
    constexpr int kBytes = sizeof(SplitKTilesStorage<Shape>);
    static_assert(kBytes <= kSharedLimitBytes, "the shared storage is larger than one thread block may have");
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const LaunchConfig launch({kClusterSplits, kGemmThreads, kBytes, kClusterSplits}, nullptr);
    int clusters = 0;
    GLINT_CHECK_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config));
    return clusters;
  });
}

template <class Shape, class Scheduler, class Epilogue>
void launch_gemm_split_k_tiles(const GemmInputs& inputs, const Scheduler& scheduler, const Epilogue& epilogue,
                               int64_t max_tiles, cudaStream_t stream) {
  const int64_t most = max_gemm_clusters<Shape, Scheduler, Epilogue>();
  const auto clusters = static_cast<unsigned>(max_tiles < most ? max_tiles : most);
  launch_dependent(gemm_split_k_tiles_kernel<Shape, Scheduler, Epilogue>,
                   {clusters * kClusterSplits, kGemmThreads, sizeof(SplitKTilesStorage<Shape>), kClusterSplits}, stream,
                   inputs, scheduler, epilogue);
}

}
