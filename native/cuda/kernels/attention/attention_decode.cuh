#pragma once

#include <cmath>

#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/attention/pages.cuh"
#include "cuda/kernels/attention/softmax.cuh"
#include "cuda/kernels/ptx/memory.cuh"

namespace glint::cuda {

struct DecodePosition {
  int32_t row;
  int32_t num_positions;
  int32_t split;
  int32_t num_splits;
  int32_t partial_first;
  int32_t context_first;
};

struct DecodeItem {
  DecodePosition task;
  const int32_t* pages;
  int kv_head;
  int num_arrivals;

  __device__ int first_position() const { return task.split * kSplitTokens; }
  __device__ int count() const { return min(kSplitTokens, task.num_positions - first_position()); }
  __device__ int page_count() const { return (count() + kPageTokens - 1) / kPageTokens; }
  __device__ int page_tokens(int page) const { return min(kPageTokens, count() - page * kPageTokens); }
  __device__ int num_hidden() const { return task.context_first - first_position(); }
  __device__ bool has_newest() const { return task.split + 1 == task.num_splits; }
};

__device__ __forceinline__ int warp_group_place() { return static_cast<int>(threadIdx.y * gridDim.x + blockIdx.x); }

template <bool kHasOneKvHead>
struct DecodeScheduler {
  const DecodeCall& call;
  int index = warp_group_place();
  int num_tasks = 0;
  DecodePosition state = {};
  int num_tails = 0;

  __device__ __forceinline__ explicit DecodeScheduler(const DecodeCall& decode) : call(decode) { load(); }

  __device__ __forceinline__ int task_index() const { return kHasOneKvHead ? index : index / call.attend.num_kv_heads; }
  __device__ __forceinline__ int kv_head() const { return kHasOneKvHead ? 0 : index % call.attend.num_kv_heads; }
  __device__ __forceinline__ const int32_t* pages() const { return call.tasks[task_index()].pages; }
  __device__ __forceinline__ bool has_item() const { return task_index() < num_tasks && task_index() < call.max_tasks; }

  __device__ __forceinline__ void load() {
    num_tasks = *call.num_tasks;
    if (task_index() >= call.max_tasks) return;
    const DecodeTask& task = call.tasks[task_index()];
    state = {task.row, task.num_positions, task.split, task.num_splits, task.partial_first, task.context_first};
    num_tails = task.num_tails;
  }

  __device__ __forceinline__ void advance() {
    index += static_cast<int>(blockDim.y * gridDim.x);
    load();
  }
};

template <typename Scheduler, typename Visit>
__device__ __forceinline__ void for_each_decode_item(Scheduler scheduler, Visit visit) {
  for (; scheduler.has_item(); scheduler.advance()) {
#pragma unroll 1
    for (int part = scheduler.num_tails; part >= 0; --part) {
      DecodeItem item{scheduler.state, scheduler.pages() + part * kSplitPages, scheduler.kv_head(),
                      part == 0 ? 1 + scheduler.num_tails : 0};
      item.task.split += part;
      visit(item);
    }
  }
}

inline constexpr int kDecodeWarps = 4;
inline constexpr int kDecodeConsumers = kDecodeWarps * kWarpLanes;
inline constexpr int kWarpGroupThreads = kDecodeConsumers + kWarpLanes;
inline constexpr int kDecodeWarpGroups = 2;
inline constexpr int kDecodeThreads = kDecodeWarpGroups * kWarpGroupThreads;
inline constexpr int kDecodeStages = 6;
inline constexpr int kPairPages = 2;
inline constexpr int kStepTokens = 16;
inline constexpr int kWarpTokens = kPageTokens / kDecodeWarps;

template <typename PageTile>
struct DecodeStorage {
  using Tile = PageTile;
  using Ring = PageRing<Tile, kDecodeStages>;
  Ring ring;
  alignas(128) std::byte weights[kPairPages][kMaxGroupHeads * kSlabRowBytes];
  float highest[kDecodeWarps][kMaxGroupHeads];
  float sums[kDecodeWarps][kWarpLanes][2];
  bool is_last;
};

template <typename Tile, bool kIsWhole>
struct DecodeLane {
  using Storage = DecodeStorage<Tile>;
  static constexpr int kHeadDim = Tile::kHeadDim;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kWarpDims = kHeadDim / kDecodeWarps;
  static constexpr int kDimTiles = kWarpDims / 8;
  static constexpr bool kHidesEarlier = true;

