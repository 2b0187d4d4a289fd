#pragma once

#include "cuda/kernels/moe/packed_tiles.cuh"

namespace glint::cuda {

constexpr int kWideFloats = 32;

template <class Tile>
struct TokenSums {
  static constexpr int kNarrowFloats = Tile::kRows - kWideFloats;
  static_assert(kNarrowFloats == 0 || kNarrowFloats == 8, "a place has 32 floats and, behind all of them, at most 8");
  static constexpr int kUnusedPlace = kDownBlockTokens;
  static constexpr int kPlaces = kDownBlockTokens + 1;

  alignas(128) float values[kPlaces * Tile::kRows];

  __device__ __forceinline__ float* wide(int place) { return values + place * kWideFloats; }

  __device__ __forceinline__ float* narrow(int place) { return values + kPlaces * kWideFloats + place * kNarrowFloats; }
};

template <class Tile>
struct StoredVector {
  static constexpr int kVectors = Tile::kRows / 4;

  int token;
  int vector;
  float2* s_low;
  float2* s_high;

  __device__ __forceinline__ StoredVector(TokenSums<Tile>& s_sums, int index)
      : token(index / kVectors), vector(index % kVectors) {
    const int group = vector / 2;
    const bool is_wide = group < kWideFloats / 8;
    float* s_values = is_wide ? s_sums.wide(token) + group / 2 * 16 + vector % 2 * 8 + group % 2 * 2
                              : s_sums.narrow(token) + vector % 2 * 4;
    s_low = reinterpret_cast<float2*>(s_values);
    s_high = s_low + (is_wide ? 2 : 1);
  }
};

template <class Tile, int kThreads>
__device__ __forceinline__ void store_and_clear(TokenSums<Tile>& s_sums, const DownInputs& inputs, int token_block,
                                                int owner) {
  constexpr int kBatch = 2048 / kThreads;
  const int token_first = token_block * inputs.block_tokens;
  const int num_vectors = min(inputs.block_tokens, inputs.num_tokens - token_first) * StoredVector<Tile>::kVectors;
  float* g_out = inputs.out + int64_t{token_first} * inputs.hidden_size + owner * Tile::kRows;
  __syncthreads();
  for (int first = threadIdx.x; first < num_vectors; first += kBatch * kThreads) {
    float2 r_low[kBatch];
    float2 r_high[kBatch];
#pragma unroll
    for (int next = 0; next < kBatch; ++next) {
      const StoredVector<Tile> stored(s_sums, min(first + next * kThreads, num_vectors - 1));
      r_low[next] = *stored.s_low;
      r_high[next] = *stored.s_high;
    }
#pragma unroll
    for (int next = 0; next < kBatch; ++next) {
      const int index = first + next * kThreads;
      if (index >= num_vectors) break;
      const StoredVector<Tile> stored(s_sums, index);
      *stored.s_low = {};
      *stored.s_high = {};
      const float4 values = {r_low[next].x, r_low[next].y, r_high[next].x, r_high[next].y};
      __stcs(reinterpret_cast<float4*>(g_out + int64_t{stored.token} * inputs.hidden_size) + stored.vector, values);
    }
  }
  __syncthreads();
}

template <Multiply kMultiplyValue, class TileType, bool kIsOneStepValue>
struct ManyDownShape {
  using Tile = TileType;
  static constexpr Multiply kMultiply = kMultiplyValue;
  static constexpr bool kIsOneStep = kIsOneStepValue;
  static constexpr bool kIsRefilledInTurn = kMultiply == Multiply::kMmaSync && kIsOneStep;
  static constexpr int kWarpFragments = kIsRefilledInTurn && Tile::kK == 192 ? 2 : 1;
  static constexpr int kWarpTokens = kWarpFragments * kFragmentRows;
  static constexpr int kGroups = Tile::kK > 192 ? 3 : 4;
  static constexpr int kGroupThreads = FragmentTiles::kMaxTokens / kWarpTokens * 32;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kRingStages = 2;
  static constexpr int kVectors = kIsOneStep ? kNarrowVectors<Tile> : kWideVectors;
  static constexpr int kRowsAtOnce = kIsOneStep ? 4 : 1;
  static constexpr int kRegisters = Tile::kRows / 2;
  static constexpr int kFragments = Tile::kK / 32;

