#pragma once

#include "cuda/kernels/attention/pages.h"
#include "cuda/kernels/ptx/copy.cuh"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/ptx/mma.cuh"

namespace glint::cuda {

__device__ __forceinline__ uint32_t swizzled_address(const std::byte* s_tile, int row, int dim) {
  return ptx::shared_address(s_tile) + static_cast<uint32_t>(swizzled_offset(row, dim));
}

__device__ __forceinline__ int warp_lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }

__device__ __forceinline__ uint32_t raise_bf16_pair(uint32_t pair) {
  constexpr uint32_t kTwoTo120 = 0x7b807b80U;
  return ptx::mul_bf16x2(pair, kTwoTo120);
}

__device__ __forceinline__ void dequantise_fp8(uint32_t fp8, uint32_t& even, uint32_t& odd) {
  constexpr uint32_t kSigns = 0x80008000U;
  constexpr uint32_t kMagnitudes = 0x07f007f0U;
  even = raise_bf16_pair((fp8 << 4U & kMagnitudes) | (fp8 << 8U & kSigns));
  odd = raise_bf16_pair((fp8 >> 4U & kMagnitudes) | (fp8 & kSigns));
}

__device__ __forceinline__ void dequantise_fp8_or_nan(uint32_t fp8, uint32_t& even, uint32_t& odd) {
  constexpr uint32_t kNanFp8 = 0x7f7f7f7fU;
  constexpr uint32_t kNanPair = 0x7fff7fffU;
  const bool is_nan = (fp8 & kNanFp8) == kNanFp8;
  dequantise_fp8(fp8, even, odd);
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
      ptx::ldmatrix_x4(keys[next], swizzled_address(s_keys, row, (step + next) * 16 + warp_lane() / 8 % 2 * 8));
    }
  }

  template <int kTiles>
  __device__ __forceinline__ static void load_values(uint32_t (&values)[kTiles][2], const std::byte* s_values,
                                                     int token, int dim) {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t loaded[4];
      ptx::ldmatrix_x4_trans(
          loaded, swizzled_address(s_values, token + warp_lane() % 16, dim + tile * 8 + warp_lane() / 16 * 8));
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) values[tile + reg / 2][reg % 2] = loaded[reg];
    }
  }
};

template <int kPaddedDim>
struct Fp8Tile {
  static constexpr int kHeadDim = kPaddedDim;
  static constexpr int kSlabs = 1;
  static constexpr int kRowBytes = kPaddedDim;

  __device__ __forceinline__ static uint32_t group_address(const std::byte* s_tile, int row, int group) {
    return ptx::shared_address(s_tile) + static_cast<uint32_t>(fp8_group_offset(kPaddedDim, row, group));
  }

  __device__ __forceinline__ static void load_keys(uint32_t (&keys)[2][4], const std::byte* s_keys, int token,
                                                   int step) {
    const int row = token + warp_lane() / 16 * 8 + warp_lane() % 8;
    uint32_t fp8[4];
    ptx::ldmatrix_x4(fp8, group_address(s_keys, row, step + warp_lane() / 8 % 2));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (step == 0) {
        dequantise_fp8_or_nan(fp8[2 * half], keys[0][2 * half], keys[0][2 * half + 1]);
      } else {
        dequantise_fp8(fp8[2 * half], keys[0][2 * half], keys[0][2 * half + 1]);
      }
      dequantise_fp8(fp8[2 * half + 1], keys[1][2 * half], keys[1][2 * half + 1]);
    }
  }

  template <int kTiles>
  __device__ __forceinline__ static void load_values(uint32_t (&values)[kTiles][2], const std::byte* s_values,
                                                     int token, int dim) {
    constexpr int kGroups = kTiles / 2;
    const int group = dim / kFp8Group + (kGroups == 2 ? warp_lane() / 16 : 0);
    const uint32_t address = group_address(s_values, token + warp_lane() % 16, group);
    uint32_t fp8[2 * kGroups];
    if constexpr (kGroups == 2) {
      ptx::ldmatrix_x4_trans(fp8, address);
    } else {
      ptx::ldmatrix_x2_trans(fp8, address);
    }
#pragma unroll
    for (int index = 0; index < 2 * kGroups; ++index) {
      const int tile = index / 2 * 2;
      dequantise_fp8(fp8[index], values[tile][index % 2], values[tile + 1][index % 2]);
    }
  }
};

inline constexpr int kStorageAlignment = 1024;

