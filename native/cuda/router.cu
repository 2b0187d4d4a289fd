#include "cuda/router.h"

#include "cuda/kernels/router_choice.cuh"
#include "cuda/kernels/router_product.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

unsigned ceil_div(int64_t value, int64_t divisor) { return static_cast<unsigned>((value + divisor - 1) / divisor); }

void check_call(const RouterCall& call) {
  require_argument(call.num_experts <= kMaxRouterExperts, "a layer has ", call.num_experts,
                   " experts; the CUDA router takes at most ", kMaxRouterExperts);
  require_argument(call.experts_per_token <= kMaxRouterChoices, "a token goes to ", call.experts_per_token,
                   " experts; the CUDA router takes at most ", kMaxRouterChoices);
  require_argument(call.num_groups > 0 && call.num_experts % call.num_groups == 0, call.num_experts,
                   " experts cannot be cut in ", call.num_groups, " equal groups");
}

}

void launch_router(const RouterCall& call, cudaStream_t stream) {
  check_call(call);
  if (call.count == 0) return;
  const bool is_few = takes_few_rows(call.count, call.width);
  const int64_t pieces = router_pieces(call.width);
  if (is_few) {
    const dim3 grid(ceil_div(call.num_experts, 16 * kFewExpertTiles), static_cast<unsigned>(pieces),
                    ceil_div(call.count, 8 * kFewRowTiles));
    launch_dependent(router_few_kernel, {grid, kWarpLanes, 0}, stream, call);
  } else {
    constexpr int kSharedBytes = sizeof(RouterStages);
    GLINT_CHECK_CUDA(
        cudaFuncSetAttribute(router_many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    const dim3 grid(ceil_div(call.num_experts, kManyExperts), ceil_div(call.count, kManyRows), 1);
    launch_dependent(router_many_kernel, {grid, kManyThreads, kSharedBytes}, stream, call);
  }
  const unsigned threads = ceil_div(call.num_experts, kWarpLanes) * kWarpLanes;
  launch_dependent(router_choice_kernel, {static_cast<unsigned>(call.count), threads, 0}, stream, call,
                   is_few ? pieces : int64_t{1});
}

}