  static __device__ __forceinline__ int first_slot_of_warp() {
    return static_cast<int>(threadIdx.x) % kGroupThreads / 32 * kWarpTokens;
  }
};

template <class Shape>
struct ManyDownStorage {
  alignas(128) uint8_t weights[Shape::kGroups][Shape::kRingStages][Shape::Tile::kBytes];
  TokenSums<typename Shape::Tile> sums;
  alignas(8) uint64_t arrived[Shape::kGroups][Shape::kRingStages];
};

struct DownUnit {
  int32_t token_block;
  int32_t owner;
  int32_t tile_first;
  int32_t tile_end;

  __device__ __forceinline__ DownUnit(const DownInputs& inputs, int round) {
    const int num_token_blocks = inputs.num_token_blocks();
    const int unit = static_cast<int>(blockIdx.x) + round * inputs.num_owners;
    token_block = unit % num_token_blocks;
    owner = unit / num_token_blocks;
    tile_first = token_block == 0 ? 0 : __ldg(inputs.grouped.down_tile_ends + token_block - 1);
    tile_end = __ldg(inputs.grouped.down_tile_ends + token_block);
  }
};

template <class Shape>
struct TileCursor {
  int32_t index;
  int32_t end;
  int32_t k_step;
  int32_t expert;
  int32_t count;

  __device__ __forceinline__ void start(const DownInputs& inputs, int first, int last) {
    index = first;
    end = last;
    k_step = 0;
    load(inputs);
  }

  __device__ __forceinline__ bool is_done() const { return index >= end; }

  __device__ __forceinline__ bool advance(const DownInputs& inputs) {
    if constexpr (!Shape::kIsOneStep) {
      if (++k_step < inputs.num_steps) return false;
      k_step = 0;
    }
    index += Shape::kGroups;
    load(inputs);
    return true;
  }

 private:
  __device__ __forceinline__ void load(const DownInputs& inputs) {
    if (is_done()) return;
    const int4 tile = __ldg(reinterpret_cast<const int4*>(inputs.grouped.down_tiles) + index);
    expert = tile.x;
    count = tile.z;
  }
};

template <class Shape>
class Fp8Stream {
 public:
  using Tile = typename Shape::Tile;

  uint4 r_fp8[Shape::kWarpFragments][Shape::kFragments] = {};
  uint32_t r_places[Shape::kWarpFragments][2] = {};
  float r_weights[Shape::kWarpFragments][2] = {};
  float r_scales[Shape::kWarpFragments][2] = {};
  float2 r_row_scales[Tile::kRows / 8] = {};
  int32_t count = 0;

  __device__ __forceinline__ explicit Fp8Stream(const DownInputs& inputs)
      : inputs_(inputs), slot_(Shape::first_slot_of_warp() + static_cast<int>(threadIdx.x) % 32 / 4) {
    const PackedTileShape shape = {FragmentTiles::kMaxTokens, inputs.packed_width};
    metadata_step_ = static_cast<int32_t>(shape.metadata_offset() + kPackedTileHeadBytes) + slot_ * 4 - fp8_first();
    tile_stride_ = static_cast<int32_t>(shape.bytes()) * Shape::kGroups;
  }

  __device__ __forceinline__ void start(int first, int last, int owner) {
    const PackedTileShape shape = {FragmentTiles::kMaxTokens, inputs_.packed_width};
    cursor_.start(inputs_, first, last);
    g_fp8_ = inputs_.packed_tiles + first * shape.bytes() + fp8_first();
    g_row_scales_ = inputs_.row_scales + owner * Tile::kRows + ptx::tid_x() % 4 * 2;
    load_fp8();
    load_metadata();
    advance();
  }