  Storage& storage;
  ptx::FragmentA query[kSteps];
  ptx::FragmentC sums[kDimTiles];
  int exponent[2];
  float weight_sum[2];

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % kWarpLanes; }
  __device__ static int warp() { return thread() / kWarpLanes; }
  __device__ static int row(int half) { return lane() / 4 + 8 * half; }
  __device__ static int head_dim(const AttendCall& call) { return kIsWhole ? kHeadDim : call.head_dim; }

  __device__ explicit DecodeLane(Storage& shared) : storage(shared) {}

  __device__ __forceinline__ void start(const DecodeCall& decode, const DecodeItem& item) {
    const AttendCall& call = decode.attend;
    const int group_heads = call.num_heads / call.num_kv_heads;
    const uint16_t* g_query =
        call.query + (int64_t{item.task.row} * call.num_heads + item.kv_head * group_heads) * kHeadDim;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        const int dim = step * 16 + lane() % 4 * 2 + reg / 2 * 8;
        const bool is_head = row(reg % 2) < group_heads;
        query[step].regs[reg] =
            is_head ? *reinterpret_cast<const uint32_t*>(g_query + row(reg % 2) * kHeadDim + dim) : 0U;
      }
    }
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) sums[tile] = {};
    exponent[0] = exponent[1] = kLowestExponent;
    weight_sum[0] = weight_sum[1] = 0.0F;
  }

  template <int kPages>
  __device__ __forceinline__ void score(ptx::FragmentC (&scores)[kPairPages][2],
                                        const std::byte* const (&s_keys)[kPairPages]) const {
#pragma unroll
    for (int page = 0; page < kPages; ++page) scores[page][0] = scores[page][1] = {};
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
        uint32_t keys[2][4];
        Tile::load_keys(keys, s_keys[page], warp() * kWarpTokens, step);
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          ptx::mma_m16n8k16_bf16(scores[page][0], query[step + next], keys[next][0], keys[next][1]);
          ptx::mma_m16n8k16_bf16(scores[page][1], query[step + next], keys[next][2], keys[next][3]);
        }
      }
    }
  }

  __device__ __forceinline__ void hide(ptx::FragmentC (&scores)[2], int visible) const {
#pragma unroll
    for (int index = 0; index < 8; ++index) {
      float& score = scores[index / 4].values[index % 4];
      if (!is_visible(index / 4, index % 4, visible)) score = -INFINITY;
    }
  }

  __device__ __forceinline__ void hide_earlier(ptx::FragmentC (&scores)[2], int hidden) const {
#pragma unroll
    for (int index = 0; index < 8; ++index) {
      float& score = scores[index / 4].values[index % 4];
      if (is_visible(index / 4, index % 4, hidden)) score = -INFINITY;
    }
  }

  __device__ __forceinline__ bool is_visible(int tile, int element, int visible) const {
    return warp() * kWarpTokens + tile * 8 + lane() % 4 * 2 + element % 2 < visible;
  }

  template <int kPages>
  __device__ __forceinline__ void share_highest(const ptx::FragmentC (&scores)[kPairPages][2], float scale) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int tile = 0; tile < 2 * kPages; ++tile) {
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        highest[element / 2] = fmaxf(highest[element / 2], scores[tile / 2][tile % 2].values[element]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(max_of_quad(highest[half]) * scale, static_cast<float>(kLowestExponent));
      if (lane() % 4 == 0) storage.highest[warp()][row(half)] = highest[half];
    }
  }

  __device__ __forceinline__ void raise_exponents() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = storage.highest[0][row(half)];
