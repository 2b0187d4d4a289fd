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
  int index = static_cast<int>(blockIdx.x);

  __device__ explicit PrefillWalk(const PrefillCall& prefill) : call(prefill) {}

  __device__ __forceinline__ bool has_item() const { return index < *call.num_tasks * call.attend.num_kv_heads; }
  __device__ __forceinline__ PrefillItem item() const {
    const int num_kv_heads = call.attend.num_kv_heads;
    return {call.tasks[index / num_kv_heads], index % num_kv_heads, call.attend.num_heads / num_kv_heads};
  }
  __device__ __forceinline__ int num_earlier(int first_position) const {
    return call.hides_earlier ? item().task.context_first - first_position : 0;
  }
  __device__ __forceinline__ void advance() {
    const auto num_thread_blocks = static_cast<int>(gridDim.x);
    const int round = index / num_thread_blocks;
    index = 2 * (round + 1) * num_thread_blocks - 1 - index;
  }
};

inline constexpr int kPrefillWarps = 8;
inline constexpr int kPrefillThreads = kPrefillWarps * kWarpLanes;
inline constexpr int kPrefillStages = 8;
inline constexpr int kPairThreads = 2 * kWarpLanes;
inline constexpr int kPairRows = 2 * kPrefillTileQueries / kPrefillWarps;
inline constexpr int kRowTiles = kPairRows / 16;
inline constexpr int kLaneRows = kPairRows / 8;
inline constexpr int kTokenGroups = kPageTokens / 16;
inline constexpr int kWarpGroups = kTokenGroups / 2;
inline constexpr int kWarpTokenTiles = 2 * kWarpGroups;
inline constexpr int kWarpPageTokens = 16 * kWarpGroups;
inline constexpr int kTokenGroupBytes = 16 * kSlabRowBytes;
inline constexpr int kFirstPairBarrier = 2;
inline constexpr int kFirstTurnBarrier = 6;

template <int kHeadDim>
struct PrefillStorage {
  using Ring = PageRing<Bf16Tile<kHeadDim>, kPrefillStages>;
  Ring ring;
  float4 totals[kHeadDim / 8][kPrefillThreads];
  uint4 weights[kPrefillWarps][2][kWarpGroups][kRowTiles][kWarpLanes];
  int4 exponents[kPrefillWarps][kWarpLanes / 4];
};

template <typename Ring>
struct PrefillLoader {
  using State = typename Ring::State;

  const PrefillCall& call;
  Ring& ring;
  PrefillWalk walk;
  int kv_head = 0;
  int table_page = 0;
  int num_tokens = 0;
  int page_ids[2] = {};

  __device__ PrefillLoader(const PrefillCall& prefill, Ring& pages) : call(prefill), ring(pages), walk(prefill) {}

  __device__ __forceinline__ static bool loads_keys() { return threadIdx.x == 0; }
  __device__ __forceinline__ static bool loads_values() { return threadIdx.x == kPairThreads; }

  __device__ __forceinline__ static State at(int place) {
    return {place % kPrefillStages, static_cast<uint32_t>(place / kPrefillStages) % 2};
  }

  __device__ __forceinline__ int tokens_left(int next) const { return num_tokens - next * kPageTokens; }

  __device__ __forceinline__ void start_pair() {
    if (tokens_left(0) <= 0) start_item();
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      if (tokens_left(next) > 0) page_ids[next] = call.attend.page_table[table_page + next];
    }
  }

  __device__ __forceinline__ void start_item() {
    num_tokens = 0;
    if (!walk.has_item()) return;
    const PrefillItem item = walk.item();
    walk.advance();
    kv_head = item.kv_head;
    table_page = item.task.page_first;
    num_tokens = item.num_positions();
  }

  __device__ __forceinline__ void load_pair(const std::byte* g_pages, State state) {
    const KvPages& pages = call.attend.pages;
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      if (tokens_left(next) <= 0) continue;
      ring.load_one_lane(state, g_pages + page_ids[next] * pages.page_bytes + kv_head * pages.head_bytes,
                         min(kPageTokens, tokens_left(next)));
    }
    table_page += 2;
    num_tokens -= 2 * kPageTokens;
    start_pair();
  }

  __device__ __forceinline__ void begin() {
    if (loads_keys() || loads_values()) start_pair();
    load_keys(0);
    load_values(0);
  }

  __device__ __forceinline__ void load_keys(int place) {
    if (loads_keys()) load_pair(call.attend.pages.keys, at(place));
    __syncwarp();
  }

  __device__ __forceinline__ void load_values(int keys_place) {
    if (loads_values()) load_pair(call.attend.pages.values, at(keys_place + (tokens_left(1) > 0 ? 2 : 1)));
    __syncwarp();
  }
};