  __device__ __forceinline__ void load_fp8() {
    const uint8_t* g_first = g_fp8_ + (Shape::kIsOneStep ? 0 : cursor_.k_step * (kFragmentRows * Tile::kK));
#pragma unroll
    for (int next = 0; next < Shape::kWarpFragments; ++next) {
      const bool is_loaded = !cursor_.is_done() && slot_ + next * kFragmentRows < cursor_.count;
      const uint8_t* g_fp8 = g_first + next * kFragmentRows * inputs_.packed_width;
#pragma unroll
      for (int fragment = 0; fragment < Shape::kFragments; ++fragment) {
        ptx::ld_global_cg_if(is_loaded, r_fp8[next][fragment], g_fp8 + fragment * 512);
      }
    }
  }

  __device__ __forceinline__ void load_metadata() {
    constexpr int kHalfBytes = 8 * 4;
    constexpr int kListBytes = FragmentTiles::kMaxTokens * 4;
    const bool is_loaded = !cursor_.is_done();
    const uint8_t* g_metadata = g_fp8_ + metadata_step_;
    count = is_loaded ? cursor_.count : 0;
#pragma unroll
    for (int index = 0; index < 2 * Shape::kWarpFragments; ++index) {
      const uint8_t* g_half = g_metadata + index * kHalfBytes;
      ptx::ld_global_cg_if(is_loaded, r_places[index / 2][index % 2], g_half);
      load_float(is_loaded, r_weights[index / 2][index % 2], g_half + kListBytes);
      load_float(is_loaded, r_scales[index / 2][index % 2], g_half + 2 * kListBytes);
    }
    const float* g_row_scales = g_row_scales_ + int64_t{cursor_.expert} * inputs_.hidden_size;
#pragma unroll
    for (int group = 0; group < Tile::kRows / 8; ++group) {
      ptx::ld_global_nc_if(is_loaded, r_row_scales[group], g_row_scales + group * 8);
    }
  }

  __device__ __forceinline__ void advance() {
    if (cursor_.advance(inputs_)) g_fp8_ += tile_stride_;
  }

  __device__ __forceinline__ void scale(float (&r_values)[Shape::kWarpFragments][Shape::kRegisters]) const {
#pragma unroll
    for (int fragment = 0; fragment < Shape::kWarpFragments; ++fragment) {
#pragma unroll
      for (int index = 0; index < Shape::kRegisters; ++index) {
        float& value = r_values[fragment][index];
        const float2& pair = r_row_scales[index / 4];
        value = __fmul_rn(__fmul_rn(value, r_scales[fragment][index / 2 % 2]), index % 2 == 0 ? pair.x : pair.y);
      }
    }
  }

  __device__ __forceinline__ int index() const { return cursor_.index - Shape::kGroups; }

  __device__ __forceinline__ int num_used_fragments() const {
    const int left = count - Shape::first_slot_of_warp();
    return left <= 0 ? 0 : left <= kFragmentRows ? 1 : Shape::kWarpFragments;
  }

  __device__ __forceinline__ bool is_used(int fragment, int half) const {
    return slot_ + fragment * kFragmentRows + half * 8 < count;
  }

  __device__ __forceinline__ int place(int fragment, int half) const {
    return is_used(fragment, half) ? static_cast<int>(r_places[fragment][half]) : TokenSums<Tile>::kUnusedPlace;
  }

  __device__ __forceinline__ float weight(int fragment, int half) const {
    return is_used(fragment, half) ? r_weights[fragment][half] : 0.0F;
  }

 private:
  __device__ __forceinline__ int32_t fp8_first() const {
    return Shape::first_slot_of_warp() * inputs_.packed_width + ptx::tid_x() % 32 * 16;
  }

