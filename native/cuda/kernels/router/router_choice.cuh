#pragma once

#include <cfloat>

#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/router/router.h"

namespace glint::cuda {

inline constexpr float kLeastScoreSum = 1e-20F;
inline constexpr int kSplitBatch = 8;
inline constexpr int kAnySplits = 0;

struct ChosenRow {
  int32_t experts[kMaxRouterChoices];
  float scores[kMaxRouterChoices];
};

struct RowStorage {
  float* s_scores;
  float* s_choice;
  ChosenRow& s_chosen;
};

template <int kRows>
struct RouterStorage {
  float scores[kMaxRouterExperts];
  float choice[kMaxRouterExperts];
  ChosenRow chosen[kRows];

  __device__ __forceinline__ RowStorage of(int row, int thread_first) {
    return {scores + thread_first, choice + thread_first, chosen[row]};
  }
};

struct ChosenExpert {
  int32_t expert;
  float weight;
};

__device__ __forceinline__ uint32_t ordered_key(float value) {
  const int32_t bits = __float_as_int(value + 0.0F);
  return static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000U;
}

__device__ __forceinline__ float nan_to_lowest_for_unique_choice(float value) {
  return isnan(value) ? -FLT_MAX : value;
}

__device__ __forceinline__ float router_score(float logit) { return __fdiv_rn(1.0F, __fadd_rn(1.0F, expf(-logit))); }

__device__ __forceinline__ int choice_lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }

template <int kBatch>
__device__ __forceinline__ float add_splits(float logit, const float* g_split, int64_t stride) {
  float batch[kBatch];
#pragma unroll
  for (int index = 0; index < kBatch; ++index) {
    batch[index] = __ldcg(g_split);
    g_split += stride;
  }
#pragma unroll
  for (int index = 0; index < kBatch; ++index) logit += batch[index];
  return logit;
}

template <int kSplits>
__device__ __forceinline__ float reduce_splits(const float* g_split, int64_t stride, int splits) {
  if constexpr (kSplits != kAnySplits) return add_splits<kSplits>(0.0F, g_split, stride);
  float logit = 0.0F;
  int split = 0;
  for (; split + kSplitBatch <= splits; split += kSplitBatch) {
    logit = add_splits<kSplitBatch>(logit, g_split + split * stride, stride);
  }
  for (; split < splits; ++split) logit += __ldcg(g_split + split * stride);
  return logit;
}

template <int kSplits>
__device__ __forceinline__ void score_expert(const RouterCall& call, const RowStorage& storage, int64_t row,
                                             int expert, int splits, float bias) {
  const float* g_split = call.splits + row * call.num_experts + expert;
  const float score = router_score(reduce_splits<kSplits>(g_split, call.count * call.num_experts, splits));
  storage.s_scores[expert] = score;
  storage.s_choice[expert] = nan_to_lowest_for_unique_choice(score + bias);
}

template <int kKeys>
struct AdjacentKeys {
  uint32_t keys[kKeys];
  uint32_t chosen = 0;

  __device__ __forceinline__ AdjacentKeys(const float* s_values, int count) {
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const int index = choice_lane() * kKeys + key;
      keys[key] = index < count ? ordered_key(s_values[index]) : 0U;
    }
  }

  __device__ __forceinline__ void take_best(uint32_t lower_lanes) {
    uint32_t best = keys[0];
#pragma unroll
    for (int key = 1; key < kKeys; ++key) best = max(best, keys[key]);
    uint32_t equal_keys = 0;
#pragma unroll
    for (int key = 0; key < kKeys; ++key) equal_keys |= keys[key] == best ? 1U << key : 0U;
    const uint32_t lowest_key = equal_keys & (0U - equal_keys);
    const uint32_t highest = __reduce_max_sync(kWholeWarp, best);
    const uint32_t holders = __ballot_sync(kWholeWarp, best == highest);
    const bool is_taken = best == highest && (holders & lower_lanes) == 0;
    chosen |= is_taken ? lowest_key : 0U;
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      if (is_taken && (lowest_key >> key & 1U) != 0) keys[key] = 0;
    }
  }

  __device__ __forceinline__ void store_chosen(const RowStorage& storage, uint32_t lower_lanes) const {
    int place = 0;
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      place += __popc(__ballot_sync(kWholeWarp, (chosen >> key & 1U) != 0) & lower_lanes);
    }
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      if ((chosen >> key & 1U) == 0) continue;
      const int expert = choice_lane() * kKeys + key;
      storage.s_chosen.experts[place] = expert;
      storage.s_chosen.scores[place] = storage.s_scores[expert];
      ++place;
    }
  }
};

template <int kKeys>
__device__ __forceinline__ ChosenExpert choose_with_keys(const RouterCall& call, const RowStorage& storage) {
  const uint32_t lower_lanes = (1U << choice_lane()) - 1U;
  AdjacentKeys<kKeys> keys(storage.s_choice, call.num_experts);
#pragma unroll 8
  for (int kept = 0; kept < call.experts_per_token; ++kept) keys.take_best(lower_lanes);
  keys.store_chosen(storage, lower_lanes);
  __syncwarp();
  float sum = kLeastScoreSum;
#pragma unroll 8
  for (int kept = 0; kept < call.experts_per_token; ++kept) sum += storage.s_chosen.scores[kept];
  const float factor = call.normalises ? __fdiv_rn(call.routed_scaling, sum) : call.routed_scaling;
  if (choice_lane() >= call.experts_per_token) return {0, 0.0F};
  return {storage.s_chosen.experts[choice_lane()], __fmul_rn(storage.s_chosen.scores[choice_lane()], factor)};
}

__device__ __forceinline__ ChosenExpert choose_one_warp(const RouterCall& call, const RowStorage& storage,
                                                        int64_t row) {
  constexpr int kFewKeys = 5;
  constexpr int kMostKeys = kMaxRouterExperts / kWarpLanes + 1;
  const bool has_few = call.num_experts <= kFewKeys * kWarpLanes;
  const ChosenExpert chosen =
      has_few ? choose_with_keys<kFewKeys>(call, storage) : choose_with_keys<kMostKeys>(call, storage);
  if (choice_lane() < call.experts_per_token) {
    call.experts[row * call.experts_per_token + choice_lane()] = chosen.expert;
    call.weights[row * call.experts_per_token + choice_lane()] = chosen.weight;
  }
  return chosen;
}

}
