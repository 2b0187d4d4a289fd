#include "cuda/kernels/router/router.h"

#include "cuda/kernels/router/router_choice_few.cuh"
#include "cuda/kernels/router/router_product.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

unsigned ceil_div(int64_t value, int64_t divisor) { return static_cast<unsigned>((value + divisor - 1) / divisor); }

void check_call(const RouterCall& call) {
  require_argument(call.num_experts <= kMaxRouterExperts, "a layer has ", call.num_experts,
                   " experts; the CUDA router takes at most ", kMaxRouterExperts);
  require_argument(call.experts_per_token <= kMaxRouterChoices, "a token goes to ", call.experts_per_token,
                   " experts; the CUDA router takes at most ", kMaxRouterChoices);
}

template <int kRowTiles>
void start_few(const RouterCall& call, int pieces, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(pieces), ceil_div(call.count, 8 * kRowTiles), 1);
  const unsigned threads = ceil_div(call.num_experts, kFewExperts) * kWarpLanes;
  launch_dependent(router_few_kernel<kRowTiles>, {grid, threads, 0}, stream, call);
}

void start_many(const RouterCall& call, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(RouterStages);
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(router_many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const dim3 grid(ceil_div(call.num_experts, kManyExperts), ceil_div(call.count, kManyRows), 1);
  launch_dependent(router_many_kernel, {grid, kManyThreads, kSharedBytes}, stream, call);
}

}

void launch_router(const RouterCall& call, cudaStream_t stream) {
  constexpr int64_t kOneTileRows = 64;
  check_call(call);
  if (call.count == 0) return;
  const unsigned threads = ceil_div(call.num_experts, kWarpLanes) * kWarpLanes;
  const LaunchShape choice{static_cast<unsigned>(call.count), threads, 0};
  if (takes_few_rows(call.count, call.width)) {
    const auto pieces = static_cast<int>(router_pieces(call.width));
    call.count <= kOneTileRows ? start_few<1>(call, pieces, stream) : start_few<2>(call, pieces, stream);
    launch_dependent(router_choice_few_kernel, choice, stream, call, pieces);
  } else {
    start_many(call, stream);
    launch_dependent(router_choice_kernel, choice, stream, call, int64_t{1});
  }
}

}
