#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/gemm/gemm.h"

namespace glint::cuda {

constexpr int32_t kQuantisedWidthLimit = 1536;
constexpr int32_t kSplitKTokens = 256;
constexpr int32_t kDownBlockTokens = 1024;
constexpr int32_t kMaxLocalExperts = 256;
constexpr int32_t kMaxExpertsPerToken = 8;
constexpr int32_t kStreamedTokens = 64;
constexpr int32_t kStreamedTileTokens = 16;
constexpr int32_t kTilesLoadedAtOnce = 64;

struct TilePlan {
  int32_t gate_up_tokens;
  int32_t down_tokens;
  int32_t block_tokens;
};

TilePlan plan_tiles(int64_t num_tokens);
int64_t max_grouped_tokens(int64_t num_experts);
int64_t max_token_tiles(int64_t num_tokens, int32_t experts_per_token, int32_t num_local_experts);

template <int32_t kRowsValue, int32_t kBytesOfK, bool kIsPaddedValue>
struct DownTile {
  static constexpr int32_t kRows = kRowsValue;
  static constexpr int32_t kK = kBytesOfK;
  static constexpr int32_t kBytes = kRows * kK;
  static constexpr bool kIsPadded = kIsPaddedValue;
};

using DownTile40 = DownTile<40, 192, false>;
using DownTile32 = DownTile<32, 352, false>;
using PaddedDownTile32 = DownTile<32, 192, true>;

struct DownTilePlan {
  int32_t rows;
  int32_t k;

  constexpr int64_t packed_width(int64_t width) const { return (width + k - 1) / k * k; }
};

constexpr DownTilePlan plan_down_tile(int64_t width) {
  if (width % DownTile40::kK == 0) return {DownTile40::kRows, DownTile40::kK};
  if (width % DownTile32::kK == 0) return {DownTile32::kRows, DownTile32::kK};
  return {PaddedDownTile32::kRows, PaddedDownTile32::kK};
}

constexpr bool is_down_shape(int64_t hidden_size, int64_t width) {
  const DownTilePlan tile = plan_down_tile(width);
  return hidden_size % tile.rows == 0 && width % 16 == 0 && width <= kQuantisedWidthLimit &&
         (width % tile.k == 0 || width < tile.k);
}

constexpr bool stores_down_rows(int64_t hidden_size, int64_t width, Multiply multiply) {
  return multiply == Multiply::kWgmma && width > DownTile32::kK && plan_down_tile(width).k == DownTile32::kK &&
         hidden_size % kGemmTileRows == 0;
}

constexpr int64_t kPackedTileHeadBytes = 16;
constexpr int64_t kTokenMetadataBytes = 16;

struct PackedTileShape {
  int64_t max_tokens;
  int64_t width;

  constexpr int64_t metadata_offset() const { return max_tokens * width; }
  constexpr int64_t bytes() const { return kPackedTileHeadBytes + max_tokens * (kTokenMetadataBytes + width); }
};

struct RowPlace {
  uint32_t packed;

  constexpr int tile() const { return static_cast<int>(packed >> 16U); }
  constexpr int slot() const { return static_cast<int>(packed >> 8U & 0xffU); }
  constexpr int row_count() const { return static_cast<int>(packed & 0xffU); }
};

struct GroupedTokens {
  int32_t* row_tokens;
  float* row_weights;
  TokenTile* gate_up_tiles;
  int32_t* num_gate_up_tiles;
  TokenTile* down_tiles;
  int32_t* down_tile_ends;
  int32_t* num_rows;
  RowPlace* row_places;
  uint32_t* rows_packed;
  int32_t* token_rows;
};

struct GroupCall {
  GroupedTokens grouped;
  const int32_t* experts;
  const float* weights;
  int32_t num_tokens;
  int32_t experts_per_token;
  int32_t expert_first;
  int32_t expert_last;
  int32_t has_shared;
  const int32_t* num_real_tokens = nullptr;
  uint64_t* experts_touched = nullptr;
  bool is_in_expert_order = false;
};

struct GateUpCall {
  float* hidden;
  GroupedTokens grouped;
  const uint8_t* packed_weights;
  const float* gate_scales;
  const float* up_scales;
  const uint8_t* activations;
  const float* token_scales;
  int64_t width;
  int64_t k_bytes;
  int64_t num_tokens;
  int64_t max_tiles;
  Multiply multiply;
  uint32_t* tiles_taken = nullptr;
};

struct DownCall {
  float* out;
  uint8_t* packed_tiles;
  uint32_t* arrivals;
  GroupedTokens grouped;
  const uint8_t* packed_weights;
  const float* row_scales;
  float* hidden;
  int64_t width;
  int64_t hidden_size;
  int64_t num_tokens;
  int64_t max_rows;
  bool streams_gate_up;
  Multiply multiply;
  float* routed = nullptr;
};

struct QuantisedRows {
  uint8_t* fp8;
  float* scales;

