#pragma once

#include "cuda/kernels/product_plan.cuh"

namespace glint::cuda {

template <class Shape>
__device__ __forceinline__ void prepare(SharedPlan<Shape>& s_plan) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      hopper::mbarrier_init(s_plan.stage_arrived[stage], Shape::kGatherThreads + 1);
      hopper::mbarrier_init(s_plan.stage_released[stage], kConsumerWarps);
    }
    for (int buffer = 0; buffer < Shape::kPartialBuffers; ++buffer) {
      hopper::mbarrier_init(s_plan.partials_arrived[buffer], 1);
      hopper::mbarrier_init(s_plan.partials_released[buffer], Shape::kCluster);
    }
    hopper::fence_mbarrier_init();
  }
  hopper::cluster_sync_relaxed();
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
    const uint32_t target = hopper::shared_address(s_tokens) + row_offset;
#pragma unroll
    for (int pass = 0; pass < Passes::kPasses; ++pass) {
      if (first_token + pass * Passes::kTokensPerPass < count) {
        hopper::cp_async_16(target + pass * Passes::kTokensPerPass * kProductTileK,
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
        step_first(static_cast<int>(hopper::cluster_rank()) * inputs.piece_steps) {
    g_first = inputs.weights + int64_t{step_first} * kProductTileBytes;
  }

  __device__ __forceinline__ void load(SharedPlan<Shape>& s_plan, int64_t row_tile, int k_step, int stage) const {
    hopper::mbarrier_arrive_expect_tx(s_plan.stage_arrived[stage], kProductTileBytes);
    hopper::cp_async_bulk<hopper::kEvictFirst>(s_plan.weights[stage],
                                               g_first + row_tile * tile_bytes + int64_t{k_step} * kProductTileBytes,
                                               kProductTileBytes, s_plan.stage_arrived[stage]);
  }
};

template <class Shape, class Walk>
__device__ __forceinline__ int load_early(SharedPlan<Shape>& s_plan, const WeightStream<Shape>& weights,
                                          const Walk& walk, int cluster) {
  const int row_tile = walk.early_row_tile(cluster);
  if (row_tile < 0) return 0;
  const int count = min(weights.num_steps, Shape::kStages);
  for (int k_step = 0; threadIdx.x == 0 && k_step < count; ++k_step) weights.load(s_plan, row_tile, k_step, k_step);
  return count;
}

template <class Shape, class Walk>
__device__ __forceinline__ void load_tiles(SharedPlan<Shape>& s_plan, const ProductInputs& inputs, const Walk& walk,
                                           int cluster, int num_clusters, int num_early) {
  const WeightStream<Shape> weights(inputs);
  hopper::wait_for_previous_kernel();
  const int64_t k_first = int64_t{weights.step_first} * kProductTileK;
  ProductTile next_tile = walk.tile(cluster);
  const int num_tiles = walk.num_tiles();
  if (cluster >= num_tiles) return;
  const int prefetch_step = min(1, weights.num_steps - 1);
  RingPlace ring;
  TokenPasses<Shape> next_passes;
  next_passes.load(walk, next_tile.tokens);
  for (int index = cluster; index < num_tiles; index += num_clusters) {
    const ProductTile tile = next_tile;
    const TokenGather<Shape> gather(inputs, next_passes, k_first);
    next_tile = walk.tile(min(index + num_clusters, num_tiles - 1));
    const int64_t row_tile = int64_t{tile.tokens.expert} * walk.num_row_tiles + tile.row_tile;
    for (int k_step = 0; k_step < weights.num_steps; ++k_step) {
      hopper::mbarrier_wait(s_plan.stage_released[ring.stage], ring.phase ^ 1U);
      if (threadIdx.x == 0 && num_early <= 0) weights.load(s_plan, row_tile, k_step, ring.stage);
      --num_early;
      gather.load(s_plan.tokens[ring.stage], k_step);
      hopper::cp_async_mbarrier_arrive(s_plan.stage_arrived[ring.stage]);
      ring.advance(Shape::kStages);
      if (k_step == prefetch_step) next_passes.load(walk, next_tile.tokens);
    }
  }
}

}
