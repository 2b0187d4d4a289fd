#include <algorithm>

#include "cuda/check.h"
#include "cuda/kernels/moe/experts.h"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

inline constexpr int kFewGroupTokens = kStreamedTokens;
inline constexpr int kFewGroupThreads = kFewGroupTokens * kMaxExpertsPerToken;
inline constexpr int kFewTileTokens = kStreamedTileTokens;
inline constexpr int kFewExpertWarps = kMaxLocalExperts / 32;

struct FewCounts {
  static constexpr int kBits = 10;
  static constexpr uint32_t kMask = (1U << kBits) - 1;

  uint32_t packed;

  __device__ __forceinline__ int rows() const { return static_cast<int>(packed & kMask); }
  __device__ __forceinline__ int tiles() const { return static_cast<int>(packed >> kBits); }
};

static_assert(kFewGroupThreads == 2 * kMaxLocalExperts, "a thread clears one word of the masks");
static_assert(kFewGroupTokens * (kMaxExpertsPerToken + 1) <= FewCounts::kMask, "rows are counted in 10 bits");

struct ExpertPlace {
  uint32_t packed;

  __device__ __forceinline__ int row_first() const { return static_cast<int>(packed & FewCounts::kMask); }
  __device__ __forceinline__ int tile_first() const {
    return static_cast<int>(packed >> FewCounts::kBits & FewCounts::kMask);
  }
  __device__ __forceinline__ int num_rows() const { return static_cast<int>(packed >> (2 * FewCounts::kBits)); }

  __device__ __forceinline__ RowPlace of(int row) const {
    const int before = row - row_first();
    const int tile = before / kFewTileTokens;
    const int row_count = min(kFewTileTokens, num_rows() - tile * kFewTileTokens);
    return {static_cast<uint32_t>((tile_first() + tile) << 16 | before % kFewTileTokens << 8 | row_count)};
  }
};

struct FewGroups {
  uint32_t masks[2][kMaxLocalExperts];
  ExpertPlace places[kMaxLocalExperts];
  uint32_t warp_counts[kFewExpertWarps];
  uint32_t warp_touched[kFewExpertWarps];

  __device__ __forceinline__ int rows_of(int expert) const {
    return __popc(masks[0][expert]) + __popc(masks[1][expert]);
  }

  __device__ __forceinline__ int row_of(int expert, int token) const {
    const uint32_t below = masks[token / 32][expert] & ((1U << (token % 32)) - 1U);
    return places[expert].row_first() + __popc(below) + (token < 32 ? 0 : __popc(masks[0][expert]));
  }
};

struct FewGrouping {
  const GroupCall& call;
  FewGroups& s_groups;
  int num_experts;
  int num_tokens;
  int thread = static_cast<int>(threadIdx.x);
  int token = thread / call.experts_per_token;

  __device__ __forceinline__ FewGrouping(const GroupCall& group, FewGroups& groups, int experts)
      : call(group), s_groups(groups), num_experts(experts) {
    const int num_real = call.num_real_tokens == nullptr ? call.num_tokens : __ldg(call.num_real_tokens);
    num_tokens = max(0, min(num_real, call.num_tokens));
    const int left = num_tokens - thread / kMaxLocalExperts * 32;
    const bool is_shared = call.has_shared != 0 && thread % kMaxLocalExperts == num_experts - 1;
    const uint32_t shared_mask = left >= 32 ? ~0U : left > 0 ? (1U << left) - 1U : 0U;
    s_groups.masks[thread / kMaxLocalExperts][thread % kMaxLocalExperts] = is_shared ? shared_mask : 0U;
  }

  __device__ __forceinline__ int mark() const {
    if (token >= num_tokens) return -1;
    const int expert = __ldcg(call.experts + thread);
    if (expert < call.expert_first || expert >= call.expert_last) return -1;
    atomicOr(&s_groups.masks[token / 32][expert - call.expert_first], 1U << (token % 32));
    return expert - call.expert_first;
  }

  __device__ __forceinline__ FewCounts count_before(FewCounts own) const {
    uint32_t before = own.packed;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0U, before, distance);
      if (thread % 32 >= distance) before += other;
    }
    if (thread % 32 == 31 && thread < kMaxLocalExperts) s_groups.warp_counts[thread / 32] = before;
    __syncthreads();
    before -= own.packed;
