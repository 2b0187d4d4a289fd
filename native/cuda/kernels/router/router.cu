#include "cuda/kernels/router/router.h"

#include <cfloat>

#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/router/router_gemm.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

struct RouterStorage {
  float scores[kMaxRouterExperts];
  float choice[kMaxRouterExperts];
  int32_t experts[kMaxRouterChoices];
};

inline constexpr float kLeastScoreSum = 1e-20F;

__device__ __forceinline__ uint32_t ordered_key(float value) {
  const int32_t bits = __float_as_int(value + 0.0F);
  return static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000U;
}

__device__ __forceinline__ float nan_to_lowest_for_unique_choice(float value) {
  return isnan(value) ? -FLT_MAX : value;
}

__device__ __forceinline__ float router_score(float logit) { return __fdiv_rn(1.0F, __fadd_rn(1.0F, expf(-logit))); }

__device__ __forceinline__ float router_factor(const RouterCall& call, float sum) {
  return call.normalises ? __fdiv_rn(call.routed_scaling, sum) : call.routed_scaling;
}

inline constexpr int kSplitBatch = 40;
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

__device__ __forceinline__ float reduce_splits(const float* g_split, int64_t stride, int splits) {
  float logit = 0.0F;
  int split = 0;
  for (; split + kSplitBatch <= splits; split += kSplitBatch) {
    float batch[kSplitBatch];
#pragma unroll
    for (int index = 0; index < kSplitBatch; ++index) batch[index] = __ldcg(g_split + (split + index) * stride);
#pragma unroll
    for (int index = 0; index < kSplitBatch; ++index) logit += batch[index];
  }
  for (; split < splits; ++split) logit += __ldcg(g_split + split * stride);
  return logit;
}

__device__ __forceinline__ void score_expert(const RouterCall& call, RouterStorage& storage, int64_t row, int splits,
                                             float bias) {
  const int expert = static_cast<int>(threadIdx.x);
  if (expert >= call.num_experts) return;
  const float logit =
      reduce_splits(call.splits + row * call.num_experts + expert, call.count * call.num_experts, splits);
  const float score = router_score(logit);
  storage.scores[expert] = score;
  storage.choice[expert] = nan_to_lowest_for_unique_choice(score + bias);
}

template <int kKeys>
__device__ __forceinline__ int choose_expert_of_lane(const RouterCall& call, RouterStorage& storage) {
  int chosen = call.num_experts;
  AdjacentKeys<kKeys> keys;
  keys.load(storage.choice, call.num_experts);
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
  if (choice_lane() < call.experts_per_token) storage.experts[place] = chosen;
  __syncwarp();
  return choice_lane() < call.experts_per_token ? storage.experts[choice_lane()] : 0;
}

__device__ __forceinline__ void store_weights_one_warp(const RouterCall& call, const RouterStorage& storage,
                                                       int64_t row, int expert) {
  const float score = storage.scores[expert];
  float sum = kLeastScoreSum;
#pragma unroll 8
  for (int kept = 0; kept < call.experts_per_token; ++kept) sum += __shfl_sync(kWholeWarp, score, kept);
  const float factor = router_factor(call, sum);
  if (choice_lane() >= call.experts_per_token) return;
  call.experts[row * call.experts_per_token + choice_lane()] = expert;
  call.weights[row * call.experts_per_token + choice_lane()] = __fmul_rn(score, factor);
}

template <int kKeys>
__device__ __forceinline__ void choose_with_keys(const RouterCall& call, RouterStorage& storage, int64_t row) {
  store_weights_one_warp(call, storage, row, choose_expert_of_lane<kKeys>(call, storage));
}

__device__ __forceinline__ void choose_one_warp(const RouterCall& call, RouterStorage& storage, int64_t row) {
  if (call.num_experts <= kFewLaneKeys * kWarpLanes) {
    choose_with_keys<kFewLaneKeys>(call, storage, row);
  } else {
    choose_with_keys<kMostLaneKeys>(call, storage, row);
  }
}

__global__ void __launch_bounds__(kMaxRouterExperts, 1) router_choice_few_kernel(const RouterCall call, int splits) {
  __shared__ RouterStorage storage;
  const int64_t row = blockIdx.x;
  const int expert = static_cast<int>(threadIdx.x);
  const float bias = expert < call.num_experts ? call.bias[expert] : 0.0F;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  score_expert(call, storage, row, splits, bias);
  __syncthreads();
  if (threadIdx.x < kWarpLanes) choose_one_warp(call, storage, row);
}

__global__ void __launch_bounds__(kMaxRouterExperts) router_choice_kernel(const RouterCall call) {
  __shared__ RouterStorage storage;
  const int64_t row = blockIdx.x;
  const int expert = static_cast<int>(threadIdx.x);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  score_expert(call, storage, row, 1, expert < call.num_experts ? call.bias[expert] : 0.0F);
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

void start_many(const RouterCall& call, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(RouterStages);
  GLINT_CHECK_CUDA(
      cudaFuncSetAttribute(router_gemm_many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const dim3 grid(ceil_div(call.num_experts, kManyExperts), ceil_div(call.count, kManyRows), 1);
  launch_dependent(router_gemm_many_kernel, {grid, kManyThreads, kSharedBytes}, stream, call);
}

}

void launch_router(const RouterCall& call, cudaStream_t stream) {
  constexpr int64_t kOneTileRows = 64;
  check_call(call);
  if (call.count == 0) return;
  const unsigned threads = ceil_div(call.num_experts, kWarpLanes) * kWarpLanes;
  const LaunchShape choice{static_cast<unsigned>(call.count), threads, 0};
  if (takes_few_rows(call.count, call.width)) {
    const auto splits = static_cast<int>(router_splits(call.width));
    call.count <= kOneTileRows ? start_few<1>(call, splits, stream) : start_few<2>(call, splits, stream);
    launch_dependent(router_choice_few_kernel, choice, stream, call, splits);
  } else {
    start_many(call, stream);
    launch_dependent(router_choice_kernel, choice, stream, call);
  }
}

}
