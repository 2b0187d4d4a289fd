#pragma once

#include "cuda/kernels/gemm/product_plan.cuh"

namespace glint::cuda {

template <class Shape, class Walk>
struct TileTurns {
  SharedPlan<Shape>& s_plan;
  const Walk& walk;
  int cluster = static_cast<int>(blockIdx.x) / kSpreadPieces;
  int num_clusters = static_cast<int>(gridDim.x) / kSpreadPieces;
  ProductTile first_tile = walk.tile(cluster);
  int num_tiles = walk.num_tiles();

  __device__ __forceinline__ bool is_taker() const { return threadIdx.x == 0 && hopper::cluster_rank() == 0; }

  __device__ __forceinline__ uint32_t take() const {
    if constexpr (!Walk::kIsKnownEarly) {
      if (is_taker()) return num_clusters + atomicInc(walk.tiles_taken, num_tiles - 1);
    }
    return 0;
  }

  __device__ __forceinline__ void tell(uint32_t turn, uint32_t taken) const {
    if constexpr (!Walk::kIsKnownEarly) {
      for (uint32_t rank = 0; is_taker() && rank < kSpreadPieces; ++rank) {
        hopper::store_in_cluster(s_plan.taken_tiles[turn % kTakenPlaces], rank, uint64_t{turn} << 32U | taken);
      }
    }
  }

  __device__ __forceinline__ int tile_index(uint32_t turn) const {
    if (Walk::kIsKnownEarly || turn == 0) return cluster + static_cast<int>(turn) * num_clusters;
    uint64_t told = 0;
    while (told >> 32U != turn) told = hopper::load_shared_relaxed(s_plan.taken_tiles[turn % kTakenPlaces]);
    return static_cast<int>(told & ~0U);
  }

  __device__ __forceinline__ ProductTile tile(int index) const { return walk.tile(min(index, num_tiles - 1)); }
};

}
