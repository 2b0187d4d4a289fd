#pragma once

#include "cuda/experts.h"
#include "cuda/kernels/hopper.cuh"

namespace glint::cuda {

constexpr int kLocalTileTokens = 16;
constexpr int kLocalWords = kLocalGroupTokens / 32;
constexpr int kLocalRows = kLocalGroupTokens * (kMaxExpertsPerToken + 1);
constexpr int kLocalTiles = kLocalRows / kLocalTileTokens + kMaxLocalExperts;

struct PackedTile {
  uint16_t expert;
  uint16_t row_first;
  uint16_t row_count;
  uint16_t padding;
};

struct LocalGroups {
  uint32_t masks[kLocalWords][kMaxLocalExperts];
  uint32_t firsts[kMaxLocalExperts];
  uint32_t warp_sums[kMaxLocalExperts / 32];
  PackedTile tiles[kLocalTiles];
  uint8_t row_tokens[kLocalRows];
  int32_t num_tiles;

  __device__ __forceinline__ TokenTile tile(int index) const {
    const PackedTile& found = tiles[index];
    return {found.expert, found.row_first, found.row_count, index};
  }

  __device__ __forceinline__ uint32_t rows_of(int expert) const {
    return __popc(masks[0][expert]) + __popc(masks[1][expert]);
  }

  __device__ __forceinline__ int row_of(int expert, int token) const {
    const uint32_t below = masks[token / 32][expert] & ((1U << (token % 32)) - 1U);
    return static_cast<int>(firsts[expert] & 0xffffU) + __popc(below) + (token < 32 ? 0 : __popc(masks[0][expert]));
  }
};

template <int kThreads>
struct LocalGrouping {
  static constexpr int kPairs = (kLocalGroupTokens * kMaxExpertsPerToken + kThreads - 1) / kThreads;

  const GroupCall& call;
  LocalGroups& s_groups;
  int num_experts;
  int num_tokens;
  int r_experts[kPairs];

  __device__ __forceinline__ LocalGrouping(const GroupCall& group, LocalGroups& groups)
      : call(group), s_groups(groups), num_experts(group.expert_last - group.expert_first + group.has_shared) {
    for (int expert = threadIdx.x; expert < kMaxLocalExperts; expert += kThreads) {
      s_groups.masks[0][expert] = 0;
      s_groups.masks[1][expert] = 0;
    }
    const int num_real = call.num_real_tokens == nullptr ? call.num_tokens : __ldg(call.num_real_tokens);
    num_tokens = max(0, min(num_real, call.num_tokens));
  }

  __device__ __forceinline__ int token_of(int pair) const { return pair / call.experts_per_token; }

  __device__ __forceinline__ void mark() {
#pragma unroll
    for (int index = 0; index < kPairs; ++index) {
      const int pair = index * kThreads + static_cast<int>(threadIdx.x);
      r_experts[index] = -1;
      if (pair >= num_tokens * call.experts_per_token) continue;
      const int expert = __ldcg(call.experts + pair);
      if (expert >= call.expert_first && expert < call.expert_last) r_experts[index] = expert - call.expert_first;
    }
    __syncthreads();
#pragma unroll
    for (int index = 0; index < kPairs; ++index) {
      const int token = token_of(index * kThreads + static_cast<int>(threadIdx.x));
      if (r_experts[index] >= 0) atomicOr(&s_groups.masks[token / 32][r_experts[index]], 1U << (token % 32));
    }
    if (call.has_shared != 0 && threadIdx.x < kLocalWords) {
      const int left = num_tokens - static_cast<int>(threadIdx.x) * 32;
      s_groups.masks[threadIdx.x][num_experts - 1] = left >= 32 ? ~0U : left > 0 ? (1U << left) - 1U : 0U;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void list_tiles() const {
    const int expert = threadIdx.x;
    const bool is_expert = expert < num_experts;
    const uint32_t count = is_expert ? s_groups.rows_of(expert) : 0;
    const uint32_t num_tiles = (count + kLocalTileTokens - 1) / kLocalTileTokens;
    uint32_t before = count | num_tiles << 16U;
    const uint32_t own = before;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0U, before, distance);
      if (threadIdx.x % 32 >= distance) before += other;
    }
    if (expert < kMaxLocalExperts && expert % 32 == 31) s_groups.warp_sums[expert / 32] = before;
    __syncthreads();
    if (expert < kMaxLocalExperts) {
      before -= own;
      for (int warp = 0; warp < expert / 32; ++warp) before += s_groups.warp_sums[warp];
      s_groups.firsts[expert] = before;
      const uint32_t row_first = before & 0xffffU;
      for (uint32_t tile = 0; tile < num_tiles; ++tile) {
        const int left = static_cast<int>(count) - static_cast<int>(tile) * kLocalTileTokens;
        s_groups.tiles[(before >> 16U) + tile] = {static_cast<uint16_t>(expert),
                                                  static_cast<uint16_t>(row_first + tile * kLocalTileTokens),
                                                  static_cast<uint16_t>(min(kLocalTileTokens, left)), 0};
      }
      if (expert == kMaxLocalExperts - 1) s_groups.num_tiles = (before + own) >> 16U;
    }
    count_touched(count > 0 && expert < call.expert_last - call.expert_first);
    __syncthreads();
  }

  __device__ __forceinline__ void count_touched(bool is_touched) const {
    if (blockIdx.x != 0 || call.experts_touched == nullptr) return;
    const uint32_t touched = __ballot_sync(~0U, is_touched);
    if (threadIdx.x % 32 == 0 && touched != 0) {
      auto* g_touched = reinterpret_cast<unsigned long long*>(call.experts_touched);
      atomicAdd(g_touched, static_cast<unsigned long long>(__popc(touched)));
    }
  }

  template <typename Visit>
  __device__ __forceinline__ void for_each_row(Visit visit) const {
#pragma unroll
    for (int index = 0; index < kPairs; ++index) {
      const int pair = index * kThreads + static_cast<int>(threadIdx.x);
      if (r_experts[index] >= 0) visit(s_groups.row_of(r_experts[index], token_of(pair)), token_of(pair), pair);
    }
    if (call.has_shared != 0 && static_cast<int>(threadIdx.x) < num_tokens) {
      visit(s_groups.row_of(num_experts - 1, threadIdx.x), static_cast<int>(threadIdx.x), -1);
    }
  }
};

}
