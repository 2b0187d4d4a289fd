#pragma once

#include "cuda/attention.h"
#include "cuda/kernels/decode_row.cuh"
#include "cuda/kernels/hopper.cuh"
#include "cuda/kernels/page_ring.cuh"

namespace glint::cuda {

inline constexpr int kDecodeThreads = kDecodeConsumers + kWarpLanes;
inline constexpr int kDecodeStages = 4;
inline constexpr int kDecodeBlocksPerSm = 2;
inline constexpr int kDecodeCluster = 2;
inline constexpr int kPairPages = 2;
inline constexpr int kPairTokens = kPairPages * kPageTokens;
inline constexpr int kSharedPairs = 4;
inline constexpr int kSharedRounds = kSplitTokens / (kSharedPairs * kPairTokens);
inline constexpr int kWeightBytes = kMaxGroupHeads * kSlabRowBytes;

union PairSpace {
  float4 peer_scores[2][kDecodeConsumers];
  std::byte weights[kPairPages][kWeightBytes];
};

template <int kHeadDim>
struct DecodePlan {
  using Ring = PageRing<kHeadDim, kDecodeStages>;
  Ring ring;
  alignas(128) PairSpace pairs[kSharedRounds][kSharedPairs];
  uint64_t scores_arrived[kSharedRounds];
  uint64_t magnitudes_arrived;
  float magnitudes[kDecodeCluster * kDecodeWarps];
  float highest[kSharedPairs][kDecodeWarps][kMaxGroupHeads];
  float sums[kDecodeWarps][kWarpLanes][2];
  bool is_last;
};

struct DecodePlace {
  int32_t row;
  int32_t num_positions;
  int32_t split;
  int32_t num_splits;
  int32_t partial_first;
};

struct DecodeItem {
  DecodePlace task;
  const int32_t* pages;
  int kv_head;

  __device__ int first_position() const { return task.split * kSplitTokens; }
  __device__ int count() const { return min(kSplitTokens, task.num_positions - first_position()); }
  __device__ int page_count() const { return (count() + kPageTokens - 1) / kPageTokens; }
  __device__ int page_tokens(int page) const { return min(kPageTokens, count() - page * kPageTokens); }
};

__device__ __forceinline__ int count_decode_items(const DecodeCall& call) {
  return min(*call.num_tasks, call.max_tasks) * call.attend.num_kv_heads;
}

template <int kShare, typename Visit>
__device__ __forceinline__ void for_each_decode_item(const DecodeCall& call, int num_items, Visit visit) {
  const int num_kv_heads = call.attend.num_kv_heads;
  const int stride = static_cast<int>(gridDim.x) / kShare;
  for (int index = static_cast<int>(blockIdx.x) / kShare; index < num_items; index += stride) {
    const DecodeTask& task = call.tasks[index / num_kv_heads];
    const DecodePlace place{task.row, task.num_positions, task.split, task.num_splits, task.partial_first};
    visit(DecodeItem{place, task.pages, index % num_kv_heads});
  }
}

template <typename Plan>
struct PageLoader {
  const DecodeCall& call;
  Plan& plan;
  typename Plan::Ring::Place place;
  bool has_waited = false;

  __device__ PageLoader(const DecodeCall& given, Plan& shared) : call(given), plan(shared) {}

  __device__ __forceinline__ void wait_unless_stored(const DecodeItem& item, int last_page) {
    const int last = item.first_position() + last_page * kPageTokens + item.page_tokens(last_page);
    if (has_waited || (call.only_last_is_new && last < item.task.num_positions)) return;
    wait_for_previous_kernel();
    has_waited = true;
  }

  __device__ __forceinline__ void load_page(const DecodeItem& item, const std::byte* g_pages, const PageSource& source,
                                            int page) {
    wait_unless_stored(item, page);
    plan.ring.load_one_lane(place, g_pages + source.offset(page), item.page_tokens(page));
  }

  __device__ __forceinline__ void load_whole_pages(const DecodeItem& item) {
    const PageSource source{call.attend.pages, item.pages, item.kv_head};
    const int page_count = item.page_count();
    for (int page = 0; page < page_count; page += kPairPages) {
      const int pair_end = min(page + kPairPages, page_count);
      for (int own = page; own < pair_end; ++own) load_page(item, source.pages.keys, source, own);
      for (int own = page; own < pair_end; ++own) load_page(item, source.pages.values, source, own);
    }
  }

  __device__ __forceinline__ void load_value_slabs(const DecodeItem& item, const PageSource& source, int page,
                                                   int rank) {
    const int last = min(page + 1, item.page_count() - 1);
    wait_unless_stored(item, last);
    plan.ring.load_slab_pair_one_lane(place, source.values(page) + rank * kSlabBytes,
                                      source.values(last) + rank * kSlabBytes, item.count() - page * kPageTokens);
  }

  __device__ __forceinline__ void load_shared_pages(const DecodeItem& item, int rank) {
    constexpr int kRoundPages = kSharedPairs * kPairPages;
    const PageSource source{call.attend.pages, item.pages, item.kv_head};
    const int page_count = item.page_count();
    for (int page = 0; page < page_count; page += kRoundPages) {
      const int round_end = min(page + kRoundPages, page_count);
      for (int own = page + rank; own < round_end; own += kPairPages) load_page(item, source.pages.keys, source, own);
      for (int own = page; own < round_end; own += kPairPages) load_value_slabs(item, source, own, rank);
    }
  }
};

}