  static QuantisedRows in(uint8_t* packed_tiles, int64_t max_rows, int64_t width) {
    return {packed_tiles, reinterpret_cast<float*>(packed_tiles + max_rows * width)};
  }
};

struct QuantiseRowsCall {
  QuantisedRows rows;
  const float* hidden;
  const int32_t* num_rows;
  int64_t max_rows;
  int32_t width;
};

struct SumRowsCall {
  float* out;
  const float* routed;
  const float* row_weights;
  const int32_t* token_rows;
  int64_t num_tokens;
  int32_t hidden_size;
  int32_t rows_per_token;
};

struct PlaceRowsCall {
  int32_t* token_rows;
  const int32_t* row_tokens;
  const TokenTile* tiles;
  const int32_t* num_tiles;
  int64_t max_tiles;
  const int32_t* experts;
  int32_t experts_per_token;
  int32_t expert_first;
  int32_t expert_last;
};

struct CombineRowsCall {
  float* out;
  const float* routed;
  const float* row_weights;
  const int32_t* token_rows;
  const int32_t* experts;
  const float* shared;
  int64_t num_tokens;
  int64_t hidden_size;
  int32_t experts_per_token;
  int32_t expert_first;
  int32_t expert_last;
  int32_t has_shared;
  const int32_t* num_real_tokens = nullptr;
};

constexpr bool streams_gate_up(int64_t num_tokens) { return num_tokens <= kStreamedTokens; }

constexpr int64_t max_streamed_rows(int64_t max_tokens, int64_t experts_per_token) {
  return (max_tokens < kStreamedTokens ? max_tokens : kStreamedTokens) * (experts_per_token + 1);
}

int64_t token_rows_count(int64_t num_tokens, int32_t experts_per_token);
void require_down_shape(int64_t hidden_size, int64_t width);
int64_t packed_down_bytes(int64_t hidden_size, int64_t width);
void launch_pack_down(const PackCall& call, cudaStream_t stream);
int check_grouping(const GroupCall& call);
void launch_group_tokens(const GroupCall& call, cudaStream_t stream);
void launch_place_rows(const PlaceRowsCall& call, cudaStream_t stream);
void launch_combine_rows(const CombineRowsCall& call, cudaStream_t stream);
void launch_quantise_rows(const QuantiseRowsCall& call, cudaStream_t stream);
void launch_sum_rows(const SumRowsCall& call, cudaStream_t stream);

template <Multiply kMultiply>
void launch_expert_gate_up_with(const GateUpCall& call, cudaStream_t stream);
extern template void launch_expert_gate_up_with<Multiply::kWgmma>(const GateUpCall& call, cudaStream_t stream);
extern template void launch_expert_gate_up_with<Multiply::kMmaSync>(const GateUpCall& call, cudaStream_t stream);

template <Multiply kMultiply>
void launch_expert_down_with(const DownCall& call, cudaStream_t stream);
extern template void launch_expert_down_with<Multiply::kWgmma>(const DownCall& call, cudaStream_t stream);
extern template void launch_expert_down_with<Multiply::kMmaSync>(const DownCall& call, cudaStream_t stream);

inline void launch_expert_gate_up(const GateUpCall& call, cudaStream_t stream) {
  if (call.multiply == Multiply::kWgmma) return launch_expert_gate_up_with<Multiply::kWgmma>(call, stream);
  launch_expert_gate_up_with<Multiply::kMmaSync>(call, stream);
}

inline void launch_expert_down(const DownCall& call, cudaStream_t stream) {
  if (call.multiply == Multiply::kWgmma) return launch_expert_down_with<Multiply::kWgmma>(call, stream);
  launch_expert_down_with<Multiply::kMmaSync>(call, stream);
}

}