template <int kHeadDim, bool kIsWhole>
struct PrefillLane {
  using Storage = PrefillStorage<kHeadDim>;
  using Ring = typename Storage::Ring;
  using State = typename Ring::State;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kWarpDims = kHeadDim / 2;
  static constexpr int kWarpSteps = kWarpDims / 16;
  static constexpr int kDimTiles = kWarpDims / 8;

  Storage& storage;
  ptx::FragmentA query[kRowTiles][kSteps];
  ptx::FragmentC scores[2][kRowTiles][kWarpTokenTiles];
  ptx::FragmentC sums[kRowTiles][kDimTiles];
  SplitReduction reduction;
  int exponent;
  int num_hidden;
  float weight_sums[kWarpGroups][kLaneRows];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpLanes; }
  __device__ static int side() { return warp() % 2; }
  __device__ static int pair() { return warp() / 2; }
  __device__ static int row(int index) { return pair() * kPairRows + index * 8 + lane() / 4; }

  __device__ static int head_dim(const AttendCall& call) { return kIsWhole ? kHeadDim : call.head_dim; }

  __device__ static void sync_pair() { ptx::bar_sync(kFirstPairBarrier + pair(), kPairThreads); }

  __device__ static void wait_for_turn() { ptx::bar_sync(kFirstTurnBarrier + pair(), 2 * kPairThreads); }

  __device__ static void pass_turn() { ptx::bar_arrive(kFirstTurnBarrier + (pair() ^ 2), 2 * kPairThreads); }

  __device__ explicit PrefillLane(Storage& shared) : storage(shared) {
    if (pair() >= 2) pass_turn();
  }

  __device__ __forceinline__ float& sum(int index, int element) {
    return sums[index / 2][element / 2].values[index % 2 * 2 + element % 2];
  }

  __device__ __forceinline__ void start(const AttendCall& call, const PrefillItem& item) {
#pragma unroll
    for (int index = 0; index < kLaneRows; ++index) {
      const bool is_query = item.is_query(row(index));
      const uint16_t* g_query = call.query + item.query_offset(row(index), call.num_heads, kHeadDim);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int dim = step * 16 + lane() % 4 * 2;
        uint32_t* regs = query[index / 2][step].regs + index % 2;
        regs[0] = is_query ? *reinterpret_cast<const uint32_t*>(g_query + dim) : 0U;
        regs[2] = is_query ? *reinterpret_cast<const uint32_t*>(g_query + dim + 8) : 0U;
      }
    }
    reduction = {};
    num_hidden = item.num_positions() - item.num_visible(pair() * kPairRows);
    start_split();
  }

  __device__ __forceinline__ void start_split() {
    exponent = kLowestExponent;
#pragma unroll
    for (int index = 0; index < kLaneRows; ++index) {
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) weight_sums[group][index] = 0.0F;
#pragma unroll
      for (int element = 0; element < 2 * kDimTiles; ++element) sum(index, element) = 0.0F;
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
  __device__ __forceinline__ void release_pages(State state, const ptx::FragmentC& last) const {
#pragma unroll
    for (int page = 0; page < kPages; ++page) storage.ring.release(state, last.values[3]);
  }

  template <int kPages>
  __device__ __forceinline__ void zero_tail(State state, int tokens) const {
    constexpr int kLastPage = kPages - 1;
    if constexpr (kLastPage > 0) state.advance();
    storage.ring.template zero_tail<kPrefillThreads>(state, tokens - kLastPage * kPageTokens);
  }

  template <int kPages>
  __device__ __forceinline__ void zero_earlier_values(State state, int num_earlier) const {
    if (num_earlier <= 0) return;
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      storage.ring.template zero_tokens<kPrefillThreads>(state, 0, min(num_earlier - page * kPageTokens, kPageTokens));
      state.advance();
    }
    ptx::fence_proxy_async();
    sync_consumers<kPrefillThreads>();
  }

  __device__ __forceinline__ static uint32_t step_address(uint32_t s_row, int step) {
    constexpr int kSlabSteps = kSlabDims / 16;
    constexpr uint32_t kStepBytes = 16 * 2;
    return (s_row ^ (step % kSlabSteps * kStepBytes)) + step / kSlabSteps * kSlabBytes;
  }

  template <int kPages>
  __device__ __forceinline__ void score(const uint32_t (&s_keys)[kPages]) {
    const int first_token = side() * kWarpPageTokens;
    const auto key_row =
        static_cast<uint32_t>(swizzled_offset(first_token + lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * 8));
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles * kWarpTokenTiles; ++tile)
        scores[page][tile % kRowTiles][tile / kRowTiles] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int group = 0; group < kWarpGroups; ++group) {
          uint32_t keys[4];
          ptx::ldmatrix_x4(keys, step_address(s_keys[page] + key_row, step) + group * kTokenGroupBytes);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            ptx::mma_m16n8k16_bf16(scores[page][tile][2 * group], query[tile][step], keys[0], keys[1]);
            ptx::mma_m16n8k16_bf16(scores[page][tile][2 * group + 1], query[tile][step], keys[2], keys[3]);
          }
        }
      }
    }
  }

  template <int kPages>
  __device__ __forceinline__ void hide_later_positions(const PrefillWalk& walk, int first_position, int tokens) {
    if (tokens - num_hidden >= kPages * kPageTokens) return;
    const PrefillItem item = walk.item();
    const int first_token = first_position + side() * kWarpPageTokens + lane() % 4 * 2;
#pragma unroll
    for (int index = 0; index < kLaneRows; ++index) {
      const int visible = item.num_visible(row(index)) - first_token;
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
#pragma unroll
        for (int element = 0; element < 2 * kWarpTokenTiles; ++element) {
          const int token = page * kPageTokens + element / 2 * 8 + element % 2;
          float& score = scores[page][index / 2][element / 2].values[index % 2 * 2 + element % 2];
          score = token < visible ? score : -INFINITY;
        }
      }
    }
  }

  template <int kPages>
  __device__ __forceinline__ void hide_earlier_positions(int num_earlier) {
    if (num_earlier <= 0) return;
    const int hidden = num_earlier - side() * kWarpPageTokens - lane() % 4 * 2;
#pragma unroll
    for (int index = 0; index < kLaneRows; ++index) {
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
#pragma unroll
        for (int element = 0; element < 2 * kWarpTokenTiles; ++element) {
          const int token = page * kPageTokens + element / 2 * 8 + element % 2;
          float& score = scores[page][index / 2][element / 2].values[index % 2 * 2 + element % 2];
          score = token < hidden ? -INFINITY : score;
        }
      }
    }
  }

  template <int kPages>
  __device__ __forceinline__ float highest_score(int index) const {
    float highest = -INFINITY;
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
#pragma unroll
      for (int tile = 0; tile < kWarpTokenTiles; ++tile) {
        const float* pair = scores[page][index / 2][tile].values + index % 2 * 2;
        highest = fmaxf(highest, fmaxf(pair[0], pair[1]));
      }
    }
    return highest;
  }

  __device__ __forceinline__ static float of_quad(float value, int index) {
    return __shfl_sync(kWholeWarp, value, index, kLaneRows);
  }

  template <typename Reduce>
  __device__ __forceinline__ static float reduced_across(float even, float odd, int distance, Reduce reduce) {
    const bool is_odd = (lane() & distance) != 0;
    return reduce(is_odd ? odd : even, __shfl_xor_sync(kWholeWarp, is_odd ? even : odd, distance));
  }

  template <typename Reduce>
  __device__ __forceinline__ static float reduced_row(const float (&rows)[kLaneRows], Reduce reduce) {
    const float low = reduced_across(rows[0], rows[1], 1, reduce);
    const float high = reduced_across(rows[2], rows[3], 1, reduce);
    return reduced_across(low, high, 2, reduce);
  }

  template <int kPages>
  __device__ __forceinline__ void share_exponent(float scale) const {
    const float highest[kLaneRows] = {highest_score<kPages>(0), highest_score<kPages>(1), highest_score<kPages>(2),
                                      highest_score<kPages>(3)};
    const float highest_of_row = reduced_row(highest, [](float left, float right) { return fmaxf(left, right); });
    reinterpret_cast<int*>(storage.exponents[warp()])[lane()] =
        max(exponent, covering_exponent(highest_of_row * scale));
  }

  __device__ __forceinline__ int4 raise_exponents() {
    const int4 own = storage.exponents[warp()][lane() / 4];
    const int4 other = storage.exponents[warp() ^ 1][lane() / 4];
    const int raised[kLaneRows] = {max(own.x, other.x), max(own.y, other.y), max(own.z, other.z), max(own.w, other.w)};
    const int low = lane() % 2 == 0 ? raised[0] : raised[1];
    const int high = lane() % 2 == 0 ? raised[2] : raised[3];
    const int before = exponent;
    exponent = lane() % 4 < 2 ? low : high;
    if (__any_sync(kWholeWarp, exponent != before)) {
      const float kept = power_of_two(before - exponent);
#pragma unroll
      for (int index = 0; index < kLaneRows; ++index) {
        const float keep = of_quad(kept, index);
#pragma unroll
        for (int group = 0; group < kWarpGroups; ++group) weight_sums[group][index] *= keep;
#pragma unroll
        for (int element = 0; element < 2 * kDimTiles; ++element) sum(index, element) *= keep;
      }
    }
    return make_int4(raised[0], raised[1], raised[2], raised[3]);
  }

  __device__ __forceinline__ uint4 weigh(int page, int group, int tile, float scale, const float (&shifts)[kLaneRows]) {
    uint32_t weights[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = 2 * tile + half;
      float group_sum = 0.0F;
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const float* pair = scores[page][tile][2 * group + next].values + 2 * half;
        const float low = ptx::ex2_approx(fmaf(pair[0], scale, shifts[index]));
        const float high = ptx::ex2_approx(fmaf(pair[1], scale, shifts[index]));
        group_sum += low;
        group_sum += high;
        weights[2 * next + half] = ptx::pack_bf16(low, high);
      }
      weight_sums[group][index] += group_sum;
    }
    return make_uint4(weights[0], weights[1], weights[2], weights[3]);
  }

  template <int kPages>
  __device__ __forceinline__ void share_weights(float scale, const int4& exponents) {
    const float shifts[kLaneRows] = {static_cast<float>(-exponents.x), static_cast<float>(-exponents.y),
                                     static_cast<float>(-exponents.z), static_cast<float>(-exponents.w)};
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          storage.weights[warp()][page][group][tile][lane()] = weigh(page, group, tile, scale, shifts);
        }
      }
    }
  }

  template <int kPages>
  __device__ __forceinline__ void add_values(const uint32_t (&s_values)[kPages]) {
    const auto value_row = static_cast<uint32_t>(swizzled_offset(lane() % 16, side() * kWarpDims + lane() / 16 * 8));
#pragma unroll
    for (int index = 0; index < kPages * kTokenGroups; ++index) {
      const int page = index / kTokenGroups;
      const int group = index % kTokenGroups;
      const auto& s_weights = storage.weights[2 * pair() + group / kWarpGroups][page][group % kWarpGroups];
      ptx::FragmentA weights[kRowTiles];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 regs = s_weights[tile][lane()];
        weights[tile] = {regs.x, regs.y, regs.z, regs.w};
      }
#pragma unroll
      for (int step = 0; step < kWarpSteps; ++step) {
        uint32_t values[4];
        ptx::ldmatrix_x4_trans(values, step_address(s_values[page] + value_row, step) + group * kTokenGroupBytes);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          ptx::mma_m16n8k16_bf16(sums[tile][2 * step], weights[tile], values[0], values[1]);
          ptx::mma_m16n8k16_bf16(sums[tile][2 * step + 1], weights[tile], values[2], values[3]);
        }
      }
    }
  }

  __device__ __forceinline__ float4* shared_weight_sums(int of_side) const {
    return reinterpret_cast<float4*>(storage.weights[2 * pair() + of_side]) + lane();
  }

  __device__ __forceinline__ void reduce_weight_sums() {
    sync_pair();
#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
      const float (&sums_of_rows)[kLaneRows] = weight_sums[group];
      shared_weight_sums(side())[group * kWarpLanes] =
          make_float4(sums_of_rows[0], sums_of_rows[1], sums_of_rows[2], sums_of_rows[3]);
    }
    sync_pair();
    float4 total = shared_weight_sums(0)[0];