  static __device__ __forceinline__ void load_float(bool is_loaded, float& r_target, const uint8_t* g_source) {
    uint32_t bits = __float_as_uint(r_target);
    ptx::ld_global_cg_if(is_loaded, bits, g_source);
    r_target = __uint_as_float(bits);
  }

  const DownInputs& inputs_;
  const uint8_t* g_fp8_ = nullptr;
  const float* g_row_scales_ = nullptr;
  int32_t slot_;
  int32_t metadata_step_;
  int32_t tile_stride_;
  TileCursor<Shape> cursor_;
};

template <class Tile>
struct TokenAdd {
  static constexpr uint32_t kChunkBytes = 64;
  static constexpr int kRegisters = Tile::kRows / 2;
  static constexpr int kNarrowFloats = TokenSums<Tile>::kNarrowFloats;

  bool is_odd;
  uint32_t wide[2];
  uint32_t narrow[2];
  float r_weights[2];

  template <class Stream>
  __device__ __forceinline__ void find(const Stream& stream, int fragment, uint32_t s_sums, int thread) {
    is_odd = thread / 4 % 2 != 0;
    const uint32_t first = s_sums + thread % 4 * 16 + (is_odd ? kChunkBytes : 0);
    const uint32_t narrow_first = s_sums + TokenSums<Tile>::kPlaces * kWideFloats * 4 + thread % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto place = static_cast<uint32_t>(stream.place(fragment, half));
      r_weights[half] = stream.weight(fragment, half);
      wide[half] = first + place * (kWideFloats * 4);
      narrow[half] = narrow_first + place * (kNarrowFloats * 4);
    }
  }

  static __device__ __forceinline__ constexpr int register_of(int half, int chunk, int element) {
    return (chunk * 2 + element / 2) * 4 + half * 2 + element % 2;
  }

  __device__ __forceinline__ void swap_chunks_of_odd_quads(float (&r_values)[kRegisters]) const {
#pragma unroll
    for (int index = 0; index < 8; ++index) {
      float& first = r_values[register_of(index / 4, 0, index % 4)];
      float& second = r_values[register_of(index / 4, 1, index % 4)];
      const float kept = first;
      first = is_odd ? second : first;
      second = is_odd ? kept : second;
    }
  }

  __device__ __forceinline__ void add(const float (&r)[kRegisters]) const {
    float4 r_wide[2][2];
    float2 r_narrow[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      r_wide[half][0] = ptx::ld_shared_v4(wide[half]);
      r_wide[half][1] = ptx::ld_shared_v4(wide[half] ^ kChunkBytes);
      if constexpr (kNarrowFloats > 0) r_narrow[half] = ptx::ld_shared_v2(narrow[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float weight = r_weights[half];
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const float4& old = r_wide[half][chunk];
        const float4 sum = {__fmaf_rn(weight, r[register_of(half, chunk, 0)], old.x),
                            __fmaf_rn(weight, r[register_of(half, chunk, 1)], old.y),
                            __fmaf_rn(weight, r[register_of(half, chunk, 2)], old.z),
                            __fmaf_rn(weight, r[register_of(half, chunk, 3)], old.w)};
        ptx::st_shared_v4(wide[half] ^ (chunk * kChunkBytes), sum);
      }
      if constexpr (kNarrowFloats > 0) {
        ptx::st_shared_v2(narrow[half], {__fmaf_rn(weight, r[register_of(half, 2, 0)], r_narrow[half].x),
                                         __fmaf_rn(weight, r[register_of(half, 2, 1)], r_narrow[half].y)});
      }
    }
  }
};

template <class Shape>
struct RowsInTurn {
  float r_values[Shape::kWarpFragments][Shape::kRegisters];
  TokenAdd<typename Shape::Tile> tokens[Shape::kWarpFragments];
  int num_used;

  __device__ __forceinline__ void add() const {
#pragma unroll
    for (int fragment = 0; fragment < Shape::kWarpFragments; ++fragment) {
      if (fragment < num_used) tokens[fragment].add(r_values[fragment]);
    }
  }
};

template <class Shape>
class ManyDown {
 public:
  using Tile = typename Shape::Tile;
  using Rows = RowsInTurn<Shape>;