#pragma unroll
    for (int warp = 0; warp < kFewExpertWarps; ++warp) before += warp < thread / 32 ? s_groups.warp_counts[warp] : 0U;
    return {before};
  }

  __device__ __forceinline__ void list_experts() const {
    const int expert = thread;
    const int count = expert < num_experts ? s_groups.rows_of(expert) : 0;
    const int num_tiles = (count + kFewTileTokens - 1) / kFewTileTokens;
    const FewCounts own = {static_cast<uint32_t>(count) | static_cast<uint32_t>(num_tiles) << FewCounts::kBits};
    const uint32_t touched = __ballot_sync(~0U, count > 0 && expert < call.expert_last - call.expert_first);
    if (thread % 32 == 0 && thread < kMaxLocalExperts) s_groups.warp_touched[thread / 32] = __popc(touched);
    const FewCounts before = count_before(own);
    if (expert >= kMaxLocalExperts) return;
    s_groups.places[expert] = {before.packed | static_cast<uint32_t>(count) << (2 * FewCounts::kBits)};
    if (expert == kMaxLocalExperts - 1) store_totals({before.packed + own.packed});
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int done = tile * kFewTileTokens;
      const int index = before.tiles() + tile;
      const TokenTile tokens = {expert, before.rows() + done, min(kFewTileTokens, count - done), index};
      call.grouped.gate_up_tiles[index] = tokens;
      call.grouped.down_tiles[index] = tokens;
      call.grouped.rows_packed[index] = 0;
    }
  }

  __device__ __forceinline__ void store_totals(FewCounts total) const {
    *call.grouped.num_rows = total.rows();
    *call.grouped.num_gate_up_tiles = total.tiles();
    *call.grouped.down_tile_ends = total.tiles();
    if (call.experts_touched == nullptr) return;
    uint32_t touched = 0;
#pragma unroll
    for (int warp = 0; warp < kFewExpertWarps; ++warp) touched += s_groups.warp_touched[warp];
    auto* g_touched = reinterpret_cast<unsigned long long*>(call.experts_touched);
    atomicAdd(g_touched, static_cast<unsigned long long>(touched));
  }

  __device__ __forceinline__ void store_row(int expert, int row_token, float weight) const {
    const int row = s_groups.row_of(expert, row_token);
    call.grouped.row_tokens[row] = row_token;
    call.grouped.row_weights[row] = weight;
    call.grouped.row_places[row] = s_groups.places[expert].of(row);
  }
};

__global__ void __launch_bounds__(kFewGroupThreads)
    group_tokens_few_kernel(const __grid_constant__ GroupCall call, int num_experts) {
  __shared__ FewGroups s_groups;
  const FewGrouping grouping(call, s_groups, num_experts);
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const float weight = grouping.token < grouping.num_tokens ? __ldcg(call.weights + threadIdx.x) : 0.0F;
  const int expert = grouping.mark();
  __syncthreads();
  grouping.list_experts();
  __syncthreads();
  if (expert >= 0) grouping.store_row(expert, grouping.token, weight);
  if (call.has_shared != 0 && grouping.thread < grouping.num_tokens) {
    grouping.store_row(num_experts - 1, grouping.thread, 1.0F);
  }
}

constexpr int kGroupThreads = 1024;
constexpr int kWordTokens = 32;
constexpr int kTokensPerThreadBlock = 256;
constexpr int kLists = kGroupThreads / kMaxLocalExperts;
constexpr int kWordBatch = 8;
constexpr int kFixedSharedBytes = 6 * 1024;
constexpr int kSortedTileTokens = 128;
constexpr int kShareTokens = 16;
constexpr int kListWarps = kMaxLocalExperts / 32;

__host__ __device__ int words_for(int num_tokens) { return (num_tokens + kWordTokens - 1) / kWordTokens | 1; }

struct SizeCounts {
  static constexpr int kSizes = 5;
  static constexpr int kBits = 12;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;

  uint64_t packed;

  static __device__ int size_of(int rows) { return rows > 112 ? 0 : rows > 96 ? 1 : rows > 64 ? 2 : rows > 32 ? 3 : 4; }
  static __device__ int shift(int size) { return (kSizes - 1 - size) * kBits; }

  __device__ void add(int size, int count) { packed += static_cast<uint64_t>(count) << shift(size); }

  __device__ int of(int size) const {
    const uint64_t shifted = packed >> shift(size);
    return static_cast<int>(size == 0 ? shifted : shifted & kMask);
  }

