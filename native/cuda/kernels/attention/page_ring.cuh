#pragma once

#include "cuda/kernels/ptx/dependent.cuh"
#include "cuda/kernels/attention/page_tile.cuh"

namespace glint::cuda {

inline constexpr int kPlanAlignment = 1024;

__device__ __forceinline__ std::byte* aligned_plan(std::byte* s_memory) {
  const uint32_t address = shared_address(s_memory);
  return s_memory + (kPlanAlignment - address % kPlanAlignment) % kPlanAlignment;
}

template <int kThreads>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync %0, %1;" ::"r"(1U + threadIdx.y), "n"(kThreads) : "memory");
}

template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    phase ^= stage == 0 ? 1U : 0U;
  }
};

template <typename Tile, int kStages>
struct PageRing {
  static constexpr int kSlabs = Tile::kSlabs;
  static constexpr int kTileSlabBytes = kPageTokens * Tile::kRowBytes;
  static constexpr int kTileBytes = kSlabs * kTileSlabBytes;
  using Place = RingPlace<kStages>;

  alignas(kPlanAlignment) std::byte tiles[kStages][kTileBytes];
  uint64_t arrived[kStages];
  uint64_t released[kStages];

  template <int kConsumerWarps>
  __device__ __forceinline__ void prepare() {
    if (static_cast<int>(threadIdx.x) < kStages) {
      mbarrier_init(&arrived[threadIdx.x], 1);
      mbarrier_init(&released[threadIdx.x], kConsumerWarps);
      fence_barrier_init();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_one_lane(Place& place, const std::byte* g_tile, int tokens) {
    const auto slab_bytes = static_cast<uint32_t>(tokens * Tile::kRowBytes);
    mbarrier_wait(&released[place.stage], place.phase ^ 1U);
    mbarrier_expect(&arrived[place.stage], kSlabs * slab_bytes);
    if (tokens == kPageTokens) {
      copy_bulk_evict_first(tiles[place.stage], g_tile, kTileBytes, &arrived[place.stage]);
    } else if (tokens > 0) {
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        copy_bulk_evict_first(tiles[place.stage] + slab * kTileSlabBytes, g_tile + int64_t{slab} * kTileSlabBytes,
                              slab_bytes, &arrived[place.stage]);
      }
    }
    place.advance();
  }

  __device__ __forceinline__ std::byte* wait_until_arrived(const Place& place) {
    mbarrier_wait(&arrived[place.stage], place.phase);
    return tiles[place.stage];
  }

  template <int kThreads>
  __device__ __forceinline__ void zero_tokens(const Place& place, int first, int last) {
    constexpr int kRowChunks = Tile::kRowBytes / kChunkBytes;
    const int chunks = (last - first) * kRowChunks;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      auto* s_tail = reinterpret_cast<uint4*>(tiles[place.stage] + slab * kTileSlabBytes + first * Tile::kRowBytes);
      for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += kThreads) s_tail[chunk] = {};
    }
  }

  template <int kThreads>
  __device__ __forceinline__ void zero_tail(const Place& place, int tokens) {
    if (tokens >= kPageTokens) return;
    zero_tokens<kThreads>(place, tokens, kPageTokens);
    fence_proxy_async();
    sync_consumers<kThreads>();
  }

  __device__ __forceinline__ void release(Place& place) {
    __syncwarp();
    if (threadIdx.x % kWarpLanes == 0) mbarrier_arrive(&released[place.stage]);
    place.advance();
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
__device__ __forceinline__ void load_page_pairs(Ring& ring, typename Ring::Place& place, const PageSource& source,
                                                const Item& item) {
  const int page_count = item.page_count();
  for (int page = 0; page < page_count; page += 2) {
    const bool has_second = page + 1 < page_count;
    ring.load_one_lane(place, source.keys(page), item.page_tokens(page));
    if (has_second) ring.load_one_lane(place, source.keys(page + 1), item.page_tokens(page + 1));
    ring.load_one_lane(place, source.values(page), item.page_tokens(page));
    if (has_second) ring.load_one_lane(place, source.values(page + 1), item.page_tokens(page + 1));
  }
}

}
