#include <algorithm>

#include "cuda/check.h"
#include "cuda/kernels/moe/group_few.cuh"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/memory.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

__global__ void __launch_bounds__(kFewGroupThreads)
    group_tokens_few_kernel(const __grid_constant__ GroupCall call, int num_experts) {
  __shared__ FewGroups s_groups;
  const int num_real = call.num_real_tokens == nullptr ? call.num_tokens : __ldg(call.num_real_tokens);
  FewGrouping grouping{call, s_groups, num_experts};
  grouping.begin(num_real);
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const bool is_real = grouping.token < grouping.num_tokens;
  const float weight = is_real ? __ldcg(call.weights + threadIdx.x) : 0.0F;
  grouping.group(is_real ? __ldcg(call.experts + threadIdx.x) : -1, weight);
}

constexpr int kGroupThreads = 1024;
constexpr int kWordTokens = 32;
constexpr int kTokensPerThreadBlock = 256;
constexpr int kGroupShares = 8;
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
    if (call.experts_per_token == kMaxExpertsPerToken && token < call.num_tokens) {
      const auto* g_experts = reinterpret_cast<const int4*>(call.experts) + 2 * token;
      take(0, __ldcg(g_experts));
      take(4, __ldcg(g_experts + 1));
      return;
    }
#pragma unroll
    for (int choice = 0; choice < kMaxExpertsPerToken; ++choice) {
      const bool is_real = token < call.num_tokens && choice < call.experts_per_token;
      r_experts[choice] = is_real ? __ldcg(call.experts + token * call.experts_per_token + choice) : -1;
    }
  }

  __device__ void take(int first, const int4& experts) {
    r_experts[first] = experts.x;
    r_experts[first + 1] = experts.y;
    r_experts[first + 2] = experts.z;
    r_experts[first + 3] = experts.w;
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

struct WordShare {
  int num_shares;
  int share;
  int first;
  int last;

  __device__ WordShare(int num_words, int shares)
      : num_shares(shares), share(shares > 1 ? static_cast<int>(ptx::cluster_ctarank()) : 0) {
    const int per_share = (num_words + num_shares - 1) / num_shares;
    first = min(share * per_share, num_words);
    last = min(first + per_share, num_words);
  }

  __device__ void clear(uint32_t* s_masks, int num_experts, int num_words) const {
    for (int index = threadIdx.x; index < num_experts * (last - first); index += kGroupThreads) {
      s_masks[index / (last - first) * num_words + first + index % (last - first)] = 0U;
    }
    __syncthreads();
    if (num_shares > 1) ptx::barrier_cluster_sync_relaxed();
  }

  __device__ void send(const GroupStorage& storage) const {
    for (int index = threadIdx.x; index < storage.num_experts * (last - first); index += kGroupThreads) {
      uint32_t& s_mask = storage.s_masks[index / (last - first) * storage.num_words + first + index % (last - first)];
      const uint32_t mask = s_mask;
      for (int other = 1; other < num_shares; ++other) {
        ptx::st_relaxed_cluster(s_mask, static_cast<uint32_t>((share + other) % num_shares), mask);
      }
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
};

__device__ void mark_tokens(const GroupCall& call, const GroupStorage& storage, const WordShare& words,
                            TokenChoices choices) {
  const int token_last = min(words.last * kWordTokens, storage.num_tokens);
  for (int token = words.first * kWordTokens + threadIdx.x; token < token_last; token += kGroupThreads) {
    const bool has_next = token + kGroupThreads < token_last;
    const TokenChoices next(call, has_next ? token + kGroupThreads : call.num_tokens);
    choices.mark(call, storage, token);
    choices = next;
  }
  uint32_t* s_shared_mask = storage.s_masks + (storage.num_experts - 1) * storage.num_words;
  for (int word = words.first + threadIdx.x; call.has_shared != 0 && word < words.last; word += kGroupThreads) {
    const int tokens_left = storage.num_tokens - word * kWordTokens;
    s_shared_mask[word] = tokens_left >= kWordTokens ? ~0U : tokens_left > 0 ? (1U << tokens_left) - 1U : 0U;
  }
  __syncthreads();
  if (words.num_shares > 1) words.send(storage);
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

  __device__ int end_of_tile(int tile) const {
    const int first = tile * kSortedTileTokens;
    const int left = count - first;
    const bool is_shared = left > kSortedTileTokens && left < 2 * kSortedTileTokens;
    const int share = ((left + 1) / 2 + kShareTokens - 1) / kShareTokens * kShareTokens;
    return first + (is_shared ? share : left > kSortedTileTokens ? kSortedTileTokens : left);
  }

  __device__ int first_of_tile(int tile) const { return tile == 0 ? 0 : end_of_tile(tile - 1); }

  __device__ SizeCounts sizes() const {
    SizeCounts sizes = {0};
    const int num_full = num_tiles > 2 ? num_tiles - 2 : 0;
    sizes.add(0, num_full);
    for (int tile = num_full; tile < num_tiles; ++tile) {
      sizes.add(SizeCounts::size_of(end_of_tile(tile) - first_of_tile(tile)), 1);
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

__device__ int place_by_size(const ListStorage& s_list, int expert, int size, SizeCounts before) {
  SizeCounts all = {0};
  for (int warp = 0; warp < kListWarps; ++warp) {
    if (warp < expert / 32) before.packed += s_list.warp_sizes[warp];
    all.packed += s_list.warp_sizes[warp];
  }
  return all.of_larger(size) + before.of(size);
}

__device__ void store_shared_tiles(const GroupCall& call, const ListStorage& s_list, const ExpertTiles& mine,
                                   int expert, int row_first, SizeCounts before) {
  for (int tile = 0; tile < mine.num_tiles; ++tile) {
    const int first = mine.first_of_tile(tile);
    const int rows = mine.end_of_tile(tile) - first;
    const int size = SizeCounts::size_of(rows);
    const int index =
        call.is_in_expert_order ? s_list.tile_first[expert] + tile : place_by_size(s_list, expert, size, before);
    call.grouped.gate_up_tiles[index] = {expert, row_first + first, rows, index};
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
  const bool has_shares = list == 0 && tiles.gate_up_tokens == kSortedTileTokens;
  const TileList bounds(storage, tiles, list);
  const ExpertTiles mine(storage, is_used ? expert : 0, bounds.word_first, bounds.word_last, bounds.tile_tokens);
  s_list.tile_first[expert] = is_used ? mine.num_tiles : 0;
  SizeCounts sizes_before = {0};
  if (has_shares) sizes_before = count_sizes_before(s_list, is_used ? mine.sizes() : SizeCounts{0});
  const int before = __reduce_add_sync(~0U, is_used ? bounds.tiles_before(storage, expert) : 0);
  if (threadIdx.x % 32 == 0 && before > 0) atomicAdd(&s_list.num_before, before);
  __syncthreads();
  if (expert < 32) exclusive_scan_one_warp(s_list.tile_first, &s_list.num_tiles);
  __syncthreads();
  if (!is_used) return;
  TokenTile* g_tiles = list == 0 ? call.grouped.gate_up_tiles : call.grouped.down_tiles;
  int index = s_list.num_before + s_list.tile_first[expert];
  const int row_first = storage.s_row_first[expert] + mine.rank_first;
  if (has_shares) store_shared_tiles(call, s_list, mine, expert, row_first, sizes_before);
  for (int done = 0; !has_shares && done < mine.count; done += bounds.tile_tokens, ++index) {
    g_tiles[index] = {expert, row_first + done, min(bounds.tile_tokens, mine.count - done), index};
  }
  if (expert > 0) return;
  int32_t* g_end = list == 0 ? call.grouped.num_gate_up_tiles : call.grouped.down_tile_ends + bounds.token_block;
  *g_end = s_list.num_before + s_list.num_tiles;
}

__global__ void __launch_bounds__(kGroupThreads)
    group_tokens_kernel(const __grid_constant__ GroupCall call, const TilePlan tiles, int num_experts, int num_shares) {
  extern __shared__ uint32_t s_words[];
  __shared__ int32_t s_row_first[kMaxLocalExperts];
  __shared__ ListStorage s_lists[kLists];
  __shared__ int32_t s_total;
  const int num_words = words_for(call.num_tokens);
  if (threadIdx.x < kLists) s_lists[threadIdx.x].num_before = 0;
  const WordShare words(num_words, num_shares);
  words.clear(s_words, num_experts, num_words);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int first_pair = static_cast<int>(blockIdx.x) * kGroupThreads + static_cast<int>(threadIdx.x);
  const TokenChoices first_choices(call, words.first * kWordTokens + static_cast<int>(threadIdx.x));
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
  mark_tokens(call, storage, words, first_choices);
  rank_tokens(call, storage, &s_total);
  if (threadIdx.x == 0 && blockIdx.x == 0) *call.grouped.num_rows = s_total;
  store_rows(call, storage, first_pair, first_weight);
  store_tiles(call, storage, tiles);
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

int check_grouping(const GroupCall& call) {
  const int num_experts = call.expert_last - call.expert_first + (call.has_shared != 0 ? 1 : 0);
  require_argument(num_experts <= kMaxLocalExperts, "one rank holds at most ", kMaxLocalExperts, " experts, not ",
                   num_experts);
  require_argument(call.experts_per_token <= kMaxExpertsPerToken, "a token has at most ", kMaxExpertsPerToken,
                   " experts, not ", call.experts_per_token);
  require_argument(call.num_tokens <= max_grouped_tokens(num_experts), "a step of ", call.num_tokens,
                   " tokens is too large to group by expert; it has at most ", max_grouped_tokens(num_experts));
  const bool lists_places = call.grouped.row_places != nullptr && call.grouped.rows_packed != nullptr;
  require_argument(lists_places || call.num_tokens > kFewGroupTokens, "a grouping of ", call.num_tokens,
                   " tokens lists the rows of packed tiles; give it row_places and rows_packed");
  return num_experts;
}

void launch_group_tokens(const GroupCall& call, cudaStream_t stream) {
  const int num_experts = check_grouping(call);
  if (call.num_tokens <= kFewGroupTokens) {
    return launch_dependent(group_tokens_few_kernel, {1, kFewGroupThreads, 0}, stream, call, num_experts);
  }
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(group_tokens_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        kSharedLimitBytes - kFixedSharedBytes));
  const int bytes = num_experts * words_for(call.num_tokens) * 6 + 16;
  const int num_needed = (call.num_tokens + kTokensPerThreadBlock - 1) / kTokensPerThreadBlock;
  const int num_shares = num_needed >= kGroupShares ? kGroupShares : 1;
  const auto num_thread_blocks = static_cast<unsigned>((num_needed + num_shares - 1) / num_shares * num_shares);
  const LaunchShape shape{num_thread_blocks, kGroupThreads, bytes, static_cast<unsigned>(num_shares)};
  launch_dependent(group_tokens_kernel, shape, stream, call, plan_tiles(call.num_tokens), num_experts, num_shares);
}

}