  __device__ int of_larger(int size) const {
    int count = 0;
    for (int larger = 0; larger < size; ++larger) count += of(larger);
    return count;
  }
};

static_assert(2 * kMaxLocalExperts < SizeCounts::kMask, "an expert has at most two tiles that are not full");

struct ListStorage {
  int32_t tile_first[kMaxLocalExperts];
  uint64_t warp_sizes[kListWarps];
  int32_t num_tiles;
  int32_t num_before;
};

struct GroupStorage {
  uint32_t* s_masks;
  uint16_t* s_ranks;
  int32_t* s_row_first;
  ListStorage* s_lists;
  int num_words;
  int num_experts;
  int num_tokens;
  int num_pairs;
};

__device__ void exclusive_scan_one_warp(int32_t* s_values, int32_t* s_total) {
  constexpr int kItems = kMaxLocalExperts / 32;
  const int lane = threadIdx.x % 32;
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

__device__ int local_expert(const GroupCall& call, int expert) {
  return expert >= call.expert_first && expert < call.expert_last ? expert - call.expert_first : -1;
}

struct TokenChoices {
  int r_experts[kMaxExpertsPerToken];

  __device__ TokenChoices(const GroupCall& call, int token) {
#pragma unroll
    for (int choice = 0; choice < kMaxExpertsPerToken; ++choice) {
      const bool is_real = token < call.num_tokens && choice < call.experts_per_token;
      r_experts[choice] = is_real ? __ldcg(call.experts + token * call.experts_per_token + choice) : -1;
    }
  }

  __device__ void mark(const GroupCall& call, const GroupStorage& storage, int token) const {
    uint32_t* s_masks = storage.s_masks + token / kWordTokens;
#pragma unroll
    for (int choice = 0; choice < kMaxExpertsPerToken; ++choice) {
      const int expert = choice < call.experts_per_token ? local_expert(call, r_experts[choice]) : -1;
      if (expert >= 0) atomicOr(s_masks + expert * storage.num_words, 1U << (token % kWordTokens));
    }
  }
};

struct WeightedPair {
  int expert;
  float weight;

  __device__ WeightedPair(const GroupCall& call, int pair) : expert(-1), weight(0.0F) {
    if (pair >= call.num_tokens * call.experts_per_token) return;
    expert = local_expert(call, __ldcg(call.experts + pair));
    weight = __ldcg(call.weights + pair);
  }
};

__device__ void mark_tokens(const GroupCall& call, const GroupStorage& storage, TokenChoices choices) {
  for (int index = threadIdx.x; index < storage.num_experts * storage.num_words; index += kGroupThreads) {
    storage.s_masks[index] = 0U;
  }
  __syncthreads();
  for (int token = threadIdx.x; token < storage.num_tokens; token += kGroupThreads) {
    const TokenChoices next(call, token + kGroupThreads);
    choices.mark(call, storage, token);
    choices = next;
  }
  uint32_t* s_shared_mask = storage.s_masks + (storage.num_experts - 1) * storage.num_words;
  for (int word = threadIdx.x; call.has_shared != 0 && word < storage.num_words; word += kGroupThreads) {
    const int tokens_left = storage.num_tokens - word * kWordTokens;
    s_shared_mask[word] = tokens_left >= kWordTokens ? ~0U : tokens_left > 0 ? (1U << tokens_left) - 1U : 0U;
  }
  __syncthreads();
}

__device__ int rank_of_word(const GroupStorage& storage, int expert, int word) {
  if (word < storage.num_words) return storage.s_ranks[expert * storage.num_words + word];
  const int last = expert * storage.num_words + storage.num_words - 1;
  return storage.s_ranks[last] + __popc(storage.s_masks[last]);
}

__device__ int rank_words(const GroupStorage& storage, int expert) {
  const uint32_t* s_masks = storage.s_masks + expert * storage.num_words;
  uint16_t* s_ranks = storage.s_ranks + expert * storage.num_words;
  int count = 0;
  for (int first = 0; first < storage.num_words; first += kWordBatch) {
    uint32_t r_masks[kWordBatch];
#pragma unroll
    for (int next = 0; next < kWordBatch; ++next) {
      r_masks[next] = first + next < storage.num_words ? s_masks[first + next] : 0U;
    }
#pragma unroll
    for (int next = 0; next < kWordBatch; ++next) {
      if (first + next < storage.num_words) s_ranks[first + next] = static_cast<uint16_t>(count);
      count += __popc(r_masks[next]);
    }
  }
  return count;
}

__device__ void rank_tokens(const GroupCall& call, const GroupStorage& storage, int32_t* s_total) {
  const int expert = threadIdx.x;
  const int count = expert < storage.num_experts ? rank_words(storage, expert) : 0;
  if (expert < kMaxLocalExperts) storage.s_row_first[expert] = count;
  const bool is_touched = count > 0 && expert < call.expert_last - call.expert_first;
  const int num_touched = __syncthreads_count(is_touched ? 1 : 0);
  if (threadIdx.x == 0 && blockIdx.x == 0 && call.experts_touched != nullptr) {
    auto* g_touched = reinterpret_cast<unsigned long long*>(call.experts_touched);
    atomicAdd(g_touched, static_cast<unsigned long long>(num_touched));
  }
  if (threadIdx.x < 32) exclusive_scan_one_warp(storage.s_row_first, s_total);
  __syncthreads();
}

__device__ int store_row(const GroupCall& call, const GroupStorage& storage, int expert, int token, float weight) {
  const int index = expert * storage.num_words + token / kWordTokens;
  const uint32_t below = storage.s_masks[index] & ((1U << (token % kWordTokens)) - 1U);
  const int row = storage.s_row_first[expert] + storage.s_ranks[index] + __popc(below);
  call.grouped.row_tokens[row] = token;
  call.grouped.row_weights[row] = weight;
  return row;
}

__device__ void store_token_row(const GroupCall& call, int token, int choice, int row) {
  if (call.grouped.token_rows == nullptr) return;
  call.grouped.token_rows[token * (call.experts_per_token + 1) + choice] = row;
}

__device__ void store_rows(const GroupCall& call, const GroupStorage& storage, int first, WeightedPair pair) {
  const int stride = gridDim.x * kGroupThreads;
  for (int index = first; index < call.num_tokens * call.experts_per_token; index += stride) {
    const WeightedPair next(call, index + stride);
    const int token = index / call.experts_per_token;
    const bool is_own = pair.expert >= 0 && index < storage.num_pairs;
    const int row = is_own ? store_row(call, storage, pair.expert, token, pair.weight) : -1;
    store_token_row(call, token, index % call.experts_per_token, row);
    pair = next;
  }
  for (int token = first; token < call.num_tokens; token += stride) {
    const bool is_own = call.has_shared != 0 && token < storage.num_tokens;
    const int row = is_own ? store_row(call, storage, storage.num_experts - 1, token, 1.0F) : -1;
    store_token_row(call, token, call.experts_per_token, row);
  }
}

struct ExpertTiles {
  int rank_first;
  int count;
  int num_tiles;

  __device__ ExpertTiles(const GroupStorage& storage, int expert, int word_first, int word_last, int tile_tokens) {
    rank_first = rank_of_word(storage, expert, min(word_first, storage.num_words));
    count = rank_of_word(storage, expert, min(word_last, storage.num_words)) - rank_first;
    num_tiles = (count + tile_tokens - 1) / tile_tokens;
  }

  __device__ int end_of_sorted(int tile) const {
    const int first = tile * kSortedTileTokens;
    const int left = count - first;
    const bool is_shared = left > kSortedTileTokens && left < 2 * kSortedTileTokens;
    const int share = ((left + 1) / 2 + kShareTokens - 1) / kShareTokens * kShareTokens;
    return first + (is_shared ? share : left > kSortedTileTokens ? kSortedTileTokens : left);
  }

  __device__ int first_of_sorted(int tile) const { return tile == 0 ? 0 : end_of_sorted(tile - 1); }

  __device__ SizeCounts sizes() const {
    SizeCounts sizes = {0};
    const int num_full = num_tiles > 2 ? num_tiles - 2 : 0;
    sizes.add(0, num_full);
    for (int tile = num_full; tile < num_tiles; ++tile) {
      sizes.add(SizeCounts::size_of(end_of_sorted(tile) - first_of_sorted(tile)), 1);
    }
    return sizes;
  }
};

struct TileList {
  int token_block;
  int word_first;
  int word_last;
  int tile_tokens;

  __device__ TileList(const GroupStorage& storage, const TilePlan& tiles, int list) : token_block(list - 1) {
    const int block_words = tiles.block_tokens / kWordTokens;
    word_first = list == 0 ? 0 : token_block * block_words;
    word_last = list == 0 ? storage.num_words : word_first + block_words;
    tile_tokens = list == 0 ? tiles.gate_up_tokens : tiles.down_tokens;
  }

  __device__ int tiles_before(const GroupStorage& storage, int expert) const {
    const int block_words = word_last - word_first;
    int before = 0;
    for (int word = 0; token_block > 0 && word < word_first; word += block_words) {
      before += ExpertTiles(storage, expert, word, word + block_words, tile_tokens).num_tiles;
    }
    return before;
  }
};

__device__ SizeCounts count_sizes_before(ListStorage& s_list, SizeCounts own) {
  const int lane = threadIdx.x % 32;
  uint64_t before = own.packed;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(~0U, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == 31) s_list.warp_sizes[threadIdx.x % kMaxLocalExperts / 32] = before;
  return {before - own.packed};
}

__device__ void store_sorted_tiles(TokenTile* g_tiles, const ListStorage& s_list, const ExpertTiles& mine, int expert,
                                   int row_first, SizeCounts before) {
  SizeCounts all = {0};
  for (int warp = 0; warp < kListWarps; ++warp) {
    if (warp < expert / 32) before.packed += s_list.warp_sizes[warp];
    all.packed += s_list.warp_sizes[warp];
  }
  for (int tile = 0; tile < mine.num_tiles; ++tile) {
    const int first = mine.first_of_sorted(tile);
    const int rows = mine.end_of_sorted(tile) - first;
    const int size = SizeCounts::size_of(rows);
    const int index = all.of_larger(size) + before.of(size);
    g_tiles[index] = {expert, row_first + first, rows, index};
    before.add(size, 1);
  }
}

__device__ void store_tiles(const GroupCall& call, const GroupStorage& storage, const TilePlan& tiles) {
  const int num_lists = 1 + (call.num_tokens + tiles.block_tokens - 1) / tiles.block_tokens;
  const int list = static_cast<int>(blockIdx.x) * kLists + static_cast<int>(threadIdx.x) / kMaxLocalExperts;
  const int expert = threadIdx.x % kMaxLocalExperts;
  if (static_cast<int>(blockIdx.x) * kLists >= num_lists) return;
  ListStorage& s_list = storage.s_lists[threadIdx.x / kMaxLocalExperts];
  const bool is_used = list < num_lists && expert < storage.num_experts;
  const bool is_sorted = list == 0 && tiles.gate_up_tokens == kSortedTileTokens;
  const TileList bounds(storage, tiles, list);
  const ExpertTiles mine(storage, is_used ? expert : 0, bounds.word_first, bounds.word_last, bounds.tile_tokens);
  s_list.tile_first[expert] = is_used ? mine.num_tiles : 0;
  SizeCounts sizes_before = {0};
  if (is_sorted) sizes_before = count_sizes_before(s_list, is_used ? mine.sizes() : SizeCounts{0});
  const int before = __reduce_add_sync(~0U, is_used ? bounds.tiles_before(storage, expert) : 0);
  if (threadIdx.x % 32 == 0 && before > 0) atomicAdd(&s_list.num_before, before);
  __syncthreads();
  if (expert < 32) exclusive_scan_one_warp(s_list.tile_first, &s_list.num_tiles);
  __syncthreads();
  if (!is_used) return;
  TokenTile* g_tiles = list == 0 ? call.grouped.gate_up_tiles : call.grouped.down_tiles;
  int index = s_list.num_before + s_list.tile_first[expert];
  const int row_first = storage.s_row_first[expert] + mine.rank_first;
  if (is_sorted) store_sorted_tiles(g_tiles, s_list, mine, expert, row_first, sizes_before);
  for (int done = 0; !is_sorted && done < mine.count; done += bounds.tile_tokens, ++index) {
    g_tiles[index] = {expert, row_first + done, min(bounds.tile_tokens, mine.count - done), index};
  }
  if (expert > 0) return;
  int32_t* g_end = list == 0 ? call.grouped.num_gate_up_tiles : call.grouped.down_tile_ends + bounds.token_block;
  *g_end = s_list.num_before + s_list.num_tiles;
}

__global__ void __launch_bounds__(kGroupThreads)
    group_tokens_kernel(const __grid_constant__ GroupCall call, const TilePlan tiles, int num_experts) {
  extern __shared__ uint32_t s_words[];
  __shared__ int32_t s_row_first[kMaxLocalExperts];
  __shared__ ListStorage s_lists[kLists];
  __shared__ int32_t s_total;
  const int num_words = words_for(call.num_tokens);
  if (threadIdx.x < kLists) s_lists[threadIdx.x].num_before = 0;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int first_pair = static_cast<int>(blockIdx.x) * kGroupThreads + static_cast<int>(threadIdx.x);
  const TokenChoices first_choices(call, threadIdx.x);
  const WeightedPair first_weight(call, first_pair);
  const int num_real = call.num_real_tokens == nullptr ? call.num_tokens : __ldcg(call.num_real_tokens);
  const int num_tokens = max(0, min(num_real, call.num_tokens));
  const GroupStorage storage = {.s_masks = s_words,
                                .s_ranks = reinterpret_cast<uint16_t*>(s_words + num_experts * num_words),
                                .s_row_first = s_row_first,
                                .s_lists = s_lists,
                                .num_words = num_words,
                                .num_experts = num_experts,
                                .num_tokens = num_tokens,
                                .num_pairs = num_tokens * call.experts_per_token};
  mark_tokens(call, storage, first_choices);
  rank_tokens(call, storage, &s_total);
  if (threadIdx.x == 0 && blockIdx.x == 0) *call.grouped.num_rows = s_total;
  store_rows(call, storage, first_pair, first_weight);
  store_tiles(call, storage, tiles);
}

void launch_few(const GroupCall& call, int num_experts, cudaStream_t stream) {
  require_argument(call.grouped.row_places != nullptr && call.grouped.rows_packed != nullptr, "a grouping of ",
                   call.num_tokens, " tokens lists the rows of packed tiles; give it row_places and rows_packed");
  launch_dependent(group_tokens_few_kernel, {1, kFewGroupThreads, 0}, stream, call, num_experts);
}

}