#pragma unroll
    for (int group = 1; group < kTokenGroups; ++group) {
      const float4 next = shared_weight_sums(group / kWarpGroups)[group % kWarpGroups * kWarpLanes];
      total = make_float4(total.x + next.x, total.y + next.y, total.z + next.z, total.w + next.w);
    }
    const float totals[kLaneRows] = {total.x, total.y, total.z, total.w};
    reduction.add(exponent, reduced_row(totals, [](float left, float right) { return left + right; }));
  }

  __device__ __forceinline__ void reduce_split(bool is_first) {
    reduce_weight_sums();
    SplitReduction reductions[kLaneRows];
#pragma unroll
    for (int index = 0; index < kLaneRows; ++index) {
      reductions[index].keep = of_quad(reduction.keep, index);
      reductions[index].take = of_quad(reduction.take, index);
    }
#pragma unroll
    for (int tile = 0; tile < kRowTiles * kDimTiles; ++tile) {
      const float* split = sums[tile / kDimTiles][tile % kDimTiles].values;
      const SplitReduction* of_half = reductions + tile / kDimTiles * 2;
      float4& total = storage.totals[tile][threadIdx.x];
      const float4 before = is_first ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : total;
      total = make_float4(of_half[0].reduced(before.x, split[0]), of_half[0].reduced(before.y, split[1]),
                          of_half[1].reduced(before.z, split[2]), of_half[1].reduced(before.w, split[3]));
    }
    start_split();
  }

  __device__ __forceinline__ void store_out(const AttendCall& call, const PrefillItem& item) const {
#pragma unroll
    for (int index = 0; index < kLaneRows; ++index) {
      const float weight_sum = of_quad(reduction.weight_sum, index);
      if (!item.is_query(row(index))) continue;
      float* g_out = call.out + item.query_offset(row(index), call.num_heads, head_dim(call));
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        const int dim = side() * kWarpDims + tile * 8 + lane() % 4 * 2;
        if (!kIsWhole && dim >= call.head_dim) continue;
        const float4 total = storage.totals[index / 2 * kDimTiles + tile][threadIdx.x];
        const float2 pair = index % 2 == 0 ? make_float2(total.x, total.y) : make_float2(total.z, total.w);
        *reinterpret_cast<float2*>(g_out + dim) =
            make_float2(__fdiv_rn(pair.x, weight_sum), __fdiv_rn(pair.y, weight_sum));
      }
    }
  }
};

