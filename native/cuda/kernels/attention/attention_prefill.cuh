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

struct PrefillWalk {
  const PrefillCall& call;
  int first = 0;
  bool is_backwards = false;

  __device__ explicit PrefillWalk(const PrefillCall& prefill) : call(prefill) {}

  __device__ __forceinline__ int index() const {
    const auto thread_block = static_cast<int>(blockIdx.x);
    return first + (is_backwards ? static_cast<int>(gridDim.x) - 1 - thread_block : thread_block);
  }
  __device__ __forceinline__ bool has_item() const { return index() < *call.num_tasks * call.attend.num_kv_heads; }
  __device__ __forceinline__ PrefillItem item() const {
    const int num_kv_heads = call.attend.num_kv_heads;
    return {call.tasks[index() / num_kv_heads], index() % num_kv_heads, call.attend.num_heads / num_kv_heads};
  }
  __device__ __forceinline__ void advance() {
    first += static_cast<int>(gridDim.x);
    is_backwards = !is_backwards;
  }
};

inline constexpr int kPrefillWarps = kPrefillTileQueries / 16;
inline constexpr int kPrefillThreads = kPrefillWarps * kWarpLanes;
inline constexpr int kPrefillStages = 8;
inline constexpr int kTokenTiles = kPageTokens / 8;
inline constexpr int kTokenGroups = kPageTokens / 16;
inline constexpr int kTokenGroupBytes = 16 * kSlabRowBytes;

template <int kHeadDim>
struct PrefillStorage {
  using Ring = PageRing<Bf16Tile<kHeadDim>, kPrefillStages>;
  Ring ring;
  float4 totals[kHeadDim / 8][kPrefillThreads];
};

template <typename Ring>
struct PrefillLoader {
  const PrefillCall& call;
  Ring& ring;
  PrefillWalk walk;
  typename Ring::State state;
  const int32_t* g_table = nullptr;
  int64_t head_offset = 0;
  int num_positions = 0;
  int page = 0;
  int page_ids[2] = {};

  __device__ PrefillLoader(const PrefillCall& prefill, Ring& pages) : call(prefill), ring(pages), walk(prefill) {}

  __device__ __forceinline__ static bool is_loading_lane() { return threadIdx.x == 0; }

  __device__ __forceinline__ int tokens_left(int next) const { return num_positions - (page + next) * kPageTokens; }

  __device__ __forceinline__ void start_pair() {
    if (tokens_left(0) <= 0) start_item();
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      if (tokens_left(next) > 0) page_ids[next] = g_table[page + next];
    }
  }

  __device__ __forceinline__ void start_item() {
    page = 0;
    num_positions = 0;
    if (!walk.has_item()) return;
    const PrefillItem item = walk.item();
    walk.advance();
    num_positions = item.num_positions();
    g_table = call.attend.page_table + item.task.page_first;
    head_offset = item.kv_head * call.attend.pages.head_bytes;
  }

  __device__ __forceinline__ void load_pages(const std::byte* g_pages) {
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      if (tokens_left(next) <= 0) continue;
      ring.load_one_lane(state, g_pages + page_ids[next] * call.attend.pages.page_bytes + head_offset,
                         min(kPageTokens, tokens_left(next)));
    }
  }

  __device__ __forceinline__ void begin() {
    if (is_loading_lane()) start_pair();
    load_keys();
    load_values();
  }

  __device__ __forceinline__ void load_keys() {
    if (is_loading_lane()) load_pages(call.attend.pages.keys);
    __syncwarp();
  }

  __device__ __forceinline__ void load_values() {
    if (is_loading_lane()) {
      load_pages(call.attend.pages.values);
      page += 2;
      start_pair();
    }
    __syncwarp();
  }
};

template <int kHeadDim, bool kIsWhole>
struct PrefillLane {
  using Storage = PrefillStorage<kHeadDim>;
  using Ring = typename Storage::Ring;
  using State = typename Ring::State;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kDimTiles = kHeadDim / 8;