TilePlan plan_tiles(int64_t num_tokens) {
  if (num_tokens <= kFewGroupTokens) return {kFewTileTokens, kFewTileTokens, kFewGroupTokens};
  if (num_tokens <= kSplitKTokens) return {32, 32, kSplitKTokens};
  const int64_t num_blocks = (num_tokens + kDownBlockTokens - 1) / kDownBlockTokens;
  const int64_t block_words = (num_tokens + num_blocks * kWordTokens - 1) / (num_blocks * kWordTokens);
  return {kSortedTileTokens, 64, static_cast<int32_t>(block_words * kWordTokens)};
}

int64_t max_grouped_tokens(int64_t num_experts) {
  constexpr int64_t kMostRanks = 65535;
  const int64_t words = (kSharedLimitBytes - kFixedSharedBytes - 16) / (6 * num_experts);
  return std::min(kMostRanks, ((words - 1) | 1) * kWordTokens);
}

int64_t max_token_tiles(int64_t num_tokens, int32_t experts_per_token, int32_t num_local_experts) {
  const TilePlan plan = plan_tiles(num_tokens);
  const int64_t blocks = (num_tokens + plan.block_tokens - 1) / plan.block_tokens;
  const int64_t rows = num_tokens * (experts_per_token + 1);
  return std::max(int64_t{kTilesLoadedAtOnce}, rows / plan.down_tokens + (int64_t{num_local_experts} + 1) * blocks);
}

