#pragma once

#include "cuda/kernels/gemm/product_plan.cuh"
#include "cuda/kernels/ptx/tensor_copy.cuh"

namespace glint::cuda {

constexpr int kWideTokens = 128;
constexpr int kStagedRows = 32;

struct TensorTokens {
  static constexpr bool kIsGathered = false;
  static constexpr int kLoadRegisters = 40;
  static constexpr int kMultiplyRegisters = 232;
  static constexpr int kArrivals = 1;
  static constexpr uint64_t kWeightPolicy = hopper::kEvictNormal;

  CUtensorMap map;
};

struct GatheredTokens {
  static constexpr bool kIsGathered = true;
  static constexpr int kLoadRegisters = 72;
  static constexpr int kMultiplyRegisters = 216;
  static constexpr int kArrivals = 5;
  static constexpr uint64_t kWeightPolicy = hopper::kEvictFirst;
};

template <hopper::Element kElementValue, class TokensValue, bool kIsStagedValue>
struct WideShape {
  using Tokens = TokensValue;
  static constexpr hopper::Element kElement = kElementValue;
  static constexpr bool kIsStaged = kIsStagedValue;
  static constexpr int kStages = kIsStaged ? 5 : 7;
  static constexpr int kLoadThreads = 128;
};

template <bool kIsStaged>
struct StagedTile {};

template <>
struct StagedTile<true> {
  alignas(1024) float outs[kProductTileRows / kStagedRows][kWideTokens * kStagedRows];
};

template <class Shape>
struct WidePlan {
  alignas(1024) uint8_t weights[Shape::kStages][kProductTileBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][kWideTokens * kProductTileK];
  [[no_unique_address]] StagedTile<Shape::kIsStaged> staged;
  alignas(8) uint64_t stage_arrived[Shape::kStages];
  alignas(8) uint64_t stage_released[Shape::kStages];
};

template <class Shape>
__device__ __forceinline__ void prepare(WidePlan<Shape>& s_plan) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      hopper::mbarrier_init(s_plan.stage_arrived[stage], Shape::Tokens::kArrivals);
      hopper::mbarrier_init(s_plan.stage_released[stage], kConsumerWarps);
    }
    hopper::fence_mbarrier_init();
  }
  __syncthreads();
}

struct WideExpertWalk {
  static constexpr bool kIsKnownEarly = false;

  int32_t num_row_tiles;
  const TokenTile* token_tiles;
  const int32_t* num_token_tiles;

  __device__ __forceinline__ int num_tiles() const { return num_row_tiles * __ldg(num_token_tiles); }

  __device__ __forceinline__ ProductTile tile(int index) const {
    const int last = __ldg(num_token_tiles) - 1;
    const int place = last - index / num_row_tiles;
    return {even_tile(load(place), load(max(place - 1, 0)), load(min(place + 1, last))), index % num_row_tiles};
  }

  __device__ __forceinline__ int64_t weight_tile(const ProductTile& tile) const {
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
    if (before.expert == tile.expert && before.row_first < tile.row_first && tile.row_count < kWideTokens) {
      tile.row_first = before.row_first + first_share(last - before.row_first);
      tile.row_count = last - tile.row_first;
    } else if (after.expert == tile.expert && after.row_first > tile.row_first && after.row_count < kWideTokens) {
      tile.row_count = first_share(tile.row_count + after.row_count);
    }
    return tile;
  }
};

}
