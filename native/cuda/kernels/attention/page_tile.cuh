#pragma once

#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/ptx/tensor_core.cuh"
#include "cuda/kernels/attention/pages.h"

namespace glint::cuda {

__device__ __forceinline__ uint32_t swizzled_address(const std::byte* s_tile, int row, int dim) {
  return shared_address(s_tile) + static_cast<uint32_t>(swizzled_offset(row, dim));
}

__device__ __forceinline__ int warp_lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }

__device__ __forceinline__ uint32_t raise_bf16_pair(uint32_t pair) {
  constexpr uint32_t kTwoTo120 = 0x7b807b80U;
  uint32_t raised;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(raised) : "r"(pair), "r"(kTwoTo120));
  return raised;
}

__device__ __forceinline__ void widen_codes(uint32_t codes, uint32_t& even, uint32_t& odd) {
  constexpr uint32_t kSigns = 0x80008000U;
  constexpr uint32_t kMagnitudes = 0x07f007f0U;
  even = raise_bf16_pair((codes << 4U & kMagnitudes) | (codes << 8U & kSigns));
  odd = raise_bf16_pair((codes >> 4U & kMagnitudes) | (codes & kSigns));
}

__device__ __forceinline__ void widen_codes_or_nan(uint32_t codes, uint32_t& even, uint32_t& odd) {
  constexpr uint32_t kNanCodes = 0x7f7f7f7fU;
  constexpr uint32_t kNanPair = 0x7fff7fffU;
  const bool is_nan = (codes & kNanCodes) == kNanCodes;
  widen_codes(codes, even, odd);
  even = is_nan ? kNanPair : even;
  odd = is_nan ? kNanPair : odd;
}

template <int kPaddedDim>
struct Bf16Tile {
  static constexpr int kHeadDim = kPaddedDim;
  static constexpr int kSlabs = kPaddedDim / kSlabDims;
  static constexpr int kRowBytes = kSlabRowBytes;

  __device__ __forceinline__ static void load_keys(uint32_t (&keys)[2][4], const std::byte* s_keys, int token,
                                                   int step) {
    const int row = token + warp_lane() / 16 * 8 + warp_lane() % 8;
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      ldmatrix_x4(keys[next], swizzled_address(s_keys, row, (step + next) * 16 + warp_lane() / 8 % 2 * 8));
    }
  }

  template <int kTiles>
  __device__ __forceinline__ static void load_values(uint32_t (&values)[kTiles][2], const std::byte* s_values,
                                                     int token, int dim) {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t loaded[4];
      ldmatrix_x4_trans(loaded, swizzled_address(s_values, token + warp_lane() % 16,
                                                 dim + tile * 8 + warp_lane() / 16 * 8));
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) values[tile + reg / 2][reg % 2] = loaded[reg];
    }
  }
};

template <int kPaddedDim>
struct CodeTile {
  static constexpr int kHeadDim = kPaddedDim;
  static constexpr int kSlabs = 1;
  static constexpr int kRowBytes = kPaddedDim;

  __device__ __forceinline__ static uint32_t group_address(const std::byte* s_tile, int row, int group) {
    return shared_address(s_tile) + static_cast<uint32_t>(code_group_offset(kPaddedDim, row, group));
  }

  __device__ __forceinline__ static void load_keys(uint32_t (&keys)[2][4], const std::byte* s_keys, int token,
                                                   int step) {
    const int row = token + warp_lane() / 16 * 8 + warp_lane() % 8;
    uint32_t codes[4];
    ldmatrix_x4(codes, group_address(s_keys, row, step + warp_lane() / 8 % 2));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (step == 0) {
        widen_codes_or_nan(codes[2 * half], keys[0][2 * half], keys[0][2 * half + 1]);
      } else {
        widen_codes(codes[2 * half], keys[0][2 * half], keys[0][2 * half + 1]);
      }
      widen_codes(codes[2 * half + 1], keys[1][2 * half], keys[1][2 * half + 1]);
    }
  }

  template <int kTiles>
  __device__ __forceinline__ static void load_values(uint32_t (&values)[kTiles][2], const std::byte* s_values,
                                                     int token, int dim) {
    constexpr int kGroups = kTiles / 2;
    const int group = dim / kCodeGroup + (kGroups == 2 ? warp_lane() / 16 : 0);
    const uint32_t address = group_address(s_values, token + warp_lane() % 16, group);
    uint32_t codes[2 * kGroups];
    if constexpr (kGroups == 2) {
      ldmatrix_x4_trans(codes, address);
    } else {
      ldmatrix_x2_trans(codes, address);
    }
#pragma unroll
    for (int index = 0; index < 2 * kGroups; ++index) {
      const int tile = index / 2 * 2;
      widen_codes(codes[index], values[tile][index % 2], values[tile + 1][index % 2]);
    }
  }
};

}