#pragma unroll
      for (int other = 1; other < kDecodeWarps; ++other) highest = fmaxf(highest, storage.highest[other][row(half)]);
      const int raised = max(exponent[half], covering_exponent(highest));
      const float keep = power_of_two(exponent[half] - raised);
      exponent[half] = raised;
      weight_sum[half] *= keep;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        sums[tile].values[2 * half] *= keep;
        sums[tile].values[2 * half + 1] *= keep;
      }
    }
  }

  __device__ __forceinline__ void weigh(std::byte* s_weights, const ptx::FragmentC (&scores)[2], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float group_sum = 0.0F;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float weights[2];
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          weights[column] =
              ptx::ex2_approx(fmaf(scores[tile].values[2 * half + column], scale, static_cast<float>(-exponent[half])));
          group_sum += weights[column];
        }
        const int token = warp() * kWarpTokens + tile * 8 + lane() % 4 * 2;
        *reinterpret_cast<uint32_t*>(s_weights + swizzled_offset(row(half), token)) =
            ptx::pack_bf16(weights[0], weights[1]);
      }
      weight_sum[half] += group_sum;
    }
  }

  template <int kCount>
  __device__ __forceinline__ void add_steps(const std::byte* s_weights, const std::byte* s_values, int first) {
    ptx::FragmentA weights[kCount];
    uint32_t values[kCount][kDimTiles][2];
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      ptx::ldmatrix_x4(weights[step].regs,
                       swizzled_address(s_weights, lane() % 16, (first + step) * kStepTokens + lane() / 16 * 8));
      Tile::load_values(values[step], s_values, (first + step) * kStepTokens, warp() * kWarpDims);
    }
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        ptx::mma_m16n8k16_bf16(sums[tile], weights[step], values[step][tile][0], values[step][tile][1]);
      }
    }
  }

  __device__ __forceinline__ void add_values(const std::byte* s_weights, const std::byte* s_values, int visible) {
    constexpr int kPageSteps = kPageTokens / kStepTokens;
    if (visible >= kPageTokens) return add_steps<kPageSteps>(s_weights, s_values, 0);
#pragma unroll 1
    for (int step = 0; step * kStepTokens < visible; ++step) add_steps<1>(s_weights, s_values, step);
  }

  __device__ __forceinline__ float last_sum() const { return sums[kDimTiles - 1].values[3]; }

  __device__ __forceinline__ void reduce_weight_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) storage.sums[warp()][lane()][half] = weight_sum[half];
    sync_consumers<kDecodeConsumers>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = storage.sums[0][lane()][half];
