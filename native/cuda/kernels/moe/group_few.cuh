#pragma once

#include "cuda/kernels/moe/experts.h"

namespace glint::cuda {

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
  int num_tokens = 0;
  int thread = static_cast<int>(threadIdx.x);
  int token = thread / call.experts_per_token;

  __device__ __forceinline__ void begin(int num_real) {
    num_tokens = max(0, min(num_real, call.num_tokens));
    const int left = num_tokens - thread / kMaxLocalExperts * 32;
    const bool is_shared = call.has_shared != 0 && thread % kMaxLocalExperts == num_experts - 1;
    const uint32_t shared_mask = left >= 32 ? ~0U : left > 0 ? (1U << left) - 1U : 0U;
    s_groups.masks[thread / kMaxLocalExperts][thread % kMaxLocalExperts] = is_shared ? shared_mask : 0U;
  }

  __device__ __forceinline__ int mark(int expert) const {
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

  __device__ __forceinline__ void group(int global_expert, float weight) const {
    const int expert = mark(global_expert);
    __syncthreads();
    list_experts();
    __syncthreads();
    if (expert >= 0) store_row(expert, token, weight);
    if (call.has_shared != 0 && thread < num_tokens) store_row(num_experts - 1, thread, 1.0F);
  }
};

__device__ __forceinline__ void group_one_token(const GroupCall& call, int num_experts, int num_real, int chosen,
                                                float weight) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool is_shared = lane == call.experts_per_token;
  const bool is_chosen = lane < call.experts_per_token && chosen >= call.expert_first && chosen < call.expert_last;
  const int expert = is_shared ? num_experts - 1 : chosen - call.expert_first;
  const bool is_row = num_real > 0 && (is_chosen || (is_shared && call.has_shared != 0));
  const uint32_t rows = __ballot_sync(~0U, is_row);
  const int row = __popc(rows & ((1U << lane) - 1U));
  if (is_row) {
    const TokenTile tile = {expert, row, 1, row};
    call.grouped.gate_up_tiles[row] = tile;
    call.grouped.down_tiles[row] = tile;
    call.grouped.rows_packed[row] = 0;
    call.grouped.row_tokens[row] = 0;
    call.grouped.row_weights[row] = is_shared ? 1.0F : weight;
    call.grouped.row_places[row] = {static_cast<uint32_t>(row << 16 | 1)};
  }
  if (lane > 0) return;
  *call.grouped.num_rows = __popc(rows);
  *call.grouped.num_gate_up_tiles = __popc(rows);
  *call.grouped.down_tile_ends = __popc(rows);
  if (call.experts_touched == nullptr) return;
  const int touched = __popc(rows & ((1U << call.experts_per_token) - 1U));
  auto* g_touched = reinterpret_cast<unsigned long long*>(call.experts_touched);
  atomicAdd(g_touched, static_cast<unsigned long long>(touched));
}

}
