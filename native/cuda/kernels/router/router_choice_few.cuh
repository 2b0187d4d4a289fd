#pragma once

#include "cuda/kernels/router/router_choice.cuh"

namespace glint::cuda {

inline constexpr int kPieceBatch = 40;
inline constexpr int kFewLaneKeys = 5;
inline constexpr int kMostLaneKeys = kMaxRouterExperts / kWarpLanes + 1;

__device__ __forceinline__ int choice_lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }

template <int kKeys>
struct AdjacentKeys {
  uint32_t keys[kKeys];

  __device__ __forceinline__ void load(const float* s_values, int count) {
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const int index = choice_lane() * kKeys + key;
      keys[key] = index < count ? ordered_key(s_values[index]) : 0U;
    }
  }

  __device__ __forceinline__ int take_best() {
    uint32_t best = 0;
    int best_key = 0;
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      best_key = keys[key] > best ? key : best_key;
      best = max(best, keys[key]);
    }
    const uint32_t highest = __reduce_max_sync(kWholeWarp, best);
    const int winner = __ffs(static_cast<int>(__ballot_sync(kWholeWarp, best == highest))) - 1;
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      if (choice_lane() == winner && key == best_key) keys[key] = 0;
    }
    return __shfl_sync(kWholeWarp, choice_lane() * kKeys + best_key, winner);
  }
};

__device__ __forceinline__ float reduce_splits(const float* g_piece, int64_t stride, int pieces) {
  float logit = 0.0F;
  int piece = 0;
  for (; piece + kPieceBatch <= pieces; piece += kPieceBatch) {
    float batch[kPieceBatch];
#pragma unroll
    for (int index = 0; index < kPieceBatch; ++index) batch[index] = __ldcg(g_piece + (piece + index) * stride);
#pragma unroll
    for (int index = 0; index < kPieceBatch; ++index) logit += batch[index];
  }
  for (; piece < pieces; ++piece) logit += __ldcg(g_piece + piece * stride);
  return logit;
}

__device__ __forceinline__ void score_expert(const RouterCall& call, RouterPlan& plan, int64_t row, int pieces,
                                             float bias) {
  const int expert = static_cast<int>(threadIdx.x);
  if (expert >= call.num_experts) return;
  const float logit =
      reduce_splits(call.pieces + row * call.num_experts + expert, call.count * call.num_experts, pieces);
  const float score = router_score(logit);
  plan.scores[expert] = score;
  plan.choice[expert] = nan_to_lowest_for_unique_choice(score + bias);
}

template <int kKeys>
__device__ __forceinline__ void hide_groups_one_warp(const RouterCall& call, RouterPlan& plan) {
  if (call.groups_per_token == call.num_groups) return;
  const int lane = choice_lane();
  const int group_size = call.num_experts / call.num_groups;
  for (int group = lane; group < call.num_groups; group += kWarpLanes) {
    plan.groups[group] = score_group(plan.choice + group * group_size, group_size);
  }
  __syncwarp();
  AdjacentKeys<kKeys> keys;
  keys.load(plan.groups, call.num_groups);
  __syncwarp();
  for (int kept = 0; kept < call.groups_per_token; ++kept) {
    const int best = keys.take_best();
    if (lane == 0) plan.groups[best] = NAN;
  }
  __syncwarp();
  for (int expert = lane; expert < call.num_experts; expert += kWarpLanes) {
    if (!isnan(plan.groups[expert / group_size])) plan.choice[expert] = -INFINITY;
  }
  __syncwarp();
}

template <int kKeys>
__device__ __forceinline__ int choose_expert_of_lane(const RouterCall& call, RouterPlan& plan) {
  int chosen = call.num_experts;
  AdjacentKeys<kKeys> keys;
  keys.load(plan.choice, call.num_experts);
#pragma unroll 8
  for (int kept = 0; kept < call.experts_per_token; ++kept) {
    const int best = keys.take_best();
    if (choice_lane() == kept) chosen = best;
  }
  int place = 0;
#pragma unroll 8
  for (int other = 0; other < call.experts_per_token; ++other) {
    place += __shfl_sync(kWholeWarp, chosen, other) < chosen ? 1 : 0;
  }
  if (choice_lane() < call.experts_per_token) plan.experts[place] = chosen;
  __syncwarp();
  return choice_lane() < call.experts_per_token ? plan.experts[choice_lane()] : 0;
}

__device__ __forceinline__ void store_weights_one_warp(const RouterCall& call, const RouterPlan& plan, int64_t row,
                                                       int expert) {
  const float score = plan.scores[expert];
  float sum = kLeastScoreSum;
#pragma unroll 8
  for (int kept = 0; kept < call.experts_per_token; ++kept) sum += __shfl_sync(kWholeWarp, score, kept);
  const float factor = router_factor(call, sum);
  if (choice_lane() >= call.experts_per_token) return;
  call.experts[row * call.experts_per_token + choice_lane()] = expert;
  call.weights[row * call.experts_per_token + choice_lane()] = __fmul_rn(score, factor);
}

template <int kKeys>
__device__ __forceinline__ void choose_one_warp(const RouterCall& call, RouterPlan& plan, int64_t row) {
  hide_groups_one_warp<kKeys>(call, plan);
  store_weights_one_warp(call, plan, row, choose_expert_of_lane<kKeys>(call, plan));
}

__global__ void __launch_bounds__(kMaxRouterExperts, 1) router_choice_few_kernel(const RouterCall call, int pieces) {
  __shared__ RouterPlan plan;
  const int64_t row = blockIdx.x;
  const int expert = static_cast<int>(threadIdx.x);
  const float bias = expert < call.num_experts ? call.bias[expert] : 0.0F;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  score_expert(call, plan, row, pieces, bias);
  __syncthreads();
  if (threadIdx.x >= kWarpLanes) return;
  if (call.num_experts <= kFewLaneKeys * kWarpLanes) {
    choose_one_warp<kFewLaneKeys>(call, plan, row);
  } else {
    choose_one_warp<kMostLaneKeys>(call, plan, row);
  }
}

}
