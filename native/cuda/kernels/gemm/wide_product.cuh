#pragma once

#include "cuda/kernels/gemm/wide_load.cuh"
#include "cuda/kernels/gemm/wide_store.cuh"

namespace glint::cuda {

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
__device__ __forceinline__ void add_piece(float (&r_piece)[kTokens / 2], WidePlan<Shape>& s_plan, int num_steps,
                                          RingPlace& ring) {
  const int warpgroup = threadIdx.x / 128 - 1;
  clear(r_piece);
  for (int k_step = 0; k_step < num_steps; ++k_step) {
    float r_stage[kTokens / 2];
    const uint64_t rows = hopper::wgmma_descriptor(
        hopper::shared_address(s_plan.weights[ring.stage]) + warpgroup * kWarpgroupBytes, 1024, 128);
    const uint64_t tokens = hopper::swizzled_descriptor(hopper::shared_address(s_plan.tokens[ring.stage]));
    hopper::mbarrier_wait(s_plan.stage_arrived[ring.stage], ring.phase);
    start_step<Shape::kElement, kTokens>(r_stage, rows, tokens);
    hopper::wgmma_wait_group<0>();
    hopper::pin_registers(r_stage);
    if (threadIdx.x % 32 == 0) hopper::mbarrier_arrive(s_plan.stage_released[ring.stage]);
    ring.advance(Shape::kStages);
    add(r_piece, r_stage);
  }
}

template <class Shape, int kTokens, class Finish>
__device__ __forceinline__ void multiply_wide_tile(WidePlan<Shape>& s_plan, const ProductInputs& inputs,
                                                   const Finish& finish, const ProductTile& tile, RingPlace& ring) {
  const TokenScales<kTokens, Finish> scales(finish, tile);
  float r_total[kTokens / 2];
  add_piece<Shape, kTokens>(r_total, s_plan, inputs.piece_steps, ring);
  for (int piece = 1; piece < inputs.num_pieces; ++piece) {
    float r_piece[kTokens / 2];
    add_piece<Shape, kTokens>(r_piece, s_plan, inputs.piece_steps, ring);
    add(r_total, r_piece);
  }
  const typename Finish::RowFacts rows = finish.row_facts(tile, threadIdx.x / 32 - 4);
  if constexpr (Shape::kIsStaged) {
    store_staged<Shape, kTokens>(s_plan, finish, tile, r_total, rows, scales);
  } else {
    store_direct<Shape, kTokens>(finish, tile, r_total, rows, scales);
  }
}

template <class Shape, class Walk, class Finish>
__device__ __forceinline__ void multiply_wide_tiles(WidePlan<Shape>& s_plan, const ProductInputs& inputs,
                                                    const Walk& walk, const Finish& finish) {
  const int num_tiles = walk.num_tiles();
  RingPlace ring;
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const ProductTile tile = walk.tile(index);
    const int count = tile.tokens.row_count;
    if (count > 112) {
      multiply_wide_tile<Shape, 128>(s_plan, inputs, finish, tile, ring);
    } else if (count > 96) {
      multiply_wide_tile<Shape, 112>(s_plan, inputs, finish, tile, ring);
    } else if (count > 64) {
      multiply_wide_tile<Shape, 96>(s_plan, inputs, finish, tile, ring);
    } else if (count > 32) {
      multiply_wide_tile<Shape, 64>(s_plan, inputs, finish, tile, ring);
    } else {
      multiply_wide_tile<Shape, 32>(s_plan, inputs, finish, tile, ring);
    }
  }
  if constexpr (Shape::kIsStaged) hopper::wait_until_stored();
}

template <class Shape, class Walk, class Finish>
__global__ void __launch_bounds__(kProductThreads, 1)
    wide_product_kernel(const __grid_constant__ ProductInputs inputs,
                        const __grid_constant__ typename Shape::Tokens tokens, const __grid_constant__ Walk walk,
                        const __grid_constant__ Finish finish) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_plan = *reinterpret_cast<WidePlan<Shape>*>(s_bytes);
  prepare(s_plan);
  if (!Walk::kIsKnownEarly || threadIdx.x >= Shape::kLoadThreads) hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();
  if (threadIdx.x < Shape::kLoadThreads) {
    hopper::setmaxnreg_decrease<Shape::Tokens::kLoadRegisters>();
    if constexpr (Shape::Tokens::kIsGathered) {
      gather_tiles(s_plan, inputs, walk);
    } else if (threadIdx.x == 0) {
      load_boxes(s_plan, inputs, tokens, walk);
    }
  } else {
    hopper::setmaxnreg_increase<Shape::Tokens::kMultiplyRegisters>();
    multiply_wide_tiles(s_plan, inputs, walk, finish);
  }
}

}