template <int kPages, typename Lane>
__device__ __forceinline__ void attend_pages(Lane& work, PrefillLoader<typename Lane::Ring>& loader, int& place,
                                             const PrefillWalk& walk, int first_position, int num_positions,
                                             float scale) {
  uint32_t s_pages[kPages];
  loader.load_keys(place + 2 * kPages);
  work.wait_for_pages(s_pages, loader.at(place));
  work.score(s_pages);
  work.template release_pages<kPages>(loader.at(place), work.scores[kPages - 1][kRowTiles - 1][kWarpTokenTiles - 1]);
  work.pass_turn();
  work.template hide_later_positions<kPages>(walk, first_position, num_positions - first_position);
  work.template hide_earlier_positions<kPages>(walk.num_earlier(first_position));
  work.template share_exponent<kPages>(scale);
  work.sync_pair();
  work.template share_weights<kPages>(scale, work.raise_exponents());
  place += kPages;
  loader.load_values(place + kPages);
  work.wait_for_pages(s_pages, loader.at(place));
  work.template zero_earlier_values<kPages>(loader.at(place), walk.num_earlier(first_position));
  work.template zero_tail<kPages>(loader.at(place), num_positions - first_position);
  work.sync_pair();
  work.wait_for_turn();
  work.add_values(s_pages);
  work.template release_pages<kPages>(loader.at(place), work.sums[kRowTiles - 1][Lane::kDimTiles - 1]);
  place += kPages;
}

template <typename Lane>
__device__ __forceinline__ void attend_item(Lane& work, PrefillLoader<typename Lane::Ring>& loader, int& place,
                                            const PrefillWalk& walk, float scale) {
  constexpr int kPairTokens = 2 * kPageTokens;
  const int num_positions = walk.item().num_positions();
  work.wait_for_turn();
  for (int first = 0; first < num_positions; first += kPairTokens) {
    if (num_positions - first > kPageTokens) {
      attend_pages<2>(work, loader, place, walk, first, num_positions, scale);
    } else {
      attend_pages<1>(work, loader, place, walk, first, num_positions, scale);
    }
    const int next = first + kPairTokens;
    if (next % kSplitTokens == 0 || next >= num_positions) work.reduce_split(first < kSplitTokens);
  }
  work.pass_turn();
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
  int place = 0;
  Lane work(storage);
  loader.begin();
  for (PrefillWalk walk(call); walk.has_item(); walk.advance()) {
    work.start(call.attend, walk.item());
    attend_item(work, loader, place, walk, scale);
    work.store_out(call.attend, walk.item());
  }
}

}
