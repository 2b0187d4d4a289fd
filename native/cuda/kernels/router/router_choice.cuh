#pragma once

#include <cfloat>

#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/router/router.h"

namespace glint::cuda {

struct RouterPlan {
  float scores[kMaxRouterExperts];
  float choice[kMaxRouterExperts];
  float groups[kMaxRouterExperts];
  int32_t experts[kMaxRouterChoices];
};

inline constexpr float kLeastScoreSum = 1e-20F;
inline constexpr int kLaneExperts = kMaxRouterExperts / kWarpLanes;

__device__ __forceinline__ uint32_t ordered_key(float value) {
  const int32_t bits = __float_as_int(value + 0.0F);
  return static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000U;
}

struct LaneKeys {
  uint32_t keys[kLaneExperts];
  int num_rounds;

  __device__ __forceinline__ void load(const float* s_values, int count) {
    num_rounds = (count + kWarpLanes - 1) / kWarpLanes;
#pragma unroll
    for (int round = 0; round < kLaneExperts; ++round) {
      const int index = round * kWarpLanes + static_cast<int>(threadIdx.x) % kWarpLanes;
      keys[round] = index < count ? ordered_key(s_values[index]) : 0U;
    }
  }

  __device__ __forceinline__ int take_best() {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    uint32_t best = 0;
    int best_round = 0;
#pragma unroll
    for (int round = 0; round < kLaneExperts; ++round) {
      if (round >= num_rounds) break;
      best_round = keys[round] > best ? round : best_round;
      best = max(best, keys[round]);
    }
    const uint32_t highest = __reduce_max_sync(kWholeWarp, best);
    const unsigned own_index = static_cast<unsigned>(best_round * kWarpLanes + lane);
    const auto index = static_cast<int>(__reduce_min_sync(kWholeWarp, best == highest ? own_index : ~0U));
#pragma unroll
    for (int round = 0; round < kLaneExperts; ++round) {
      if (round * kWarpLanes + lane == index) keys[round] = 0;
    }
    return index;
  }
};

__device__ __forceinline__ float nan_to_lowest_for_unique_choice(float value) {
  return isnan(value) ? -FLT_MAX : value;
}

__device__ __forceinline__ float router_score(float logit) {
  return __fdiv_rn(1.0F, __fadd_rn(1.0F, expf(-logit)));
}

__device__ __forceinline__ float router_factor(const RouterCall& call, float sum) {
  return call.normalises ? __fdiv_rn(call.routed_scaling, sum) : call.routed_scaling;
}

__device__ __forceinline__ void score_experts(const RouterCall& call, RouterPlan& plan, int64_t row, int64_t pieces) {
  for (int expert = static_cast<int>(threadIdx.x); expert < call.num_experts; expert += static_cast<int>(blockDim.x)) {
    const float* g_piece = call.pieces + row * call.num_experts + expert;
    float logit = 0.0F;
#pragma unroll 20
    for (int64_t piece = 0; piece < pieces; ++piece) logit += g_piece[piece * call.count * call.num_experts];
    const float score = router_score(logit);
    plan.scores[expert] = score;
    plan.choice[expert] = nan_to_lowest_for_unique_choice(score + call.bias[expert]);
  }
}

__device__ __forceinline__ float score_group(const float* s_choice, int size) {
  float best = -INFINITY;
  float second = -INFINITY;
  for (int index = 0; index < size; ++index) {
    const float value = s_choice[index];
    second = value > best ? best : fmaxf(second, value);
    best = fmaxf(best, value);
  }
  return best + second;
}

__device__ __forceinline__ void hide_other_groups_one_warp(const RouterCall& call, RouterPlan& plan) {
  if (call.groups_per_token == call.num_groups) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int group_size = call.num_experts / call.num_groups;
  for (int group = lane; group < call.num_groups; group += kWarpLanes) {
    plan.groups[group] = score_group(plan.choice + group * group_size, group_size);
  }
  __syncwarp();
  LaneKeys keys;
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

__device__ __forceinline__ void choose_experts_one_warp(const RouterCall& call, RouterPlan& plan) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  int chosen = call.num_experts;
  LaneKeys keys;
  keys.load(plan.choice, call.num_experts);
  for (int kept = 0; kept < call.experts_per_token; ++kept) {
    const int best = keys.take_best();
    if (lane == kept) chosen = best;
  }
  int place = 0;
  for (int other = 0; other < call.experts_per_token; ++other) {
    place += __shfl_sync(kWholeWarp, chosen, other) < chosen ? 1 : 0;
  }
  if (lane < call.experts_per_token) plan.experts[place] = chosen;
  __syncwarp();
}

__device__ __forceinline__ void store_choice_one_warp(const RouterCall& call, const RouterPlan& plan, int64_t row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  float sum = kLeastScoreSum;
  for (int kept = 0; kept < call.experts_per_token; ++kept) sum += plan.scores[plan.experts[kept]];
  const float factor = router_factor(call, sum);
  if (lane >= call.experts_per_token) return;
  const int32_t expert = plan.experts[lane];
  call.experts[row * call.experts_per_token + lane] = expert;
  call.weights[row * call.experts_per_token + lane] = __fmul_rn(plan.scores[expert], factor);
}

__global__ void router_choice_kernel(const RouterCall call, int64_t pieces) {
  __shared__ RouterPlan plan;
  const int64_t row = blockIdx.x;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  score_experts(call, plan, row, pieces);
  __syncthreads();
  if (threadIdx.x >= kWarpLanes) return;
  hide_other_groups_one_warp(call, plan);
  choose_experts_one_warp(call, plan);
  store_choice_one_warp(call, plan, row);
}

}
