#pragma once

#include "cuda/attention.h"

namespace glint::cuda {

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
  int num_arrivals;

  __device__ int first_position() const { return task.split * kSplitTokens; }
  __device__ int count() const { return min(kSplitTokens, task.num_positions - first_position()); }
  __device__ int page_count() const { return (count() + kPageTokens - 1) / kPageTokens; }
  __device__ int page_tokens(int page) const { return min(kPageTokens, count() - page * kPageTokens); }
  __device__ bool has_newest() const { return task.split + 1 == task.num_splits; }
};

template <typename Visit>
__device__ __forceinline__ void for_each_decode_item(const DecodeCall& call, Visit visit) {
  const int num_kv_heads = call.attend.num_kv_heads;
  const int num_items = *call.num_tasks * num_kv_heads;
  const int max_items = call.max_tasks * num_kv_heads;
  for (int index = static_cast<int>(blockIdx.x); index < max_items; index += static_cast<int>(gridDim.x)) {
    const DecodeTask& task = call.tasks[index / num_kv_heads];
    const DecodePlace place{task.row, task.num_positions, task.split, task.num_splits, task.partial_first};
    const int num_tails = task.num_tails;
    if (index >= num_items) return;
#pragma unroll 1
    for (int part = num_tails; part >= 0; --part) {
      DecodeItem item{place, task.pages + part * kSplitPages, index % num_kv_heads, part == 0 ? 1 + num_tails : 0};
      item.task.split += part;
      visit(item);
    }
  }
}

__device__ __forceinline__ int add_to_arrivals(int32_t* g_arrivals, int count) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(g_arrivals), "r"(count)
               : "memory");
  return before;
}

}
