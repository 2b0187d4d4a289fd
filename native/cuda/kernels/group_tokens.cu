#include "cuda/check.h"
#include "cuda/experts.h"
#include "cuda/kernels/hopper.cuh"
#include "cuda/kernels/launch_product.cuh"

namespace glint::cuda {

namespace {

constexpr int kGroupThreads = 1024;
constexpr int kWordTokens = 32;
constexpr int kBlockTokens = 256;

__host__ __device__ int words_for(int num_tokens) { return (num_tokens + kWordTokens - 1) / kWordTokens | 1; }

struct GroupPlan {
  uint32_t* s_masks;
  uint16_t* s_ranks;
  int32_t* s_row_first;
  int32_t* s_tile_first;
  int num_words;
  int num_experts;
};

__device__ void exclusive_scan_one_warp(int32_t* s_values, int32_t* s_total) {
  constexpr int kItems = kMaxLocalExperts / 32;
  const int lane = threadIdx.x;
  int32_t items[kItems];
  int32_t sum = 0;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    items[item] = sum;
    sum += s_values[lane * kItems + item];
  }
  int32_t before = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_up_sync(~0U, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == 31) *s_total = before;
  before -= sum;
#pragma unroll
  for (int item = 0; item < kItems; ++item) s_values[lane * kItems + item] = before + items[item];
}

__device__ int local_expert(const GroupCall& call, int pair) {
  const int expert = call.experts[pair];
  return expert >= call.expert_first && expert < call.expert_last ? expert - call.expert_first : -1;
}

__device__ void mark_tokens(const GroupCall& call, const GroupPlan& plan) {
  for (int index = threadIdx.x; index < plan.num_experts * plan.num_words; index += kGroupThreads) {
    const int expert = index / plan.num_words;
    const int tokens_left = call.num_tokens - index % plan.num_words * kWordTokens;
    const uint32_t all = tokens_left >= kWordTokens ? ~0U : tokens_left > 0 ? (1U << tokens_left) - 1U : 0U;
    plan.s_masks[index] = call.has_shared != 0 && expert == plan.num_experts - 1 ? all : 0U;
  }
  __syncthreads();
#pragma unroll 2
  for (int pair = threadIdx.x; pair < call.num_tokens * call.experts_per_token; pair += kGroupThreads) {
    const int expert = local_expert(call, pair);
    const int token = pair / call.experts_per_token;
    if (expert < 0) continue;
    atomicOr(plan.s_masks + expert * plan.num_words + token / kWordTokens, 1U << (token % kWordTokens));
  }
  __syncthreads();
}

__device__ int rank_of_word(const GroupPlan& plan, int expert, int word) {
  if (word < plan.num_words) return plan.s_ranks[expert * plan.num_words + word];
  const int last = expert * plan.num_words + plan.num_words - 1;
  return plan.s_ranks[last] + __popc(plan.s_masks[last]);
}

__device__ void rank_tokens(const GroupPlan& plan, int32_t* s_total) {
  const int expert = threadIdx.x;
  if (expert < kMaxLocalExperts) {
    int count = 0;
    for (int word = 0; expert < plan.num_experts && word < plan.num_words; ++word) {
      plan.s_ranks[expert * plan.num_words + word] = static_cast<uint16_t>(count);
      count += __popc(plan.s_masks[expert * plan.num_words + word]);
    }
    plan.s_row_first[expert] = count;
  }
  __syncthreads();
  if (threadIdx.x < 32) exclusive_scan_one_warp(plan.s_row_first, s_total);
  __syncthreads();
}

__device__ void store_row(const GroupCall& call, const GroupPlan& plan, int expert, int token, float weight) {
  const int index = expert * plan.num_words + token / kWordTokens;
  const uint32_t below = plan.s_masks[index] & ((1U << (token % kWordTokens)) - 1U);
  const int row = plan.s_row_first[expert] + plan.s_ranks[index] + __popc(below);
  call.grouped.row_tokens[row] = token;
  call.grouped.row_weights[row] = weight;
}

__device__ void store_rows(const GroupCall& call, const GroupPlan& plan) {
  const int first = blockIdx.x * kGroupThreads + threadIdx.x;
  const int stride = gridDim.x * kGroupThreads;
  for (int pair = first; pair < call.num_tokens * call.experts_per_token; pair += stride) {
    const int expert = local_expert(call, pair);
    if (expert >= 0) store_row(call, plan, expert, pair / call.experts_per_token, call.weights[pair]);
  }
  for (int token = first; call.has_shared != 0 && token < call.num_tokens; token += stride) {
    store_row(call, plan, plan.num_experts - 1, token, 1.0F);
  }
}

__device__ void store_tiles(TokenTile* tiles, const GroupPlan& plan, int32_t* s_total, int word_first, int word_last,
                            int tile_tokens, int tile_base) {
  const int expert = threadIdx.x;
  int rank_first = 0;
  int count = 0;
  if (expert < plan.num_experts) {
    rank_first = rank_of_word(plan, expert, word_first);
    count = rank_of_word(plan, expert, min(word_last, plan.num_words)) - rank_first;
  }
  const int num_tiles = (count + tile_tokens - 1) / tile_tokens;
  if (expert < kMaxLocalExperts) plan.s_tile_first[expert] = num_tiles;
  __syncthreads();
  if (threadIdx.x < 32) exclusive_scan_one_warp(plan.s_tile_first, s_total);
  __syncthreads();
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int index = tile_base + plan.s_tile_first[expert] + tile;
    tiles[index] = {expert, plan.s_row_first[expert] + rank_first + tile * tile_tokens,
                    min(tile_tokens, count - tile * tile_tokens), index};
  }
}

