#pragma once

#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/attention/page_ring.cuh"

namespace glint::cuda {

struct PrefillItem {
  PrefillTask task;
  int kv_head;
  int group_heads;

  __device__ int num_queries() const { return task.row_count * group_heads; }
  __device__ int token(int query) const { return min(task.query_first + query, num_queries() - 1) / group_heads; }
  __device__ int num_positions() const { return num_visible(kPrefillTileQueries - 1); }
  __device__ int page_count() const { return (num_positions() + kPageTokens - 1) / kPageTokens; }
  __device__ int page_tokens(int page) const { return min(kPageTokens, num_positions() - page * kPageTokens); }
  __device__ int num_visible(int query) const { return task.first_position + token(query) + 1; }
  __device__ bool is_query(int query) const { return task.query_first + query < num_queries(); }
  __device__ int64_t query_offset(int query, int num_heads, int head_dim) const {
    const int index = task.query_first + query;
    const int head = kv_head * group_heads + index % group_heads;
    return (int64_t{task.row_first + index / group_heads} * num_heads + head) * head_dim;
  }
};

template <typename Visit>
__device__ __forceinline__ void for_each_prefill_item(const PrefillCall& call, Visit visit) {
  const int num_kv_heads = call.attend.num_kv_heads;
  const int num_items = *call.num_tasks * num_kv_heads;
  const int there = static_cast<int>(blockIdx.x);
  const int back = static_cast<int>(gridDim.x) - 1 - there;
  for (int first = 0, round = 0; first < num_items; first += static_cast<int>(gridDim.x), ++round) {
    const int index = first + (round % 2 == 0 ? there : back);
    if (index >= num_items) return;
    visit(PrefillItem{call.tasks[index / num_kv_heads], index % num_kv_heads, call.attend.num_heads / num_kv_heads});
  }
}

template <typename Ring>
__device__ __forceinline__ void load_prefill_pages(const PrefillCall& call, Ring& ring) {
  typename Ring::Place place;
  for_each_prefill_item(call, [&](const PrefillItem& item) {
    const PageSource source{call.attend.pages, call.attend.page_table + item.task.page_first, item.kv_head};
    load_page_pairs(ring, place, source, item);
  });
}

}
