#pragma once

#include "cuda/kernels/gemm/gemm_tile.cuh"

namespace glint::cuda {

template <class Shape, class Walk>
struct TileTurns {
  SharedPlan<Shape>& s_plan;
  const Walk& walk;
  int cluster = static_cast<int>(blockIdx.x) / kSpreadPieces;
  int num_clusters = static_cast<int>(gridDim.x) / kSpreadPieces;
  ProductTile first_tile = walk.tile(cluster);
  int num_tiles = walk.num_tiles();

  __device__ __forceinline__ bool is_taker() const { return threadIdx.x == 0 && ptx::cluster_ctarank() == 0; }

  __device__ __forceinline__ uint32_t take() const {
    if constexpr (!Walk::kIsKnownEarly) {
      if (is_taker()) return num_clusters + atomicInc(walk.tiles_taken, num_tiles - 1);
    }
    return 0;
  }

  __device__ __forceinline__ void tell(uint32_t turn, uint32_t taken) const {
    if constexpr (!Walk::kIsKnownEarly) {
      for (uint32_t rank = 0; is_taker() && rank < kSpreadPieces; ++rank) {
        ptx::st_relaxed_cluster(s_plan.taken_tiles[turn % kTakenPlaces], rank, uint64_t{turn} << 32U | taken);
      }
    }
  }

  __device__ __forceinline__ int tile_index(uint32_t turn) const {
    if (Walk::kIsKnownEarly || turn == 0) return cluster + static_cast<int>(turn) * num_clusters;
    uint64_t told = 0;
    while (told >> 32U != turn) told = ptx::ld_relaxed_shared(s_plan.taken_tiles[turn % kTakenPlaces]);
    return static_cast<int>(told & ~0U);
  }

