#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/attention/pages.h"

namespace glint::cuda {

inline constexpr int kSplitTokens = 1024;
inline constexpr int kMaxGroupHeads = 16;

struct RotaryTableCall {
  float* cosines;
  float* sines;
  const int32_t* positions;
  int64_t count;
  int64_t rotary_dim;
  double theta;
};

struct RopeCall {
  uint16_t* query_out;
  KvPages pages;
  const float* query;
  const float* key;
  const float* value;
  int64_t query_stride;
  int64_t key_stride;
  const float* query_norm;
  const float* key_norm;
  const float* cosines;
  const float* sines;
  const int32_t* slots;
  int64_t count;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  float epsilon;
};

inline constexpr int kSplitPages = kSplitTokens / kPageTokens;
inline constexpr int kTailPages = 4;
inline constexpr int kManySplits = 256;

constexpr int32_t num_context_splits(int32_t num_positions) {
  return (num_positions + kSplitTokens - 1) / kSplitTokens;
}

constexpr int32_t num_context_tails(int32_t num_positions) {
  const int32_t num_splits = num_context_splits(num_positions);
  const int32_t num_last = num_positions - (num_splits - 1) * kSplitTokens;
  return num_splits > 1 && num_last <= kTailPages * kPageTokens ? 1 : 0;
}

struct alignas(128) DecodeTask {
  int32_t row;
  int32_t num_positions;
  int32_t split;
  int32_t num_splits;
  int32_t partial_first;
  int32_t num_tails;
  int32_t context_first;
  int32_t pages[kSplitPages + kTailPages];
};

struct PrefillTask {
  int32_t row_first;
  int32_t row_count;
  int32_t first_position;
  int32_t page_first;
  int32_t query_first;
  int32_t context_first;
};

struct AttendCall {
  float* out;
  const uint16_t* query;
  KvPages pages;
  const int32_t* page_table;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
};

struct DecodeCall {
  AttendCall attend;
  const DecodeTask* tasks;
  const int32_t* num_tasks;
  int32_t max_tasks;
  float* partials;
  int32_t* arrivals;
};

struct AttentionStepCall : DecodeCall {
  RopeCall rope;
  uint8_t* fp8;
  float* scales;
  int64_t fp8_stride;
  float* magnitudes;
};

struct PrefillCall {
  AttendCall attend;
  const PrefillTask* tasks;
  const int32_t* num_tasks;
  int32_t kernels;
  bool hides_earlier;
};

struct DequantiseKvCall {
  KvPages fp8;
  KvPages bf16;
  const int32_t* page_table;
  int64_t num_pages;
  int32_t num_kv_heads;
  int32_t head_dim;
};

static_assert(sizeof(DecodeTask) == 128, "a task of a split is one line of memory");

inline constexpr int kPrefillTileQueries = 128;

constexpr int64_t partial_floats(int64_t head_dim) { return kMaxGroupHeads * (padded_head_dim(head_dim) + 2); }

constexpr bool fits_attention_step(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t rotary_dim) {
  return num_kv_heads > 0 && num_heads % num_kv_heads == 0 && num_heads / num_kv_heads + 2 <= kMaxGroupHeads &&
         head_dim == kMaxHeadDim && rotary_dim % 8 == 0;
}

constexpr bool attention_step_quantises(int32_t num_kv_heads) { return num_kv_heads == 1; }

void launch_rotary_table(const RotaryTableCall& call, cudaStream_t stream);
void launch_rope_and_cache(const RopeCall& call, cudaStream_t stream);
void launch_attention_decode(const DecodeCall& call, cudaStream_t stream);
void launch_attention_step(const AttentionStepCall& call, cudaStream_t stream);
void launch_dequantise_kv(const DequantiseKvCall& call, cudaStream_t stream);
void launch_attention_prefill(const PrefillCall& call, cudaStream_t stream);
void launch_attention_prefill_hopper(const PrefillCall& call, cudaStream_t stream);

}
