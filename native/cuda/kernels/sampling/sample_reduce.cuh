#pragma once

#include "cuda/kernels/sampling/sample_plan.cuh"

namespace glint::cuda {

__device__ __forceinline__ bool is_before(const RankedLogit& left, const RankedLogit& right) {
  return left.value > right.value || (left.value == right.value && left.token < right.token);
}

__device__ __forceinline__ bool is_before(const ScoredToken& left, const ScoredToken& right) {
  return left.score > right.score || (left.score == right.score && left.token < right.token);
}

__device__ __forceinline__ RankedLogit shuffled(const RankedLogit& item, int distance) {
  return {__shfl_xor_sync(kWholeWarp, item.value, distance), __shfl_xor_sync(kWholeWarp, item.token, distance)};
}

__device__ __forceinline__ ScoredToken shuffled(const ScoredToken& item, int distance) {
  return {__shfl_xor_sync(kWholeWarp, item.score, distance), __shfl_xor_sync(kWholeWarp, item.token, distance)};
}

template <typename Item>
__device__ __forceinline__ Item first_of_warp(Item item) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    const Item other = shuffled(item, distance);
    if (is_before(other, item)) item = other;
  }
  return item;
}

template <typename Item>
__device__ __forceinline__ Item first_of_thread_block(Item item, Item* s_items) {
  item = first_of_warp(item);
  if (SampleSlice::lane() == 0) s_items[SampleSlice::warp()] = item;
  __syncthreads();
  item = first_of_warp(s_items[SampleSlice::lane() % kSampleWarps]);
  __syncthreads();
  return item;
}

template <typename Item>
__device__ __forceinline__ Item first_of_cluster(SampleSlice& slice, Item item, Item* s_items, Item (&s_best)[2]) {
  Item* s_own = s_best + slice.next_turn();
  item = first_of_thread_block(item, s_items);
  if (SampleSlice::thread() == 0) *s_own = item;
  slice.cluster.sync();
  Item others[kSampleRanks];
#pragma unroll
  for (unsigned rank = 0; rank < kSampleRanks; ++rank) others[rank] = *slice.cluster.map_shared_rank(s_own, rank);
#pragma unroll
  for (const Item& other : others) {
    if (is_before(other, item)) item = other;
  }
  return item;
}

__device__ __forceinline__ uint64_t sum_of_cluster(SampleSlice& slice, uint64_t value) {
  uint64_t* s_own = slice.plan.sum + slice.next_turn();
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, distance);
  }
  if (SampleSlice::lane() == 0) slice.plan.warp_sums[SampleSlice::warp()] = value;
  __syncthreads();
  if (SampleSlice::thread() == 0) {
    uint64_t sum = 0;
    for (int warp = 0; warp < kSampleWarps; ++warp) sum += slice.plan.warp_sums[warp];
    *s_own = sum;
  }
  slice.cluster.sync();
  value = 0;
#pragma unroll
  for (unsigned rank = 0; rank < kSampleRanks; ++rank) value += *slice.cluster.map_shared_rank(s_own, rank);
  return value;
}

}
