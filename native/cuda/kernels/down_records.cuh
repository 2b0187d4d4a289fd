#pragma once

#include "cuda/experts.h"
#include "cuda/kernels/hopper.cuh"
#include "cuda/kernels/quantise_rows.cuh"
#include "cuda/kernels/product_plan.cuh"

namespace glint::cuda {

template <int kMaxTokens>
struct RecordFacts {
  int32_t count;
  int32_t padding[3];
  int32_t places[kMaxTokens];
  float weights[kMaxTokens];
  float scales[kMaxTokens];
};

struct RecordCall {
  uint8_t* records;
  GroupedTokens grouped;
  const float* hidden;
  int32_t width;
  int32_t num_tiles;
};

constexpr int kRecordBarrier = 9;

struct RecordRow {
  uint8_t* g_codes;
  int32_t padded_count;

  __device__ __forceinline__ uint8_t* place(int unit) const {
    const int step = unit / kDownTileK;
    const int in_step = unit % kDownTileK;
    return g_codes + step * padded_count * kDownTileK + in_step / 16 * padded_count * 16 + in_step % 16;
  }
};

template <int kMaxTokens, int kBlockTokens, int kVectors>
__device__ __forceinline__ void write_record_row(const RecordCall& call, const TokenTile& tile, int index, int slot) {
  const RecordShape shape = {kMaxTokens, call.width};
  const int row = tile.row_first + slot;
  const int lane = threadIdx.x % 32;
  uint8_t* g_record = call.records + index * shape.bytes();
  const int token = __ldg(call.grouped.row_tokens + row);
  const float weight = __ldg(call.grouped.row_weights + row);
  const RecordRow target = {g_record + slot * 16, padded_tokens(tile.row_count)};
  const float* g_row = call.hidden + int64_t{row} * call.width;
  const float scale = quantise_row_converged_warp<kVectors>(target, g_row, call.width);
  if (lane > 0) return;
  auto& g_facts = *reinterpret_cast<RecordFacts<kMaxTokens>*>(g_record + shape.facts_offset());
  static_assert(sizeof(RecordFacts<kMaxTokens>) == RecordShape{kMaxTokens, 0}.facts_bytes(), "facts end a record");
  g_facts.count = tile.row_count;
  g_facts.places[slot] = token % kBlockTokens * kDownTileRows;
  g_facts.weights[slot] = weight;
  g_facts.scales[slot] = scale;
}

constexpr int kRecordSlots = 8;

struct RecordItem {
  int32_t item;
  TokenTile tile;

  __device__ __forceinline__ RecordItem(const RecordCall& call, int first) : item(first), tile{} {
    if (item >= call.num_tiles * kRecordSlots) return;
    const int4 loaded = __ldg(reinterpret_cast<const int4*>(call.grouped.down_tiles) + item / kRecordSlots);
    tile = {loaded.x, loaded.y, loaded.z, loaded.w};
  }
};

template <int kMaxTokens, int kBlockTokens, int kWarps>
__device__ __forceinline__ void write_records(const RecordCall& call, RecordItem next) {
  while (next.item < call.num_tiles * kRecordSlots) {
    const int index = next.item / kRecordSlots;
    for (int slot = next.item % kRecordSlots; slot < next.tile.row_count; slot += kRecordSlots) {
      if (call.width <= 256) {
        write_record_row<kMaxTokens, kBlockTokens, 2>(call, next.tile, index, slot);
      } else {
        write_record_row<kMaxTokens, kBlockTokens, kQuantisedWidthLimit / 128>(call, next.tile, index, slot);
      }
    }
    next = RecordItem(call, next.item + gridDim.x * kWarps);
  }
}

template <int kThreads>
__device__ __forceinline__ void announce_records_written() {
  hopper::named_barrier_arrive(kRecordBarrier, kThreads);
}

template <int kThreads>
__device__ __forceinline__ void wait_until_records_written() {
  hopper::named_barrier_sync(kRecordBarrier, kThreads);
}

struct BlockArrivals {
  uint32_t* g_arrivals;
  uint32_t mine;
  uint32_t target;

  __device__ __forceinline__ explicit BlockArrivals(uint32_t* arrivals) : g_arrivals(arrivals) {
    uint32_t all = 1;
    while (all < gridDim.x) all *= 2;
    mine = blockIdx.x == 0 ? all - gridDim.x + 1 : 1;
    target = (hopper::load_acquire(g_arrivals) / all + 1) * all;
  }

  __device__ __forceinline__ void announce_and_wait() const {
    constexpr int kAllArrived = 10;
    if (threadIdx.x == 0) {
      hopper::add_release(g_arrivals, mine);
      while (static_cast<int32_t>(hopper::load_acquire(g_arrivals) - target) < 0) {
      }
    }
    hopper::named_barrier_sync(kAllArrived, 128);
  }
};

}
