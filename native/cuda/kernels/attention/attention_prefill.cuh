#pragma once

#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/attention/pages.cuh"
#include "cuda/kernels/attention/softmax.cuh"

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
  typename Ring::State state;
  for_each_prefill_item(call, [&](const PrefillItem& item) {
    const PageSource source{call.attend.pages, call.attend.page_table + item.task.page_first, item.kv_head};
    load_page_pairs(ring, state, source, item);
  });
}

inline constexpr int kPrefillWarps = kPrefillTileQueries / 16;
inline constexpr int kPrefillConsumers = kPrefillWarps * kWarpLanes;
inline constexpr int kPrefillThreads = kPrefillConsumers + kWarpLanes;
inline constexpr int kPrefillStages = 8;
inline constexpr int kTokenTiles = kPageTokens / 8;
inline constexpr int kTokenGroups = kPageTokens / 16;

template <int kHeadDim>
struct PrefillStorage {
  using Ring = PageRing<Bf16Tile<kHeadDim>, kPrefillStages>;
  Ring ring;
  alignas(128) std::byte query[kPrefillWarps][kHeadDim / kSlabDims][16 * kSlabRowBytes];
  float4 totals[kHeadDim / 8][kPrefillConsumers];
};

template <int kHeadDim, bool kIsWhole>
struct PrefillLane {
  using Storage = PrefillStorage<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kDimTiles = kHeadDim / 8;

  Storage& storage;
  ptx::FragmentC scores[2][kTokenTiles];
  ptx::FragmentC sums[kDimTiles];
  SplitReduction reductions[2];
  int num_visible[2];
  int exponent[2];
  float weight_sums[kTokenGroups][2];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
  __device__ static int row(int half) {
    return static_cast<int>(threadIdx.x) / kWarpLanes * 16 + lane() / 4 + 8 * half;
  }

  __device__ static int head_dim(const AttendCall& call) { return kIsWhole ? kHeadDim : call.head_dim; }

  __device__ explicit PrefillLane(Storage& shared) : storage(shared) {}

  __device__ __forceinline__ void start(const AttendCall& call, const PrefillItem& item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_query = item.is_query(row(half));
      const uint16_t* g_query = call.query + item.query_offset(row(half), call.num_heads, kHeadDim);
#pragma unroll
      for (int dim = lane() % 4 * kChunkDims; dim < kHeadDim; dim += 4 * kChunkDims) {
        *reinterpret_cast<uint4*>(query_place(row(half) % 16, dim)) =
            is_query ? *reinterpret_cast<const uint4*>(g_query + dim) : uint4{};
      }
      reductions[half] = {};
      num_visible[half] = item.num_visible(row(half));
    }
    __syncwarp();
    start_split();
  }

  __device__ __forceinline__ std::byte* query_place(int query_row, int dim) const {
    const int chunk = (dim % kSlabDims / kChunkDims) ^ (query_row % kChunkDims);
    return storage.query[threadIdx.x / kWarpLanes][dim / kSlabDims] + query_row * kSlabRowBytes + chunk * kChunkBytes;
  }

  __device__ __forceinline__ void start_split() {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) sums[tile] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exponent[half] = kLowestExponent;
#pragma unroll
      for (int group = 0; group < kTokenGroups; ++group) weight_sums[group][half] = 0.0F;
    }
  }

  __device__ __forceinline__ void score(ptx::FragmentC (&page_scores)[kTokenTiles], const std::byte* s_keys) const {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) page_scores[tile] = {};
#pragma unroll 2
    for (int step = 0; step < kSteps; ++step) {
      ptx::FragmentA query;
      ptx::ldmatrix_x4(query.regs, ptx::shared_address(query_place(lane() % 16, step * 16 + lane() / 16 * 8)));
#pragma unroll
      for (int group = 0; group < kTokenGroups; ++group) {
        const int token = group * 16 + lane() / 16 * 8 + lane() % 8;
        uint32_t keys[4];
        ptx::ldmatrix_x4(keys, swizzled_address(s_keys, token, step * 16 + lane() / 8 % 2 * 8));
        ptx::mma_m16n8k16_bf16(page_scores[2 * group], query, keys[0], keys[1]);
        ptx::mma_m16n8k16_bf16(page_scores[2 * group + 1], query, keys[2], keys[3]);
      }
    }
  }

  __device__ __forceinline__ void hide_later_positions(ptx::FragmentC (&page_scores)[kTokenTiles], int first_position) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = num_visible[half] - first_position;
      if (visible >= kPageTokens) continue;
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const bool is_visible = tile * 8 + lane() % 4 * 2 + column < visible;
          if (!is_visible) page_scores[tile].values[2 * half + column] = -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void raise_exponents(int num_pages, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -INFINITY;
#pragma unroll
      for (int page = 0; page < 2; ++page) {
        if (page >= num_pages) break;
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          highest = fmaxf(highest, scores[page][tile].values[2 * half]);
          highest = fmaxf(highest, scores[page][tile].values[2 * half + 1]);
        }
      }
      const int raised = max(exponent[half], covering_exponent(max_of_quad(highest) * scale));
      if (raised == exponent[half]) continue;
      const float keep = power_of_two(exponent[half] - raised);
      exponent[half] = raised;