#pragma unroll
      for (int group = 1; group < kDecodeWarps; ++group) sum += storage.sums[group][lane()][half];
      weight_sum[half] = sum_of_quad(sum);
    }
  }

  __device__ __forceinline__ void put_newest_key(std::byte*, int) const {}
  __device__ __forceinline__ void put_newest_value(std::byte*, int) const {}

  __device__ __forceinline__ void close_values(typename Storage::Ring::State state, int visible) {
    if (visible > kPageTokens) return;
    storage.ring.template zero_tokens<kDecodeConsumers>(state, visible,
                                                        (visible + kStepTokens - 1) / kStepTokens * kStepTokens);
    ptx::fence_proxy_async();
    sync_consumers<kDecodeConsumers>();
  }

  __device__ __forceinline__ void zero_earlier_values(typename Storage::Ring::State state, int hidden) {
    if (hidden <= 0) return;
    storage.ring.template zero_tokens<kDecodeConsumers>(state, 0, min(hidden, kPageTokens));
    ptx::fence_proxy_async();
    sync_consumers<kDecodeConsumers>();
  }

  __device__ __forceinline__ void store_out(const DecodeCall& decode, const DecodeItem& item) const {
    const AttendCall& call = decode.attend;
    const int group_heads = call.num_heads / call.num_kv_heads;
    float* g_out = call.out + (int64_t{item.task.row} * call.num_heads + item.kv_head * group_heads) * head_dim(call);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= group_heads) continue;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        const int dim = warp() * kWarpDims + tile * 8 + lane() % 4 * 2;
        if (!kIsWhole && dim >= call.head_dim) continue;
        *reinterpret_cast<float2*>(g_out + row(half) * head_dim(call) + dim) =
            make_float2(__fdiv_rn(sums[tile].values[2 * half], weight_sum[half]),
                        __fdiv_rn(sums[tile].values[2 * half + 1], weight_sum[half]));
      }
    }
  }

  __device__ __forceinline__ static float* partial(const DecodeCall& call, const DecodeItem& item, int split) {
    const int64_t index = int64_t{item.task.partial_first + split} * call.attend.num_kv_heads + item.kv_head;
    return call.partials + index * partial_floats(kHeadDim);
  }

  __device__ __forceinline__ void store_partial(float* g_partial) const {
    float* g_sums = g_partial + 2 * kMaxGroupHeads;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const ptx::FragmentC& sum = sums[tile];
      reinterpret_cast<float4*>(g_sums)[tile * kDecodeConsumers + thread()] =
          make_float4(sum.values[0], sum.values[1], sum.values[2], sum.values[3]);
    }
    if (warp() == 0 && lane() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        g_partial[row(half)] = __int_as_float(exponent[half]);
        g_partial[kMaxGroupHeads + row(half)] = weight_sum[half];
      }
    }
  }

  __device__ __forceinline__ void reduce_partial(SplitReduction (&reductions)[2], const float* g_partial) {
    const float* g_sums = g_partial + 2 * kMaxGroupHeads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reductions[half].add(__float_as_int(__ldcg(g_partial + row(half))),
                           __ldcg(g_partial + kMaxGroupHeads + row(half)));
    }
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float4 split = __ldcg(reinterpret_cast<const float4*>(g_sums) + tile * kDecodeConsumers + thread());
      sums[tile].values[0] = reductions[0].reduced(sums[tile].values[0], split.x);
      sums[tile].values[1] = reductions[0].reduced(sums[tile].values[1], split.y);
      sums[tile].values[2] = reductions[1].reduced(sums[tile].values[2], split.z);
      sums[tile].values[3] = reductions[1].reduced(sums[tile].values[3], split.w);
    }
  }

  __device__ __forceinline__ bool announce_partial(const DecodeCall& call, const DecodeItem& item) {
    if (item.num_arrivals == 0) return false;
    sync_consumers<kDecodeConsumers>();
    if (thread() == 0) {
      int32_t* g_arrivals = call.arrivals + item.task.row * call.attend.num_kv_heads + item.kv_head;
      storage.is_last =
          ptx::atom_add_acq_rel_gpu(g_arrivals, item.num_arrivals) == item.task.num_splits - item.num_arrivals;
      if (storage.is_last) *g_arrivals = 0;
    }
    sync_consumers<kDecodeConsumers>();
    return storage.is_last;
  }

  __device__ __forceinline__ bool reduce_splits(const DecodeCall& call, const DecodeItem& item) {
    store_partial(partial(call, item, item.task.split));
    if (!announce_partial(call, item)) return false;
    SplitReduction reductions[2];
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) sums[tile] = {};
#pragma unroll 4
    for (int split = 0; split < item.task.num_splits; ++split) reduce_partial(reductions, partial(call, item, split));
    weight_sum[0] = reductions[0].weight_sum;
    weight_sum[1] = reductions[1].weight_sum;
    return true;
  }
};