__global__ void __launch_bounds__(kGroupThreads)
    group_tokens_kernel(const __grid_constant__ GroupCall call, const TilePlan tiles, int num_experts) {
  extern __shared__ uint32_t s_words[];
  __shared__ int32_t s_row_first[kMaxLocalExperts];
  __shared__ int32_t s_tile_first[kMaxLocalExperts];
  __shared__ int32_t s_total;
  const int num_words = words_for(call.num_tokens);
  const GroupPlan plan = {s_words,      reinterpret_cast<uint16_t*>(s_words + num_experts * num_words),
                          s_row_first,  s_tile_first,
                          num_words,    num_experts};
  hopper::wait_for_previous_kernel();
  hopper::allow_next_kernel();
  mark_tokens(call, plan);
  rank_tokens(plan, &s_total);
  if (threadIdx.x == 0) *call.grouped.num_rows = s_total;
  store_rows(call, plan);
  if (blockIdx.x > 0) return;
  store_tiles(call.grouped.gate_up_tiles, plan, &s_total, 0, num_words, tiles.gate_up_tokens, 0);
  if (threadIdx.x == 0) *call.grouped.num_gate_up_tiles = s_total;
  const int block_words = tiles.block_tokens / kWordTokens;
  int tile_base = 0;
  for (int block = 0; block * block_words < num_words; ++block) {
    __syncthreads();
    store_tiles(call.grouped.down_tiles, plan, &s_total, block * block_words, (block + 1) * block_words,
                tiles.down_tokens, tile_base);
    tile_base += s_total;
    if (threadIdx.x == 0) call.grouped.down_tile_ends[block] = tile_base;
  }
}

}

TilePlan plan_tiles(int64_t num_tokens) {
  if (num_tokens <= 64) return {16, 16, 64};
  if (num_tokens <= 256) return {32, 32, 256};
  return {128, 64, 1024};
}

int64_t max_token_tiles(int64_t num_tokens, int32_t experts_per_token, int32_t num_local_experts) {
  const TilePlan plan = plan_tiles(num_tokens);
  const int64_t blocks = (num_tokens + plan.block_tokens - 1) / plan.block_tokens;
  const int64_t rows = num_tokens * (experts_per_token + 1);
  return rows / plan.down_tokens + (int64_t{num_local_experts} + 1) * blocks;
}

void launch_group_tokens(const GroupCall& call, cudaStream_t stream) {
  const int num_experts = call.expert_last - call.expert_first + (call.has_shared != 0 ? 1 : 0);
  require_argument(num_experts <= kMaxLocalExperts, "one rank holds at most ", kMaxLocalExperts, " experts, not ",
                   num_experts);
  const int num_words = words_for(call.num_tokens);
  const auto bytes = static_cast<size_t>(num_experts) * static_cast<size_t>(num_words) * 6 + 16;
  require_argument(bytes <= kSharedLimitBytes - 4096, "a step of ", call.num_tokens,
                   " tokens is too large to group by expert; lower the tokens per step");
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(group_tokens_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        kSharedLimitBytes - 4096));
  LaunchAttributes launch(kGroupThreads, bytes, 1, stream);
  launch.config.gridDim = dim3(static_cast<unsigned>((call.num_tokens + kBlockTokens - 1) / kBlockTokens));
  GLINT_CHECK_CUDA(
      cudaLaunchKernelEx(&launch.config, group_tokens_kernel, call, plan_tiles(call.num_tokens), num_experts));
}

}