#pragma unroll
      for (int group = 0; group < kTokenGroups; ++group) weight_sums[group][half] *= keep;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        sums[tile].values[2 * half] *= keep;
        sums[tile].values[2 * half + 1] *= keep;
      }
    }
  }

  __device__ __forceinline__ void weigh(ptx::FragmentC (&page_scores)[kTokenTiles], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto shift = static_cast<float>(-exponent[half]);
#pragma unroll
      for (int group = 0; group < kTokenGroups; ++group) {
        float group_sum = 0.0F;
#pragma unroll
        for (int tile = 2 * group; tile < 2 * group + 2; ++tile) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            float& value = page_scores[tile].values[2 * half + column];
            value = ptx::ex2_approx(fmaf(value, scale, shift));
            group_sum += value;
          }
        }
        weight_sums[group][half] += group_sum;
      }
    }
  }

  __device__ __forceinline__ void add_values(const ptx::FragmentC (&page_scores)[kTokenTiles],
                                             const std::byte* s_values) {
#pragma unroll
    for (int group = 0; group < kTokenGroups; ++group) {
      const ptx::FragmentC& low = page_scores[2 * group];
      const ptx::FragmentC& high = page_scores[2 * group + 1];
      const ptx::FragmentA weights{
          {ptx::pack_bf16(low.values[0], low.values[1]), ptx::pack_bf16(low.values[2], low.values[3]),
           ptx::pack_bf16(high.values[0], high.values[1]), ptx::pack_bf16(high.values[2], high.values[3])}};
#pragma unroll
      for (int tile = 0; tile < kDimTiles; tile += 2) {
        uint32_t values[4];
        ptx::ldmatrix_x4_trans(values,
                               swizzled_address(s_values, group * 16 + lane() % 16, tile * 8 + lane() / 16 * 8));
        ptx::mma_m16n8k16_bf16(sums[tile], weights, values[0], values[1]);
        ptx::mma_m16n8k16_bf16(sums[tile + 1], weights, values[2], values[3]);
      }
    }
  }

  __device__ __forceinline__ void reduce_split(bool is_first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = weight_sums[0][half];
#pragma unroll
      for (int group = 1; group < kTokenGroups; ++group) sum += weight_sums[group][half];
      reductions[half].add(exponent[half], sum_of_quad(sum));
    }
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      float4& total = storage.totals[tile][threadIdx.x];
      const float4 before = is_first ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : total;
      total = make_float4(
          reductions[0].reduced(before.x, sums[tile].values[0]), reductions[0].reduced(before.y, sums[tile].values[1]),
          reductions[1].reduced(before.z, sums[tile].values[2]), reductions[1].reduced(before.w, sums[tile].values[3]));
    }
    start_split();
  }

  __device__ __forceinline__ void store_out(const AttendCall& call, const PrefillItem& item) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!item.is_query(row(half))) continue;
      float* g_out = call.out + item.query_offset(row(half), call.num_heads, head_dim(call));
      const float weight_sum = reductions[half].weight_sum;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        const int dim = tile * 8 + lane() % 4 * 2;
        if (!kIsWhole && dim >= call.head_dim) continue;
        const float4 total = storage.totals[tile][threadIdx.x];
        const float2 pair = half == 0 ? make_float2(total.x, total.y) : make_float2(total.z, total.w);
        *reinterpret_cast<float2*>(g_out + dim) =
            make_float2(__fdiv_rn(pair.x, weight_sum), __fdiv_rn(pair.y, weight_sum));
      }
    }
  }
};

template <typename Lane>
__device__ __forceinline__ void attend_pair(Lane& work, typename Lane::Storage::Ring::State& state,
                                            const PrefillItem& item, int first_page, float scale) {
  auto& ring = work.storage.ring;
  const int num_pages = min(2, item.page_count() - first_page);
#pragma unroll
  for (int page = 0; page < 2; ++page) {
    if (page >= num_pages) break;
    work.score(work.scores[page], ring.wait_until_arrived(state));
    ring.release(state);
    work.hide_later_positions(work.scores[page], (first_page + page) * kPageTokens);
  }
  work.raise_exponents(num_pages, scale);
#pragma unroll
  for (int page = 0; page < 2; ++page) {
    if (page >= num_pages) break;
    work.weigh(work.scores[page], scale);
    const std::byte* s_values = ring.wait_until_arrived(state);
    ring.template zero_tail<kPrefillConsumers>(state, item.page_tokens(first_page + page));
    work.add_values(work.scores[page], s_values);
    ring.release(state);
  }
}

template <typename Lane>
__device__ __forceinline__ void attend_prefill_pages(const PrefillCall& call, typename Lane::Storage& storage) {
  const float scale = kLog2E / sqrtf(static_cast<float>(Lane::head_dim(call.attend)));
  typename Lane::Storage::Ring::State state;
  Lane work(storage);
  for_each_prefill_item(call, [&](const PrefillItem& item) {
    const int page_count = item.page_count();
    work.start(call.attend, item);
    for (int page = 0; page < page_count; page += 2) {
      attend_pair(work, state, item, page, scale);
      const bool is_split_end = page % kSplitPages == kSplitPages - 2 || page + 2 >= page_count;
      if (is_split_end) work.reduce_split(page < kSplitPages);
    }
    work.store_out(call.attend, item);
  });
}

template <int kHeadDim, bool kIsWhole>
__global__ void __launch_bounds__(kPrefillThreads, 1) attention_prefill_kernel(const PrefillCall call) {
  extern __shared__ std::byte s_memory[];
  auto& storage = *reinterpret_cast<PrefillStorage<kHeadDim>*>(aligned_storage(s_memory));
  ptx::griddepcontrol_launch_dependents();
  storage.ring.template prepare<kPrefillWarps>();
  ptx::griddepcontrol_wait();
  if (threadIdx.x < kPrefillConsumers) {
    attend_prefill_pages<PrefillLane<kHeadDim, kIsWhole>>(call, storage);
  } else if (threadIdx.x == kPrefillConsumers) {
    load_prefill_pages(call, storage.ring);
  }
}

}