  Storage& storage;
  ptx::FragmentA query[kSteps];
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
      for (int step = 0; step < kSteps; ++step) {
        const int dim = step * 16 + lane() % 4 * 2;
        query[step].regs[half] = is_query ? *reinterpret_cast<const uint32_t*>(g_query + dim) : 0U;
        query[step].regs[half + 2] = is_query ? *reinterpret_cast<const uint32_t*>(g_query + dim + 8) : 0U;
      }
      reductions[half] = {};
      num_visible[half] = item.num_visible(row(half));
    }
    start_split();
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

  template <int kPages>
  __device__ __forceinline__ void wait_for_pages(uint32_t (&s_pages)[kPages], State state) const {
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      s_pages[page] = ptx::shared_address(storage.ring.wait_until_arrived(state));
      state.advance();
    }
  }

  template <int kPages>
  __device__ __forceinline__ void release_pages(State& state) const {
#pragma unroll
    for (int page = 0; page < kPages; ++page) storage.ring.release(state);
  }

  template <int kPages>
  __device__ __forceinline__ void zero_tail(State state, int tokens) const {
    constexpr int kLastPage = kPages - 1;
    if constexpr (kLastPage > 0) state.advance();
    storage.ring.template zero_tail<kPrefillThreads>(state, tokens - kLastPage * kPageTokens);
  }

  __device__ __forceinline__ static uint32_t step_address(uint32_t s_row, int step) {
    constexpr int kSlabSteps = kSlabDims / 16;
    constexpr uint32_t kStepBytes = 16 * 2;
    return (s_row ^ (step % kSlabSteps * kStepBytes)) + step / kSlabSteps * kSlabBytes;
  }

  template <int kPages>
  __device__ __forceinline__ void score(const uint32_t (&s_keys)[kPages]) {
    const auto key_row = static_cast<uint32_t>(swizzled_offset(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * 8));
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) scores[page][tile] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int group = 0; group < kTokenGroups; ++group) {
          uint32_t keys[4];
          ptx::ldmatrix_x4(keys, step_address(s_keys[page] + key_row, step) + group * kTokenGroupBytes);
          ptx::mma_m16n8k16_bf16(scores[page][2 * group], query[step], keys[0], keys[1]);
          ptx::mma_m16n8k16_bf16(scores[page][2 * group + 1], query[step], keys[2], keys[3]);
        }
      }
    }
  }

  template <int kPages>
  __device__ __forceinline__ void hide_later_positions(int first_position) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = num_visible[half] - first_position - lane() % 4 * 2;
      if (visible >= kPages * kPageTokens) continue;
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
#pragma unroll
        for (int index = 0; index < 2 * kTokenTiles; ++index) {
          const int token = page * kPageTokens + index / 2 * 8 + index % 2;
          float& score = scores[page][index / 2].values[2 * half + index % 2];
          score = token < visible ? score : -INFINITY;
        }
      }
    }
  }

  template <int kPages>
  __device__ __forceinline__ float highest_score(int half) const {
    float highest[kPages];
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      highest[page] = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const float* pair = scores[page][tile].values + 2 * half;
        highest[page] = fmaxf(highest[page], fmaxf(pair[0], pair[1]));
      }
    }
    return max_of_quad(fmaxf(highest[0], highest[kPages - 1]));
  }

  template <int kPages>
  __device__ __forceinline__ void raise_exponents(float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int raised = max(exponent[half], covering_exponent(highest_score<kPages>(half) * scale));
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

  __device__ __forceinline__ ptx::FragmentA weigh(const ptx::FragmentC (&page_scores)[kTokenTiles], int group,
                                                  float scale) {
    ptx::FragmentA weights;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto shift = static_cast<float>(-exponent[half]);
      float group_sum = 0.0F;
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const float* pair = page_scores[2 * group + next].values + 2 * half;
        const float low = ptx::ex2_approx(fmaf(pair[0], scale, shift));
        const float high = ptx::ex2_approx(fmaf(pair[1], scale, shift));
        group_sum += low;
        group_sum += high;
        weights.regs[2 * next + half] = ptx::pack_bf16(low, high);
      }
      weight_sums[group][half] += group_sum;
    }
    return weights;
  }

  template <int kPages>
  __device__ __forceinline__ void add_values(const uint32_t (&s_values)[kPages], float scale) {
    const auto value_row = static_cast<uint32_t>(swizzled_offset(lane() % 16, lane() / 16 * 8));
    ptx::FragmentA coming = weigh(scores[0], 0, scale);
#pragma unroll
    for (int index = 0; index < kPages * kTokenGroups; ++index) {
      const int page = index / kTokenGroups;
      const int next = index + 1;
      const ptx::FragmentA weights = coming;
      if (next < kPages * kTokenGroups) coming = weigh(scores[next / kTokenGroups], next % kTokenGroups, scale);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t values[4];
        ptx::ldmatrix_x4_trans(
            values, step_address(s_values[page] + value_row, step) + index % kTokenGroups * kTokenGroupBytes);
        ptx::mma_m16n8k16_bf16(sums[2 * step], weights, values[0], values[1]);
        ptx::mma_m16n8k16_bf16(sums[2 * step + 1], weights, values[2], values[3]);
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

template <int kPages, typename Lane>
__device__ __forceinline__ void attend_pages(Lane& work, PrefillLoader<typename Lane::Ring>& loader,
                                             typename Lane::State& state, int first_position, int num_positions,
                                             float scale) {
  uint32_t s_pages[kPages];
  loader.load_keys();
  work.wait_for_pages(s_pages, state);
  work.score(s_pages);
  work.template release_pages<kPages>(state);
  work.template hide_later_positions<kPages>(first_position);
  work.template raise_exponents<kPages>(scale);
  loader.load_values();
  work.wait_for_pages(s_pages, state);
  work.template zero_tail<kPages>(state, num_positions - first_position);
  work.add_values(s_pages, scale);
  work.template release_pages<kPages>(state);
}

template <typename Lane>
__device__ __forceinline__ void attend_item(Lane& work, PrefillLoader<typename Lane::Ring>& loader,
                                            typename Lane::State& state, int num_positions, float scale) {
  constexpr int kPairTokens = 2 * kPageTokens;
  for (int first = 0; first < num_positions; first += kPairTokens) {
    if (num_positions - first > kPageTokens) {
      attend_pages<2>(work, loader, state, first, num_positions, scale);
    } else {
      attend_pages<1>(work, loader, state, first, num_positions, scale);
    }
    const int next = first + kPairTokens;
    if (next % kSplitTokens == 0 || next >= num_positions) work.reduce_split(first < kSplitTokens);
  }
}

template <int kHeadDim, bool kIsWhole>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    attention_prefill_kernel(const __grid_constant__ PrefillCall call) {
  using Lane = PrefillLane<kHeadDim, kIsWhole>;
  extern __shared__ std::byte s_memory[];
  auto& storage = *reinterpret_cast<PrefillStorage<kHeadDim>*>(aligned_storage(s_memory));
  ptx::griddepcontrol_launch_dependents();
  storage.ring.template prepare<kPrefillWarps>();
  ptx::griddepcontrol_wait();
  const float scale = kLog2E / sqrtf(static_cast<float>(Lane::head_dim(call.attend)));
  PrefillLoader<typename Lane::Ring> loader(call, storage.ring);
  typename Lane::State state;
  Lane work(storage);
  loader.begin();
  for (PrefillWalk walk(call); walk.has_item(); walk.advance()) {
    work.start(call.attend, walk.item());
    attend_item(work, loader, state, walk.item().num_positions(), scale);
    work.store_out(call.attend, walk.item());
  }
}

}