template <typename Item, typename Scheduler, typename Ring>
__device__ __forceinline__ void load_decode_pages(const Scheduler& scheduler, Ring& ring) {
  typename Ring::State state;
  for_each_decode_item(scheduler, [&](const DecodeItem& item) {
    const PageSource source{scheduler.call.attend.pages, item.pages, item.kv_head};
    load_page_pairs(ring, state, source, Item{item});
  });
}

template <int kPages, typename Lane>
__device__ __forceinline__ void attend_pages(Lane& work, typename Lane::Storage::Ring::State& state, int visible,
                                             int hidden, float scale) {
  typename Lane::Storage& storage = work.storage;
  ptx::FragmentC scores[kPairPages][2];
  const std::byte* s_keys[kPairPages] = {};
  auto arriving = state;
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    std::byte* s_page = storage.ring.wait_until_arrived(arriving);
    work.put_newest_key(s_page, visible - page * kPageTokens);
    s_keys[page] = s_page;
    arriving.advance();
  }
  work.template score<kPages>(scores, s_keys);
  if (visible < kPages * kPageTokens) work.hide(scores[kPages - 1], visible - (kPages - 1) * kPageTokens);
#pragma unroll
  for (int page = 0; page < kPages; ++page) storage.ring.release(state, scores[kPages - 1][1].values[3]);
  if (Lane::kHidesEarlier && hidden > 0) {
#pragma unroll
    for (int page = 0; page < kPages; ++page) work.hide_earlier(scores[page], hidden - page * kPageTokens);
  }
  work.template share_highest<kPages>(scores, scale);
  sync_consumers<kDecodeConsumers>();
  work.raise_exponents();
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    work.weigh(storage.weights[page], scores[page], scale);
  }
  sync_consumers<kDecodeConsumers>();
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    std::byte* s_values = storage.ring.wait_until_arrived(state);
    work.put_newest_value(s_values, visible - page * kPageTokens);
    if (Lane::kHidesEarlier) work.zero_earlier_values(state, hidden - page * kPageTokens);
    work.close_values(state, visible - page * kPageTokens);
    work.add_values(storage.weights[page], s_values, visible - page * kPageTokens);
    storage.ring.release(state, work.last_sum());
  }
}

template <typename Lane, typename Call, typename Scheduler>
__device__ __forceinline__ void attend_decode_pages(Lane& work, const Call& call, const Scheduler& scheduler) {
  const DecodeCall& decode = call;
  const float scale = kLog2E / sqrtf(static_cast<float>(Lane::head_dim(decode.attend)));
  typename Lane::Storage::Ring::State state;
  for_each_decode_item(scheduler, [&](const DecodeItem& item) {
    work.start(call, item);
    for (int first = 0; first < item.count(); first += kPairPages * kPageTokens) {
      const int visible = item.count() - first;
      const int hidden = item.num_hidden() - first;
      if (visible > kPageTokens) {
        attend_pages<kPairPages>(work, state, visible, hidden, scale);
      } else {
        attend_pages<1>(work, state, visible, hidden, scale);
      }
    }
    work.reduce_weight_sums();
    if (item.task.num_splits > 1 && !work.reduce_splits(decode, item)) return;
    work.store_out(call, item);
  });
}

template <typename Tile, bool kIsWhole>
__global__ void __launch_bounds__(kDecodeThreads, 1) attention_decode_kernel(const DecodeCall call) {
  extern __shared__ std::byte s_memory[];
  auto& storage = reinterpret_cast<DecodeStorage<Tile>*>(aligned_storage(s_memory))[threadIdx.y];
  ptx::griddepcontrol_launch_dependents();
  storage.ring.template prepare<kDecodeWarps>();
  ptx::griddepcontrol_wait();
  if (threadIdx.x < kDecodeConsumers) {
    DecodeLane<Tile, kIsWhole> work(storage);
    attend_decode_pages(work, call, DecodeScheduler<false>(call));
  } else if (threadIdx.x == kDecodeConsumers) {
    load_decode_pages<DecodeItem>(DecodeScheduler<false>(call), storage.ring);
  }
}

}