  __device__ __forceinline__ ManyDown(ManyDownStorage<Shape>& s_storage, const DownInputs& inputs)
      : s_storage_(s_storage),
        inputs_(inputs),
        thread_(ptx::tid_x()),
        group_(static_cast<uint32_t>(thread_) / Shape::kGroupThreads),
        s_weights_(ptx::shared_address(s_storage.weights[group_])),
        s_sums_(ptx::shared_address(s_storage.sums.values)),
        tiles_to_turn_(static_cast<int32_t>(group_)),
        fp8_(inputs) {}

  __device__ __forceinline__ void start_weights(const DownUnit& unit) {
    weights_.start(inputs_, unit.tile_first + tiles_to_turn_, unit.tile_end);
    load_weights(ring_.stage, unit.owner);
    load_weights(ring_.stage ^ 1, unit.owner);
  }

  __device__ __forceinline__ void start_fp8(const DownUnit& unit) {
    fp8_.start(unit.tile_first + tiles_to_turn_, unit.tile_end, unit.owner);
  }

  __device__ __forceinline__ void add_tiles(const DownUnit& unit) {
    if constexpr (Shape::kIsRefilledInTurn) {
      while (fp8_.index() < unit.tile_end) add_tile(unit.owner);
      tiles_to_turn_ = fp8_.index() - unit.tile_end;
    } else {
      int index = unit.tile_first + tiles_to_turn_;
      for (; index < unit.tile_end; index += Shape::kGroups) add_tile(unit.owner);
      tiles_to_turn_ = index - unit.tile_end;
    }
  }

 private:
  static constexpr uint32_t kFirstTurn = 1;
  static constexpr uint32_t kFirstGroup = kFirstTurn + Shape::kGroups;

  __device__ __forceinline__ void load_weights(int stage, int owner) {
    if (weights_.is_done()) return;
    if (thread_ % Shape::kGroupThreads == 0) {
      const int64_t matrix_tile = int64_t{weights_.expert} * inputs_.num_owners + owner;
      const int64_t tile = matrix_tile * inputs_.num_steps + weights_.k_step;
      uint64_t& arrived = s_storage_.arrived[group_][stage];
      ptx::mbarrier_arrive_expect_tx(arrived, Tile::kBytes);
      ptx::cp_async_bulk(s_storage_.weights[group_][stage], inputs_.weights + tile * Tile::kBytes, Tile::kBytes,
                         arrived, ptx::kEvictFirst);
    }
    weights_.advance(inputs_);
  }

  __device__ __forceinline__ void multiply_and_load(Rows& rows, bool is_first, int owner) {
    ptx::mbarrier_wait_suspended(s_storage_.arrived[group_][ring_.stage], ring_.phase);
    const uint32_t s_tile = s_weights_ + ring_.stage * Tile::kBytes;
    using Fragments = TokenFragmentsMultiply<Shape::kMultiply, Tile::kRows, Tile::kK, Shape::kWarpFragments>;
    rows.num_used = fp8_.num_used_fragments();
    Fragments::template run<Shape::kIsOneStep>(rows.r_values, is_first, rows.num_used, fp8_.r_fp8, s_tile, [&] {
      fp8_.load_fp8();
      if constexpr (!Shape::kIsRefilledInTurn) {
        ptx::bar_sync(kFirstGroup + group_, Shape::kGroupThreads);
        load_weights(ring_.stage, owner);
      }
      ring_.advance();
    });
  }

  __device__ __forceinline__ void scale_and_find(Rows& rows) {
    fp8_.scale(rows.r_values);
#pragma unroll
    for (int fragment = 0; fragment < Shape::kWarpFragments; ++fragment) {
      rows.tokens[fragment].find(fp8_, fragment, s_sums_, thread_);
    }
    fp8_.load_metadata();
    fp8_.advance();
#pragma unroll
    for (int fragment = 0; fragment < Shape::kWarpFragments; ++fragment) {
      rows.tokens[fragment].swap_chunks_of_odd_quads(rows.r_values[fragment]);
    }
  }