void launch_group_tokens(const GroupCall& call, cudaStream_t stream) {
  const int num_experts = call.expert_last - call.expert_first + (call.has_shared != 0 ? 1 : 0);
  require_argument(num_experts <= kMaxLocalExperts, "one rank holds at most ", kMaxLocalExperts, " experts, not ",
                   num_experts);
  require_argument(call.experts_per_token <= kMaxExpertsPerToken, "a token has at most ", kMaxExpertsPerToken,
                   " experts, not ", call.experts_per_token);
  require_argument(call.num_tokens <= max_grouped_tokens(num_experts), "a step of ", call.num_tokens,
                   " tokens is too large to group by expert; it has at most ", max_grouped_tokens(num_experts));
  if (call.num_tokens <= kFewGroupTokens) return launch_few(call, num_experts, stream);
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(group_tokens_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        kSharedLimitBytes - kFixedSharedBytes));
  const int bytes = num_experts * words_for(call.num_tokens) * 6 + 16;
  const int num_thread_blocks = (call.num_tokens + kTokensPerThreadBlock - 1) / kTokensPerThreadBlock;
  launch_dependent(group_tokens_kernel, {static_cast<unsigned>(num_thread_blocks), kGroupThreads, bytes}, stream, call,
                   plan_tiles(call.num_tokens), num_experts);
}

}
