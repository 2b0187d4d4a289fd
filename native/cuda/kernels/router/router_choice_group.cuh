#pragma once

#include "cuda/kernels/moe/group_few.cuh"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/memory.cuh"
#include "cuda/kernels/router/router_choice.cuh"

namespace glint::cuda {

static_assert(kMaxRouterExperts == kFewGroupThreads, "a thread of a thread block scores one expert of one row");

struct GroupedChoice {
  RouterStorage<kChoiceSlots> rows;
  uint64_t chosen[kMostGroupedRows * kMaxExpertsPerToken];
  FewGroups groups;
};

struct ChoiceSlot {
  int row_threads;
  int slot;
  int expert;
  int row;
  bool is_row;

  __device__ __forceinline__ explicit ChoiceSlot(const RouterCall& call)
      : row_threads((call.num_experts + kWarpLanes - 1) / kWarpLanes * kWarpLanes),
        slot(static_cast<int>(threadIdx.x) / row_threads),
        expert(static_cast<int>(threadIdx.x) % row_threads),
        row(slot * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)),
        is_row(slot < kChoiceSlots && row < call.count) {}

  __device__ __forceinline__ bool is_expert(const RouterCall& call) const {
    return is_row && expert < call.num_experts;
  }
};

__device__ __forceinline__ void send_chosen(const RouterCall& call, const ChosenExpert& chosen, uint64_t* s_chosen,
                                            int row) {
  if (choice_lane() >= call.experts_per_token) return;
  const uint64_t packed = uint64_t{__float_as_uint(chosen.weight)} << 32U | static_cast<uint32_t>(chosen.expert);
  ptx::st_relaxed_cluster(s_chosen[row * call.experts_per_token + choice_lane()], 0, packed);
}

__device__ __forceinline__ int load_num_real(const GroupCall& group) {
  return group.num_real_tokens == nullptr ? group.num_tokens : __ldcg(group.num_real_tokens);
}

__device__ __forceinline__ void group_chosen(const FewGrouping& grouping, const uint64_t* s_chosen) {
  const bool is_real = grouping.token < grouping.num_tokens;
  const uint64_t chosen = is_real ? s_chosen[grouping.thread] : 0U;
  grouping.group(is_real ? static_cast<int>(static_cast<uint32_t>(chosen)) : -1,
                 __uint_as_float(static_cast<uint32_t>(chosen >> 32U)));
}

template <int kSplits>
__global__ void __launch_bounds__(kFewGroupThreads, 1)
    router_choice_group_kernel(const __grid_constant__ RouterCall call, const __grid_constant__ GroupCall group,
                               int splits, int num_local_experts) {
  __shared__ GroupedChoice s_choice;
  const bool is_cluster = gridDim.x > 1;
  const ChoiceSlot mine(call);
  FewGrouping grouping{group, s_choice.groups, num_local_experts};
  const float bias = mine.is_expert(call) ? call.bias[mine.expert] : 0.0F;
  if (is_cluster) ptx::barrier_cluster_sync_relaxed();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int num_real = load_num_real(group);
  const RowStorage storage = s_choice.rows.of(mine.slot, mine.slot * mine.row_threads);
  if (mine.is_expert(call)) score_expert<kSplits>(call, storage, mine.row, mine.expert, splits, bias);
  if (is_cluster) grouping.begin(num_real);
  __syncthreads();
  if (mine.is_row && mine.expert < kWarpLanes) {
    const ChosenExpert chosen = choose_one_warp(call, storage, mine.row);
    if (!is_cluster) return group_one_token(group, num_local_experts, num_real, chosen.expert, chosen.weight);
    send_chosen(call, chosen, s_choice.chosen, mine.row);
  }
  if (!is_cluster) return;
  ptx::barrier_cluster_arrive();
  if (blockIdx.x > 0) return;
  ptx::barrier_cluster_wait();
  group_chosen(grouping, s_choice.chosen);
}

}
