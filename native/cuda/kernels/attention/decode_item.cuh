#pragma once

#include "cuda/kernels/attention/attention.h"

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

__device__ __forceinline__ int team_place() { return static_cast<int>(threadIdx.y * gridDim.x + blockIdx.x); }

template <bool kHasOneKvHead>
struct DecodeTurn {
  const DecodeCall& call;
  int index = team_place();
  int num_tasks = 0;
  DecodePlace place = {};
  int num_tails = 0;

  __device__ __forceinline__ explicit DecodeTurn(const DecodeCall& decode) : call(decode) { load(); }

  __device__ __forceinline__ int task_index() const { return kHasOneKvHead ? index : index / call.attend.num_kv_heads; }
  __device__ __forceinline__ int kv_head() const { return kHasOneKvHead ? 0 : index % call.attend.num_kv_heads; }
  __device__ __forceinline__ const int32_t* pages() const { return call.tasks[task_index()].pages; }
  __device__ __forceinline__ bool has_item() const {
    return task_index() < num_tasks && task_index() < call.max_tasks;
  }

  __device__ __forceinline__ void load() {
    num_tasks = *call.num_tasks;
    if (task_index() >= call.max_tasks) return;
    const DecodeTask& task = call.tasks[task_index()];
    place = {task.row, task.num_positions, task.split, task.num_splits, task.partial_first};
    num_tails = task.num_tails;
  }

  __device__ __forceinline__ void advance() {
    index += static_cast<int>(blockDim.y * gridDim.x);
    load();
  }
};

template <typename Turn, typename Visit>
__device__ __forceinline__ void for_each_decode_item(Turn turn, Visit visit) {
  for (; turn.has_item(); turn.advance()) {
#pragma unroll 1
    for (int part = turn.num_tails; part >= 0; --part) {
      DecodeItem item{turn.place, turn.pages() + part * kSplitPages, turn.kv_head(),
                      part == 0 ? 1 + turn.num_tails : 0};
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
