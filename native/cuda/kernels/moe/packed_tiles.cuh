#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/kernels/gemm/gemm_tile.cuh"
#include "cuda/kernels/moe/experts.h"
#include "cuda/kernels/ptx/mbarrier.cuh"

namespace glint::cuda {

constexpr float kE4m3Largest = 448.0F;

__device__ __forceinline__ float largest_magnitude(float most, const float4& values) {
  return fmaxf(fmaxf(fmaxf(most, fabsf(values.x)), fmaxf(fabsf(values.y), fabsf(values.z))), fabsf(values.w));
}

__device__ __forceinline__ bool has_unwritten(const float4& values) {
  return __float_as_uint(values.x) == 0U || __float_as_uint(values.y) == 0U || __float_as_uint(values.z) == 0U ||
         __float_as_uint(values.w) == 0U;
}

struct ScaleDivision {
  static constexpr float kLeast = 0x1p-90F;
  static constexpr float kMost = 0x1p90F;

  float scale;
  float reciprocal;
  bool is_plain;

  __device__ __forceinline__ explicit ScaleDivision(float divisor)
      : scale(divisor), is_plain(divisor > kLeast && divisor < kMost) {
    reciprocal = __frcp_rn(divisor);
  }

  __device__ __forceinline__ float plain(float value) const {
    const float near = __fmul_rn(value, reciprocal);
    const float nearer = __fmaf_rn(__fmaf_rn(-near, scale, value), reciprocal, near);
    return copysignf(__fmaf_rn(__fmaf_rn(-nearer, scale, value), reciprocal, nearer), value);
  }

  __device__ __forceinline__ float4 divide(const float4& values) const {
    if (is_plain) return {plain(values.x), plain(values.y), plain(values.z), plain(values.w)};
    return {__fdiv_rn(values.x, scale), __fdiv_rn(values.y, scale), __fdiv_rn(values.z, scale),
            __fdiv_rn(values.w, scale)};
  }
};

__device__ __forceinline__ uint32_t fp8_of(const float4& values) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2({values.x, values.y}, __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2({values.z, values.w}, __NV_SATFINITE, __NV_E4M3);
  return low | high << 16U;
}

template <int kVectors>
struct HiddenRow {
  float4 r_values[kVectors];

  static __device__ __forceinline__ int first_unit(int vector) { return vector * 128 + threadIdx.x % 32 * 4; }

  __device__ __forceinline__ void load(const float* g_row, int width) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int unit = first_unit(vector);
      r_values[vector] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (unit < width) r_values[vector] = __ldcg(reinterpret_cast<const float4*>(g_row + unit));
    }
  }

  __device__ __forceinline__ bool load_written(const float* g_row, int width) {
    bool is_written = true;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int unit = first_unit(vector);
      r_values[vector] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (unit >= width) continue;
      r_values[vector] = ptx::ld_relaxed_gpu(g_row + unit);
    }
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      is_written = is_written && (first_unit(vector) >= width || !has_unwritten(r_values[vector]));
    }
    return __all_sync(~0U, is_written);
  }

  static __device__ __forceinline__ void mark_unwritten(float* g_row, int width) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int unit = first_unit(vector);
      if (unit < width) ptx::st_relaxed_gpu(g_row + unit, float4{});
    }
  }

  template <class Target>
  __device__ __forceinline__ float quantise_by_converged_warp(const Target& target, int packed_width) const {
    float most = 0.0F;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) most = largest_magnitude(most, r_values[vector]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0U, most, distance));
    }
    const float scale = most == 0.0F ? 1.0F : __fdiv_rn(most, kE4m3Largest);
    const ScaleDivision by_scale(scale);
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int unit = first_unit(vector);
      if (unit >= packed_width) continue;
      *reinterpret_cast<uint32_t*>(target.place(unit)) = fp8_of(by_scale.divide(r_values[vector]));
    }
    return scale;
  }
};