  __device__ __forceinline__ void add_in_turn(const Rows& rows) {
    ptx::bar_sync(kFirstTurn + group_, 2 * Shape::kGroupThreads);
    rows.add();
    ptx::bar_arrive(kFirstTurn + (group_ + 1) % Shape::kGroups, 2 * Shape::kGroupThreads);
  }

  __device__ __forceinline__ void add_tile(int owner) {
    Rows rows;
    multiply_and_load(rows, true, owner);
    for (int k_step = 1; !Shape::kIsOneStep && k_step < inputs_.num_steps; ++k_step) {
      fp8_.advance();
      multiply_and_load(rows, false, owner);
    }
    scale_and_find(rows);
    add_in_turn(rows);
    if constexpr (Shape::kIsRefilledInTurn) load_weights(ring_.stage ^ 1, owner);
  }

  ManyDownStorage<Shape>& s_storage_;
  const DownInputs& inputs_;
  int32_t thread_;
  uint32_t group_;
  uint32_t s_weights_;
  uint32_t s_sums_;
  int32_t tiles_to_turn_;
  PipelineState<Shape::kRingStages> ring_;
  TileCursor<Shape> weights_;
  Fp8Stream<Shape> fp8_;
};

template <class Shape>
__device__ __forceinline__ void prepare_many_down(ManyDownStorage<Shape>& s_storage) {
  if (threadIdx.x < Shape::kGroups * Shape::kRingStages) {
    ptx::mbarrier_init((&s_storage.arrived[0][0])[threadIdx.x], 1);
    ptx::fence_mbarrier_init();
  }
  constexpr int kVectors = sizeof(s_storage.sums) / 16;
  auto* s_sums = reinterpret_cast<float4*>(s_storage.sums.values);
  for (int index = threadIdx.x; index < kVectors; index += Shape::kThreads) s_sums[index] = {};
  __syncthreads();
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    expert_down_many_kernel(const __grid_constant__ DownInputs inputs) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  auto& s_storage = *reinterpret_cast<ManyDownStorage<Shape>*>(s_bytes);
  constexpr int kWriters = Shape::kThreads / 32;
  const int num_tiles = inputs.num_tiles();
  prepare_many_down(s_storage);
  ptx::griddepcontrol_launch_dependents();
  ManyDown<Shape> down(s_storage, inputs);
  DownUnit unit(inputs, 0);
  down.start_weights(unit);
  const ListedRows rows{inputs.grouped};
  const PackItem<FragmentTiles> first(rows, num_tiles,
                                      static_cast<int>(blockIdx.x) * kWriters + static_cast<int>(threadIdx.x) / 32);
  ptx::griddepcontrol_wait();
  const BlockArrivals arrivals(inputs.arrivals);
  pack_tiles<FragmentTiles, kWriters, Shape::kVectors, Shape::kRowsAtOnce>(inputs, rows, num_tiles, first);
  __syncthreads();
  arrivals.announce_and_wait<Shape::kThreads>();
  down.start_fp8(unit);
  if (threadIdx.x / Shape::kGroupThreads == Shape::kGroups - 1) ptx::bar_arrive(1, 2 * Shape::kGroupThreads);
  const int num_rounds = inputs.num_token_blocks();
  for (int round = 0; round < num_rounds; ++round) {
    const DownUnit done = unit;
    down.add_tiles(done);
    if (round + 1 < num_rounds) {
      unit = DownUnit(inputs, round + 1);
      down.start_weights(unit);
      down.start_fp8(unit);
    }
    store_and_clear<typename Shape::Tile, Shape::kThreads>(s_storage.sums, inputs, done.token_block, done.owner);
  }
}

}
