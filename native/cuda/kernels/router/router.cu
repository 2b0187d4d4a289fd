#include "cuda/kernels/router/router.h"

#include <algorithm>
#include <bit>

#include "cuda/kernels/router/router_choice_group.cuh"
#include "cuda/kernels/router/router_gemm_many.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

template <int kSplits>
__global__ void __launch_bounds__(kMaxRouterExperts, 1) router_choice_few_kernel(const RouterCall call, int splits) {
  __shared__ RouterStorage<1> s_storage;
  const RowStorage storage = s_storage.of(0, 0);
  const int64_t row = blockIdx.x;
  const int expert = static_cast<int>(threadIdx.x);
  const float bias = expert < call.num_experts ? call.bias[expert] : 0.0F;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (expert < call.num_experts) score_expert<kSplits>(call, storage, row, expert, splits, bias);
  __syncthreads();
  if (threadIdx.x < kWarpLanes) choose_one_warp(call, storage, row);
}

__global__ void __launch_bounds__(kMaxRouterExperts) router_choice_kernel(const RouterCall call) {
  __shared__ RouterStorage<1> s_storage;
  const RowStorage storage = s_storage.of(0, 0);
  const int64_t row = blockIdx.x;
  const int expert = static_cast<int>(threadIdx.x);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (expert < call.num_experts) score_expert<1>(call, storage, row, expert, 1, call.bias[expert]);
  __syncthreads();
  if (threadIdx.x < kWarpLanes) choose_one_warp(call, storage, row);
}

unsigned ceil_div(int64_t value, int64_t divisor) { return static_cast<unsigned>((value + divisor - 1) / divisor); }

void check_call(const RouterCall& call) {
  require_argument(call.num_experts <= kMaxRouterExperts, "a layer has ", call.num_experts,
                   " experts; the CUDA router takes at most ", kMaxRouterExperts);
  require_argument(call.experts_per_token <= kMaxRouterChoices, "a token goes to ", call.experts_per_token,
                   " experts; the CUDA router takes at most ", kMaxRouterChoices);
}

template <int kRowTiles>
void start_few(const RouterCall& call, int splits, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(splits), ceil_div(call.count, 8 * kRowTiles), 1);
  const unsigned threads = ceil_div(call.num_experts, kFewExperts) * kWarpLanes;
  launch_dependent(router_gemm_few_kernel<kRowTiles>, {grid, threads, 0}, stream, call);
}

int start_few_rows(const RouterCall& call, cudaStream_t stream) {
  constexpr int64_t kOneTileRows = 64;
  const auto splits = static_cast<int>(router_splits(call.width));
  call.count <= kOneTileRows ? start_few<1>(call, splits, stream) : start_few<2>(call, splits, stream);
  return splits;
}

template <int kExpertTiles>
void start_many(const RouterCall& call, cudaStream_t stream) {
  using Storage = ManyStorage<kExpertTiles>;
  constexpr int kSharedBytes = sizeof(Storage);
  static_assert(kSharedBytes <= kSharedLimitBytes, "the shared storage is larger than one thread block may have");
  const auto kernel = router_gemm_many_kernel<kExpertTiles>;
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const dim3 grid(ceil_div(call.num_experts, Storage::kExperts), ceil_div(call.count, kManyRows), 1);
  launch_dependent(kernel, {grid, kManyThreads, kSharedBytes}, stream, call);
}

void start_many_rows(const RouterCall& call, cudaStream_t stream) {
  const bool needs_fewer_blocks = ceil_div(call.num_experts, ManyStorage<10>::kExperts) <
                                  ceil_div(call.num_experts, ManyStorage<8>::kExperts);
  needs_fewer_blocks ? start_many<10>(call, stream) : start_many<8>(call, stream);
}

}

void launch_router(const RouterCall& call, cudaStream_t stream) {
  check_call(call);
  if (call.count == 0) return;
  const unsigned threads = ceil_div(call.num_experts, kWarpLanes) * kWarpLanes;
  const LaunchShape choice{static_cast<unsigned>(call.count), threads, 0};
  if (!takes_few_rows(call.count, call.width)) {
    start_many_rows(call, stream);
    return launch_dependent(router_choice_kernel, choice, stream, call);
  }
  const int splits = start_few_rows(call, stream);
  const auto kernel = splits == 32   ? router_choice_few_kernel<32>
                      : splits == 40 ? router_choice_few_kernel<40>
                                     : router_choice_few_kernel<kAnySplits>;
  launch_dependent(kernel, choice, stream, call, splits);
}

void launch_router_and_grouping(const RouterCall& call, const GroupCall& group, cudaStream_t stream) {
  if (!groups_in_choice(call.count, call.num_experts)) {
    launch_router(call, stream);
    return launch_group_tokens(group, stream);
  }
  check_call(call);
  const int num_local_experts = check_grouping(group);
  require_argument(group.num_tokens == call.count, "the router chose experts of ", call.count,
                   " rows and the grouping is of ", group.num_tokens, "; give both the same rows");
  const int splits = start_few_rows(call, stream);
  const unsigned blocks = std::min(std::bit_ceil(static_cast<unsigned>(call.count)), unsigned{kChoiceBlocks});
  const auto kernel = splits == 32   ? router_choice_group_kernel<32>
                      : splits == 40 ? router_choice_group_kernel<40>
                                     : router_choice_group_kernel<kAnySplits>;
  const unsigned threads = blocks > 1 ? kFewGroupThreads : ceil_div(call.num_experts, kWarpLanes) * kWarpLanes;
  launch_dependent(kernel, {blocks, threads, 0, blocks}, stream, call, group, splits, num_local_experts);
}

}
