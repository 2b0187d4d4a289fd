#pragma once

#include "cuda/kernels/gemm/tile_turns.cuh"

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
      hopper::mbarrier_init(s_plan.partials_released[buffer], kSpreadPieces);
    }
    for (uint64_t& taken : s_plan.taken_tiles) taken = 0;
    hopper::fence_mbarrier_init();
    hopper::fence_cluster();
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

  __device__ __forceinline__ int num_first() const { return min(num_steps, Shape::kStages); }

  __device__ __forceinline__ void load(SharedPlan<Shape>& s_plan, int64_t row_tile, int k_step, int stage) const {
    hopper::mbarrier_arrive_expect_tx(s_plan.stage_arrived[stage], kProductTileBytes);
    hopper::cp_async_bulk<hopper::kEvictFirst>(s_plan.weights[stage],
                                               g_first + row_tile * tile_bytes + int64_t{k_step} * kProductTileBytes,
                                               kProductTileBytes, s_plan.stage_arrived[stage]);
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
  hopper::wait_for_previous_kernel();
  int index = turns.tile_index(0);
  ProductTile next_tile = turns.first_tile;
  if (index >= turns.num_tiles) return;
  if (!Walk::kIsKnownEarly) load_first_weights(s_plan, weights, weight_tile(walk, next_tile));
  int num_loaded = weights.num_first();
  RingPlace ring;
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
      hopper::mbarrier_wait(s_plan.stage_released[ring.stage], ring.phase ^ 1U);
      if (threadIdx.x == 0 && num_loaded <= 0) weights.load(s_plan, weight_tile(walk, tile), k_step, ring.stage);
      --num_loaded;
      gather.load(s_plan.tokens[ring.stage], k_step);
      hopper::cp_async_mbarrier_arrive(s_plan.stage_arrived[ring.stage]);
      ring.advance(Shape::kStages);
    }
  }
}

}