struct DownInputs {
  float* out;
  uint8_t* packed_tiles;
  uint32_t* arrivals;
  GroupedTokens grouped;
  const uint8_t* weights;
  const float* row_scales;
  float* hidden;
  int32_t width;
  int32_t packed_width;
  int32_t hidden_size;
  int32_t num_tokens;
  int32_t num_steps;
  int32_t num_owners;
  int32_t block_tokens;
  int32_t max_rows;

  __device__ __forceinline__ int num_token_blocks() const { return (num_tokens + block_tokens - 1) / block_tokens; }

  __device__ __forceinline__ int num_tiles() const { return __ldcg(grouped.down_tile_ends + num_token_blocks() - 1); }
};

struct ListedRows {
  const GroupedTokens& grouped;

  __device__ __forceinline__ TokenTile tile(int index) const { return load_tile_now(grouped.down_tiles + index); }
  __device__ __forceinline__ int token(int row) const { return __ldcg(grouped.row_tokens + row); }
  __device__ __forceinline__ float weight(int row) const { return __ldcg(grouped.row_weights + row); }
};

template <class Tile>
constexpr int kNarrowVectors = (Tile::kK + 127) / 128;
constexpr int kWideVectors = kQuantisedWidthLimit / 128;

struct PackedMetadata {
  int32_t place;
  float weight;
  float scale;
};

struct alignas(16) TokenMetadata : PackedMetadata {};

static_assert(sizeof(TokenMetadata) == kTokenMetadataBytes, "the metadata of a token are one vector");

template <int kMaxTokensValue, int kPlaceStrideValue>
struct CoreMatrixTiles {
  static constexpr int kMaxTokens = kMaxTokensValue;
  static constexpr int kItemsPerTile = 16;
  static constexpr int kPlaceStride = kPlaceStrideValue;

  static __device__ __forceinline__ int values_offset(int count) {
    return static_cast<int>(kPackedTileHeadBytes) + count * static_cast<int>(kTokenMetadataBytes);
  }
  static __device__ __forceinline__ int& count(uint8_t* packed) { return *reinterpret_cast<int*>(packed); }
  static __device__ __forceinline__ TokenMetadata* metadata(uint8_t* packed) {
    return reinterpret_cast<TokenMetadata*>(packed + kPackedTileHeadBytes);
  }

  struct Row {
    uint8_t* packed;
    int32_t slot;
    int32_t row_count;

    __device__ __forceinline__ Row(uint8_t* of, int in_tile, int tile_rows)
        : packed(of), slot(in_tile), row_count(tile_rows) {}

    __device__ __forceinline__ Row(uint8_t* of, const TokenTile& tile, int in_tile, int)
        : Row(of, in_tile, tile.row_count) {}

    __device__ __forceinline__ uint8_t* place(int unit) const {
      return packed + values_offset(row_count) + (unit / 16 * row_count + slot) * 16 + unit % 16;
    }

    __device__ __forceinline__ void store(const PackedMetadata& token) const {
      count(packed) = row_count;
      metadata(packed)[slot] = {token};
    }
  };
};

struct FragmentTiles {
  static constexpr int kMaxTokens = 64;
  static constexpr int kItemsPerTile = 16;
  static constexpr int kPlaceStride = 1;

  struct Row {
    uint8_t* fp8;
    int32_t* metadata;

    __device__ __forceinline__ Row(uint8_t* packed, const TokenTile&, int slot, int width)
        : fp8(packed + slot / kFragmentRows * kFragmentRows * width + slot % 8 * 64 + slot % kFragmentRows / 8 * 4),
          metadata(reinterpret_cast<int32_t*>(packed + PackedTileShape{kMaxTokens, width}.metadata_offset() +
                                              kPackedTileHeadBytes) +
                   slot) {}

    __device__ __forceinline__ uint8_t* place(int unit) const {
      return fp8 + unit / 32 * 512 + unit % 16 / 4 * 16 + unit / 16 % 2 * 8;
    }