__device__ __forceinline__ std::byte* aligned_storage(std::byte* s_memory) {
  const uint32_t address = ptx::shared_address(s_memory);
  return s_memory + (kStorageAlignment - address % kStorageAlignment) % kStorageAlignment;
}

template <int kThreads>
__device__ __forceinline__ void sync_consumers() {
  ptx::bar_sync(1 + static_cast<int>(threadIdx.y), kThreads);
}

template <typename Tile, int kStages>
struct PageRing {
  static constexpr int kSlabs = Tile::kSlabs;
  static constexpr int kTileSlabBytes = kPageTokens * Tile::kRowBytes;
  static constexpr int kTileBytes = kSlabs * kTileSlabBytes;
  using State = PipelineState<kStages>;

  alignas(kStorageAlignment) std::byte tiles[kStages][kTileBytes];
  uint64_t arrived[kStages];
  uint64_t released[kStages];

  template <int kConsumerWarps>
  __device__ __forceinline__ void prepare() {
    if (static_cast<int>(threadIdx.x) < kStages) {
      ptx::mbarrier_init(arrived[threadIdx.x], 1);
      ptx::mbarrier_init(released[threadIdx.x], kConsumerWarps);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_one_lane(State& state, const std::byte* g_tile, int tokens) {
    const auto slab_bytes = static_cast<uint32_t>(tokens * Tile::kRowBytes);
    ptx::mbarrier_wait(released[state.stage], state.phase ^ 1U);
    ptx::mbarrier_arrive_expect_tx(arrived[state.stage], kSlabs * slab_bytes);
    if (tokens == kPageTokens) {
      ptx::cp_async_bulk(tiles[state.stage], g_tile, kTileBytes, arrived[state.stage], ptx::createpolicy_evict_first());
    } else if (tokens > 0) {
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        ptx::cp_async_bulk(tiles[state.stage] + slab * kTileSlabBytes, g_tile + int64_t{slab} * kTileSlabBytes,
                           slab_bytes, arrived[state.stage], ptx::createpolicy_evict_first());
      }
    }
    state.advance();
  }

  __device__ __forceinline__ std::byte* wait_until_arrived(const State& state) {
    ptx::mbarrier_wait(arrived[state.stage], state.phase);
    return tiles[state.stage];
  }

  template <int kThreads>
  __device__ __forceinline__ void zero_tokens(const State& state, int first, int last) {
    constexpr int kRowChunks = Tile::kRowBytes / kChunkBytes;
    const int chunks = (last - first) * kRowChunks;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      auto* s_tail = reinterpret_cast<uint4*>(tiles[state.stage] + slab * kTileSlabBytes + first * Tile::kRowBytes);
      for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += kThreads) s_tail[chunk] = {};
    }
  }

  template <int kThreads>
  __device__ __forceinline__ void zero_tail(const State& state, int tokens) {
    if (tokens >= kPageTokens) return;
    zero_tokens<kThreads>(state, tokens, kPageTokens);
    ptx::fence_proxy_async();
    sync_consumers<kThreads>();
  }

  __device__ __forceinline__ void release(State& state, float last_sum) {
    ptx::wait_for_sum(last_sum);
    release(state);
  }

  __device__ __forceinline__ void release(State& state) {
    __syncwarp();
    if (threadIdx.x % kWarpLanes == 0) ptx::mbarrier_arrive(released[state.stage]);
    state.advance();
  }
};

struct PageSource {
  const KvPages& pages;
  const int32_t* g_table;
  int kv_head;

  __device__ __forceinline__ int64_t offset(int page) const {
    return g_table[page] * pages.page_bytes + kv_head * pages.head_bytes;
  }
  __device__ __forceinline__ const std::byte* keys(int page) const { return pages.keys + offset(page); }
  __device__ __forceinline__ const std::byte* values(int page) const { return pages.values + offset(page); }
};

template <typename Ring, typename Item>
__device__ __forceinline__ void load_page_pairs(Ring& ring, typename Ring::State& state, const PageSource& source,
                                                const Item& item) {
  const int page_count = item.page_count();
  for (int page = 0; page < page_count; page += 2) {
    const bool has_second = page + 1 < page_count;
    ring.load_one_lane(state, source.keys(page), item.page_tokens(page));
    if (has_second) ring.load_one_lane(state, source.keys(page + 1), item.page_tokens(page + 1));
    ring.load_one_lane(state, source.values(page), item.page_tokens(page));
    if (has_second) ring.load_one_lane(state, source.values(page + 1), item.page_tokens(page + 1));
  }
}

}
