#pragma once

#include "cuda/kernels/gemm/wide_plan.cuh"

namespace glint::cuda {

template <class Shape>
struct WideWeights {
  const uint8_t* g_weights;
  int num_steps;
  uint32_t token_bytes;

  __device__ __forceinline__ void load(WidePlan<Shape>& s_plan, int64_t weight_tile, int k_step, int stage) const {
    const uint8_t* g_tile = g_weights + (weight_tile * num_steps + k_step) * kProductTileBytes;
    hopper::mbarrier_arrive_expect_tx(s_plan.stage_arrived[stage], kProductTileBytes + token_bytes);
    hopper::cp_async_bulk<Shape::Tokens::kWeightPolicy>(s_plan.weights[stage], g_tile, kProductTileBytes,
                                                        s_plan.stage_arrived[stage]);
  }
};

template <class Shape, class Walk>
__device__ __forceinline__ void load_boxes(WidePlan<Shape>& s_plan, const ProductInputs& inputs,
                                           const TensorTokens& tokens, const Walk& walk) {
  const int num_steps = inputs.piece_steps * inputs.num_pieces;
  const auto token_bytes = static_cast<uint32_t>(walk.max_tokens * kProductTileK);
  const WideWeights<Shape> weights = {inputs.weights, num_steps, token_bytes};
  const int num_tiles = walk.num_tiles();
  const int first_tile = walk.tile(blockIdx.x).row_tile;
  int num_early = min(num_steps, Shape::kStages);
  for (int k_step = 0; k_step < num_early; ++k_step) weights.load(s_plan, first_tile, k_step, k_step);
  hopper::wait_for_previous_kernel();
  RingPlace ring;
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const ProductTile tile = walk.tile(index);
    for (int k_step = 0; k_step < num_steps; ++k_step) {
      hopper::mbarrier_wait(s_plan.stage_released[ring.stage], ring.phase ^ 1U);
      if (num_early <= 0) weights.load(s_plan, tile.row_tile, k_step, ring.stage);
      --num_early;
      hopper::cp_async_tensor<hopper::kEvictNormal>(s_plan.tokens[ring.stage], tokens.map, k_step * kProductTileK,
                                                    tile.tokens.row_first, s_plan.stage_arrived[ring.stage]);
      ring.advance(Shape::kStages);
    }
  }
}

struct WideRows {
  static constexpr int kRowsPerPass = 16;
  static constexpr int kPasses = kWideTokens / kRowsPerPass;

  int r_tokens[kPasses];
  int count;

  __device__ __forceinline__ WideRows(const ProductInputs& inputs, const TokenTile& tile) { find(inputs, tile); }

  __device__ __forceinline__ void find(const ProductInputs& inputs, const TokenTile& tile) {
    count = tile.row_count;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int place = min(static_cast<int>(threadIdx.x) / 8 + pass * kRowsPerPass, count - 1);
      r_tokens[pass] = __ldg(inputs.row_tokens + tile.row_first + place);
    }
  }
};

struct WideGather {
  const uint8_t* g_chunk;
  uint32_t r_offsets[WideRows::kPasses];
  int num_passes;

  __device__ __forceinline__ WideGather(const ProductInputs& inputs, const WideRows& rows)
      : g_chunk(inputs.activations + threadIdx.x % 8 * 16),
        num_passes((rows.count - static_cast<int>(threadIdx.x) / 8 + WideRows::kRowsPerPass - 1) /
                   WideRows::kRowsPerPass) {
#pragma unroll
    for (int pass = 0; pass < WideRows::kPasses; ++pass) {
      r_offsets[pass] = static_cast<uint32_t>(rows.r_tokens[pass]) * static_cast<uint32_t>(inputs.activation_stride);
    }
  }

  __device__ __forceinline__ void load(const uint8_t* s_tokens, int k_step) const {
    const uint32_t row = threadIdx.x / 8;
    const uint32_t target =
        hopper::shared_address(s_tokens) + row * kProductTileK + ((threadIdx.x % 8) ^ (row % 8)) * 16;
    const uint8_t* g_source = g_chunk + k_step * kProductTileK;
#pragma unroll
    for (int pass = 0; pass < WideRows::kPasses; ++pass) {
      if (pass >= num_passes) continue;
      hopper::cp_async_16(target + pass * WideRows::kRowsPerPass * kProductTileK, g_source + r_offsets[pass]);
    }
  }
};

template <class Shape>
struct GatherSignal {
  static constexpr int kInFlight = 3;

  RingPlace place;
  int num_issued = 0;

  __device__ __forceinline__ void issue(WidePlan<Shape>& s_plan) {
    hopper::cp_async_commit();
    if (++num_issued <= kInFlight) return;
    hopper::cp_async_wait<kInFlight>();
    tell(s_plan, 1);
  }

  __device__ __forceinline__ void finish(WidePlan<Shape>& s_plan) {
    hopper::cp_async_wait<0>();
    tell(s_plan, min(num_issued, kInFlight));
  }

 private:
  __device__ __forceinline__ void tell(WidePlan<Shape>& s_plan, int count) {
    hopper::fence_proxy_async();
    __syncwarp();
    for (int index = 0; index < count; ++index) {
      if (threadIdx.x % 32 == 0) hopper::mbarrier_arrive(s_plan.stage_arrived[place.stage]);
      place.advance(Shape::kStages);
    }
  }
};

template <class Shape, class Walk>
__device__ __forceinline__ void gather_tiles(WidePlan<Shape>& s_plan, const ProductInputs& inputs, const Walk& walk) {
  const int num_steps = inputs.piece_steps * inputs.num_pieces;
  const WideWeights<Shape> weights = {inputs.weights, num_steps, 0};
  const int num_tiles = walk.num_tiles();
  if (blockIdx.x >= num_tiles) return;
  RingPlace ring;
  GatherSignal<Shape> signal;
  ProductTile next_tile = walk.tile(blockIdx.x);
  WideRows next_rows(inputs, next_tile.tokens);
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const int64_t weight_tile = walk.weight_tile(next_tile);
    const WideGather gather(inputs, next_rows);
    next_tile = walk.tile(min(index + static_cast<int>(gridDim.x), num_tiles - 1));
    for (int k_step = 0; k_step < num_steps; ++k_step) {
      hopper::mbarrier_wait(s_plan.stage_released[ring.stage], ring.phase ^ 1U);
      if (threadIdx.x == 0) weights.load(s_plan, weight_tile, k_step, ring.stage);
      gather.load(s_plan.tokens[ring.stage], k_step);
      signal.issue(s_plan);
      ring.advance(Shape::kStages);
      if (k_step == 0) next_rows.find(inputs, next_tile.tokens);
    }
  }
  signal.finish(s_plan);
}

}