    __device__ __forceinline__ void store(const PackedMetadata& token) const {
      metadata[0] = token.place;
      metadata[kMaxTokens] = __float_as_int(token.weight);
      metadata[2 * kMaxTokens] = __float_as_int(token.scale);
    }
  };
};

template <class Tiles, int kVectors, int kRows>
__device__ __forceinline__ void pack_tile_rows(const DownInputs& inputs, const ListedRows& rows, const TokenTile& tile,
                                               int index, int slot_first) {
  uint8_t* g_packed = inputs.packed_tiles + index * PackedTileShape{Tiles::kMaxTokens, inputs.packed_width}.bytes();
  HiddenRow<kVectors> r_rows[kRows];
  int r_tokens[kRows];
  float r_weights[kRows];
#pragma unroll
  for (int next = 0; next < kRows; ++next) {
    const int row = tile.row_first + min(slot_first + next, tile.row_count - 1);
    r_rows[next].load(inputs.hidden + int64_t{row} * inputs.width, inputs.width);
    r_tokens[next] = rows.token(row);
    r_weights[next] = rows.weight(row);
  }
#pragma unroll
  for (int next = 0; next < kRows; ++next) {
    const int slot = slot_first + next;
    if (slot >= tile.row_count) return;
    const typename Tiles::Row target(g_packed, tile, slot, inputs.packed_width);
    const float scale = r_rows[next].quantise_by_converged_warp(target, inputs.packed_width);
    if (threadIdx.x % 32 == 0) {
      target.store({r_tokens[next] % inputs.block_tokens * Tiles::kPlaceStride, r_weights[next], scale});
    }
    __syncwarp();
  }
}

template <class Tiles>
struct PackItem {
  int32_t item;
  TokenTile tile;

  __device__ __forceinline__ PackItem(const ListedRows& rows, int num_tiles, int first) : item(first), tile{} {
    if (item < num_tiles * Tiles::kItemsPerTile) tile = rows.tile(index());
  }

  __device__ __forceinline__ int index() const { return item / Tiles::kItemsPerTile; }
  __device__ __forceinline__ int slot() const { return item % Tiles::kItemsPerTile; }
};

template <class Tiles, int kWarps, int kVectors, int kRows>
__device__ __forceinline__ void pack_tiles(const DownInputs& inputs, const ListedRows& rows, int num_tiles,
                                           PackItem<Tiles> next) {
  while (next.item < num_tiles * Tiles::kItemsPerTile) {
    const PackItem<Tiles> following(rows, num_tiles, next.item + static_cast<int>(gridDim.x) * kWarps);
    for (int slot = next.slot() * kRows; slot < next.tile.row_count; slot += Tiles::kItemsPerTile * kRows) {
      pack_tile_rows<Tiles, kVectors, kRows>(inputs, rows, next.tile, next.index(), slot);
    }
    next = following;
  }
}

struct BlockArrivals {
  uint32_t* g_arrivals;
  uint32_t mine;
  uint32_t target;

  __device__ __forceinline__ explicit BlockArrivals(uint32_t* arrivals) : g_arrivals(arrivals) {
    uint32_t all = 1;
    while (all < gridDim.x) all *= 2;
    mine = blockIdx.x == 0 ? all - gridDim.x + 1 : 1;
    target = (ptx::ld_acquire_gpu(g_arrivals) / all + 1) * all;
  }

  template <int kThreads>
  __device__ __forceinline__ void announce_and_wait() const {
    constexpr int kAllArrived = 10;
    if (threadIdx.x == 0) {
      ptx::red_add_release_gpu(g_arrivals, mine);
      while (static_cast<int32_t>(ptx::ld_acquire_gpu(g_arrivals) - target) < 0) {
      }
    }
    ptx::bar_sync(kAllArrived, kThreads);
  }
};

}