  __device__ __forceinline__ ProductTile tile(int index) const { return walk.tile(min(index, num_tiles - 1)); }
};

template <class Shape>
__device__ __forceinline__ void prepare(SharedPlan<Shape>& s_plan) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(s_plan.stage_arrived[stage], Shape::kGatherThreads + 1);
      ptx::mbarrier_init(s_plan.stage_released[stage], kConsumerWarps);
    }
    for (int buffer = 0; buffer < Shape::kPartialBuffers; ++buffer) {
      ptx::mbarrier_init(s_plan.partials_arrived[buffer], 1);
      ptx::mbarrier_init(s_plan.partials_released[buffer], kSpreadPieces);
    }
    for (uint64_t& taken : s_plan.taken_tiles) taken = 0;
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

  template <class Walk>
  __device__ __forceinline__ void load(const Walk& walk, const TokenTile& tokens) {
    count = tokens.row_count;
    const int last = max(count, 1) - 1;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      r_tokens[pass] =
          walk.token(tokens.row_first + min(static_cast<int>(threadIdx.x) / 8 + pass * kTokensPerPass, last));
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

  __device__ __forceinline__ TokenGather(const ProductInputs& inputs, const Passes& passes, int64_t k_first) {
    const int chunk = threadIdx.x % 8;
    first_token = threadIdx.x / 8;
    count = passes.count;
    row_offset = first_token * kProductTileK + (chunk ^ first_token % 8) * 16;
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
        ptx::cp_async(target + pass * Passes::kTokensPerPass * kProductTileK,
                            g_rows[pass] + k_step * kProductTileK);
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

  __device__ __forceinline__ explicit WeightStream(const ProductInputs& inputs)
      : tile_bytes(int64_t{inputs.piece_steps} * inputs.num_pieces * kProductTileBytes),
        num_steps(inputs.piece_steps),
        step_first(static_cast<int>(ptx::cluster_ctarank()) * inputs.piece_steps) {
    g_first = inputs.weights + int64_t{step_first} * kProductTileBytes;
  }

  __device__ __forceinline__ int num_first() const { return min(num_steps, Shape::kStages); }

  __device__ __forceinline__ void load(SharedPlan<Shape>& s_plan, int64_t row_tile, int k_step, int stage) const {
    ptx::mbarrier_arrive_expect_tx(s_plan.stage_arrived[stage], kProductTileBytes);
    ptx::cp_async_bulk(s_plan.weights[stage],
                                               g_first + row_tile * tile_bytes + int64_t{k_step} * kProductTileBytes,
                                               kProductTileBytes, s_plan.stage_arrived[stage], ptx::kEvictFirst);
  }
};

template <class Walk>
__device__ __forceinline__ int64_t weight_tile(const Walk& walk, const ProductTile& tile) {
  return int64_t{tile.tokens.expert} * walk.num_row_tiles + tile.row_tile;
}

template <class Shape>
__device__ __forceinline__ void load_first_weights(SharedPlan<Shape>& s_plan, const WeightStream<Shape>& weights,
                                                   int64_t weight_tile) {
  for (int k_step = 0; threadIdx.x == 0 && k_step < weights.num_first(); ++k_step) {
    weights.load(s_plan, weight_tile, k_step, k_step);
  }
}

template <class Shape, class Walk>
__device__ __forceinline__ void load_tiles(const TileTurns<Shape, Walk>& turns, const ProductInputs& inputs) {
  SharedPlan<Shape>& s_plan = turns.s_plan;
  const Walk& walk = turns.walk;
  const WeightStream<Shape> weights(inputs);
  const int64_t k_first = int64_t{weights.step_first} * kProductTileK;
  ptx::griddepcontrol_wait();
  int index = turns.tile_index(0);
  ProductTile next_tile = turns.first_tile;
  if (index >= turns.num_tiles) return;
  if (!Walk::kIsKnownEarly) load_first_weights(s_plan, weights, weight_tile(walk, next_tile));
  int num_loaded = weights.num_first();
  PipelineState<Shape::kStages> ring;
  TokenPasses<Shape> next_passes;
  next_passes.load(walk, next_tile.tokens);
  for (uint32_t turn = 0; index < turns.num_tiles; ++turn) {
    const ProductTile tile = next_tile;
    const TokenGather<Shape> gather(inputs, next_passes, k_first);
    const uint32_t taken = turns.take();
    for (int k_step = 0; k_step < weights.num_steps; ++k_step) {
      if (k_step == weights.num_steps - 2) {
        turns.tell(turn + 1, taken);
        index = turns.tile_index(turn + 1);
        next_tile = turns.tile(index);
      }
      if (k_step == weights.num_steps - 1) next_passes.load(walk, next_tile.tokens);
      ptx::mbarrier_wait_suspended(s_plan.stage_released[ring.stage], ring.phase ^ 1U);
      if (threadIdx.x == 0 && num_loaded <= 0) weights.load(s_plan, weight_tile(walk, tile), k_step, ring.stage);
      --num_loaded;
      gather.load(s_plan.tokens[ring.stage], k_step);
      ptx::cp_async_mbarrier_arrive(s_plan.stage_arrived[ring.stage]);
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

  __device__ __forceinline__ void add_stage(SharedPlan<Shape>& s_plan, PipelineState<Shape::kStages>& ring, int warpgroup) {
    float r_stage[kRegisters];
    const uint64_t rows = ptx::wgmma_descriptor(
        ptx::shared_address(s_plan.weights[ring.stage]) + warpgroup * kWarpgroupBytes, 1024, 128);
    const uint64_t tokens = ptx::wgmma_descriptor_swizzle_128b(ptx::shared_address(s_plan.tokens[ring.stage]), 0, 1024);
    ptx::mbarrier_wait_suspended(s_plan.stage_arrived[ring.stage], ring.phase);
    ptx::fence_proxy_async();
    start_step<Shape::kElement, kTokens>(r_stage, rows, tokens);
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(r_stage);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s_plan.stage_released[ring.stage]);
    ring.advance();
    add(r_stage);
  }
};

template <class Shape, int kTokens>
__device__ __forceinline__ void send_partials(SharedPlan<Shape>& s_plan, const float (&r_sum)[kTokens / 2],
                                              const PipelineState<Shape::kPartialBuffers>& buffer) {
  const int owner = threadIdx.x / 32 - 4;
  const int lane = threadIdx.x % 32;
  const int piece = static_cast<int>(ptx::cluster_ctarank());
  const float* s_target =
      s_plan.partials + buffer.stage * Shape::kBufferFloats + piece * Shape::kFragmentFloats + lane * 4;
  ptx::mbarrier_wait_suspended(s_plan.partials_released[buffer.stage], buffer.phase ^ 1U);
  const uint32_t target = ptx::mapa(ptx::shared_address(s_target), owner);
  const uint32_t barrier =
      ptx::mapa(ptx::shared_address(&s_plan.partials_arrived[buffer.stage]), owner);
#pragma unroll
  for (int group = 0; group < kTokens / kFragmentTokens; ++group) {
    ptx::st_async(target + group * 512, r_sum + group * 4, barrier);
  }
}

template <class Shape, int kTokens>
__device__ __forceinline__ void multiply_tile(SharedPlan<Shape>& s_plan, int num_steps, PipelineState<Shape::kStages>& ring,
                                              const PipelineState<Shape::kPartialBuffers>& buffer) {
  const int warpgroup = threadIdx.x / 128 - 1;
  Accumulator<Shape, kTokens> piece;
  piece.clear();
  for (int k_step = 0; k_step < num_steps; ++k_step) piece.add_stage(s_plan, ring, warpgroup);
  send_partials<Shape, kTokens>(s_plan, piece.r_sum, buffer);
}

template <class Shape, class Walk>
__device__ __forceinline__ void multiply_tiles(const TileTurns<Shape, Walk>& turns, int num_steps) {
  SharedPlan<Shape>& s_plan = turns.s_plan;
  PipelineState<Shape::kStages> ring;
  PipelineState<Shape::kPartialBuffers> buffer;
  int index = turns.tile_index(0);
  int count = turns.first_tile.tokens.row_count;
  for (uint32_t turn = 0; index < turns.num_tiles; buffer.advance()) {
    if (Shape::kMaxTokens <= 8 || count <= 8) {
      multiply_tile<Shape, 8>(s_plan, num_steps, ring, buffer);
    } else if (Shape::kMaxTokens <= 16 || count <= 16) {
      multiply_tile<Shape, Shape::kMaxTokens < 16 ? 8 : 16>(s_plan, num_steps, ring, buffer);
    } else if (Shape::kMaxTokens <= 32 || count <= 32) {
      multiply_tile<Shape, Shape::kMaxTokens < 32 ? 8 : 32>(s_plan, num_steps, ring, buffer);
    } else {
      multiply_tile<Shape, Shape::kMaxTokens < 64 ? 8 : 64>(s_plan, num_steps, ring, buffer);
    }
    index = turns.tile_index(++turn);
    count = turns.tile(index).tokens.row_count;
  }
}

template <class Shape>
__device__ __forceinline__ void join_pieces(float (&r_sum)[4], const float* s_partials, int group) {
  const auto* s_fragments = reinterpret_cast<const float4*>(s_partials) + group * 32 + threadIdx.x % 32;
  const float4 first = s_fragments[0];
  r_sum[0] = first.x;
  r_sum[1] = first.y;
  r_sum[2] = first.z;
  r_sum[3] = first.w;
#pragma unroll
  for (int piece = 1; piece < kSpreadPieces; ++piece) {
    const float4 values = s_fragments[piece * (Shape::kFragmentFloats / 4)];
    r_sum[0] = __fadd_rn(r_sum[0], values.x);
    r_sum[1] = __fadd_rn(r_sum[1], values.y);
    r_sum[2] = __fadd_rn(r_sum[2], values.z);
    r_sum[3] = __fadd_rn(r_sum[3], values.w);
  }
}

template <class Shape, class Walk, class Finish>
struct TileFacts {
  typename Finish::RowFacts r_rows;
  float r_token_scale;

  __device__ __forceinline__ TileFacts(const Walk& walk, const Finish& finish, const ProductTile& tile, int rank,
                                       int thread) {
    const bool has_scale = finish.token_scales != nullptr && thread < tile.tokens.row_count;
    r_token_scale = has_scale ? __ldcg(finish.token_scales + walk.token(tile.tokens.row_first + thread)) : 1.0F;
    r_rows = finish.row_facts(tile, rank);
  }
};

template <class Shape, class Walk, class Finish>
__device__ __forceinline__ void finish_tile(SharedPlan<Shape>& s_plan, const Finish& finish, const ProductTile& tile,
                                            const TileFacts<Shape, Walk, Finish>& facts, int buffer, int rank,
                                            int num_groups) {
  const int warp = threadIdx.x / 32 % 2;
  const float* s_partials = s_plan.partials + buffer * Shape::kBufferFloats;
  const float* s_scales = s_plan.token_scales[buffer];
  for (int group = warp; group < num_groups; group += 2) {
    float r_sum[4];
    join_pieces<Shape>(r_sum, s_partials, group);
    const int column = group * kFragmentTokens + threadIdx.x % 4 * 2;
    const float2 scales = {s_scales[column], s_scales[column + 1]};
    finish.store_group(tile, rank, column, r_sum, facts.r_rows, scales);
  }
}

template <class Shape, class Walk, class Finish>
__device__ __forceinline__ void finish_tiles(const TileTurns<Shape, Walk>& turns, const Finish& finish) {
  constexpr int kBarrier = 1;
  SharedPlan<Shape>& s_plan = turns.s_plan;
  const Walk& walk = turns.walk;
  const int rank = static_cast<int>(ptx::cluster_ctarank());
  const int thread = threadIdx.x - Shape::kGatherThreads;
  int index = turns.tile_index(0);
  ProductTile next_tile = turns.first_tile;
  if (index >= turns.num_tiles) return;
  PipelineState<Shape::kPartialBuffers> buffer;
  TileFacts<Shape, Walk, Finish> next_facts(walk, finish, next_tile, rank, thread);
  for (uint32_t turn = 0; index < turns.num_tiles; ++turn, buffer.advance()) {
    const ProductTile tile = next_tile;
    const TileFacts<Shape, Walk, Finish> facts = next_facts;
    const int num_groups = padded_tokens(tile.tokens.row_count) / kFragmentTokens;
    if (thread == 0) {
      ptx::mbarrier_arrive_expect_tx(s_plan.partials_arrived[buffer.stage], kSpreadPieces * num_groups * 512);
    }
    if (thread < Shape::kMaxTokens) s_plan.token_scales[buffer.stage][thread] = facts.r_token_scale;
    index = turns.tile_index(turn + 1);
    next_tile = turns.tile(index);
    next_facts = TileFacts<Shape, Walk, Finish>(walk, finish, next_tile, rank, thread);
    ptx::bar_sync(kBarrier, Shape::kFinishThreads);
    ptx::mbarrier_wait_suspended(s_plan.partials_arrived[buffer.stage], buffer.phase);
    finish_tile(s_plan, finish, tile, facts, buffer.stage, rank, num_groups);
    ptx::bar_sync(kBarrier, Shape::kFinishThreads);
    const bool has_successor =
        index < turns.num_tiles && turns.tile_index(turn + Shape::kPartialBuffers) < turns.num_tiles;
    if (has_successor && thread < kSpreadPieces) {
      ptx::mbarrier_arrive_cluster(s_plan.partials_released[buffer.stage], thread);
    }
  }
}

template <class Shape, class Walk, class Finish>
__device__ __forceinline__ void play_role(SharedPlan<Shape>& s_plan, const ProductInputs& inputs, const Walk& walk,
                                          const Finish& finish) {
  const TileTurns<Shape, Walk> turns = {s_plan, walk};
  if (threadIdx.x >= 128) {
    multiply_tiles(turns, inputs.piece_steps);
  } else if (threadIdx.x < Shape::kGatherThreads) {
    load_tiles(turns, inputs);
  } else {
    finish_tiles(turns, finish);
  }
}

template <class Shape, class Walk, class Finish>
__global__ void __launch_bounds__(kProductThreads, Shape::kBlocksPerMultiprocessor)
    tile_product_kernel(const __grid_constant__ ProductInputs inputs, const __grid_constant__ Walk walk,
                        const __grid_constant__ Finish finish) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_plan = *reinterpret_cast<SharedPlan<Shape>*>(s_bytes);
  prepare(s_plan);
  if constexpr (Walk::kIsKnownEarly) {
    const int first = static_cast<int>(blockIdx.x) / kSpreadPieces;
    if (first < walk.num_tiles()) {
      load_first_weights(s_plan, WeightStream<Shape>(inputs), weight_tile(walk, walk.tile(first)));
    }
  }
  if (!Walk::kIsKnownEarly || threadIdx.x >= Shape::kGatherThreads) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
  }
  play_role(s_plan, inputs, walk, finish);
}

template <class Shape, class Walk, class Finish>
int max_product_clusters() {
  static PerDevice count;
  return count.get([] {
    const auto kernel = tile_product_kernel<Shape, Walk, Finish>;
    constexpr int kBytes = sizeof(SharedPlan<Shape>);
    static_assert(kBytes <= kSharedLimitBytes, "the shared plan is larger than one thread block may have");
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const LaunchConfig launch({kSpreadPieces, kProductThreads, kBytes, kSpreadPieces}, nullptr);
    int clusters = 0;
    GLINT_CHECK_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config));
    return clusters;
  });
}

template <class Shape, class Walk, class Finish>
void launch_tile_product(const ProductInputs& inputs, const Walk& walk, const Finish& finish, int64_t max_tiles,
                         cudaStream_t stream) {
  const int64_t most = max_product_clusters<Shape, Walk, Finish>();
  const auto clusters = static_cast<unsigned>(max_tiles < most ? max_tiles : most);
  launch_dependent(tile_product_kernel<Shape, Walk, Finish>,
                   {clusters * kSpreadPieces, kProductThreads, sizeof(SharedPlan<Shape>), kSpreadPieces}, stream,
                   inputs, walk, finish);
}

}
