#include "cuda/kernels/attention/attention_prefill.cuh"
#include "cuda/kernels/ptx/wgmma.cuh"
#include "cuda/launch.h"

namespace glint::cuda::hopper {

inline constexpr int kHeadDim = 128;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kConsumers = 2 * kWarpgroupThreads;
inline constexpr int kThreads = kConsumers + kWarpgroupThreads;
inline constexpr int kStages = 8;
inline constexpr int kConsumerRegisters = 240;
inline constexpr int kProducerRegisters = 24;
inline constexpr int kPairTokens = 2 * kPageTokens;
inline constexpr int kSplitPairs = kSplitTokens / kPairTokens;
inline constexpr int kSteps = kHeadDim / 16;
inline constexpr int kGroups = kPageTokens / 16;
inline constexpr int kPageScores = kPageTokens / 2;
inline constexpr int kOutSums = kHeadDim / 2;
inline constexpr uint32_t kRowGroupBytes = 8 * kSlabRowBytes;

struct SharedStorage {
  using Ring = PageRing<Bf16Tile<kHeadDim>, kStages>;
  Ring ring;
  float4 totals[kOutSums / 4][kConsumers];
};

struct Lane {
  SharedStorage& storage;
  uint32_t query[kSteps][4];
  float scores[2][kPageScores];
  uint32_t weights[2][kGroups][4];
  float sums[kOutSums];
  SplitReduction reductions[2];
  int num_visible[2];
  int exponent[2];
  float keep[2];
  float weight_sums[kGroups][2];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
  __device__ static int row(int half) {
    return static_cast<int>(threadIdx.x) / kWarpLanes * 16 + lane() / 4 + 8 * half;
  }

  __device__ explicit Lane(SharedStorage& shared) : storage(shared) {}

  __device__ __forceinline__ void start(const AttendCall& call, const PrefillItem& item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_query = item.is_query(row(half));
      const uint16_t* g_query = call.query + item.query_offset(row(half), call.num_heads, kHeadDim);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int dim = step * 16 + lane() % 4 * 2;
        query[step][half] = is_query ? *reinterpret_cast<const uint32_t*>(g_query + dim) : 0U;
        query[step][half + 2] = is_query ? *reinterpret_cast<const uint32_t*>(g_query + dim + 8) : 0U;
      }
      reductions[half] = {};
      num_visible[half] = item.num_visible(row(half));
    }
    start_weights();
    clear_sums();
  }

  __device__ __forceinline__ void start_weights() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exponent[half] = kLowestExponent;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) weight_sums[group][half] = 0.0F;
    }
  }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int index = 0; index < kOutSums; ++index) sums[index] = 0.0F;
  }

  template <int kPages>
  __device__ __forceinline__ void wait_for_tiles(uint32_t (&tiles)[kPages], SharedStorage::Ring::State state) {
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      tiles[page] = ptx::shared_address(storage.ring.wait_until_arrived(state));
      state.advance();
    }
  }

  template <int kPages>
  __device__ __forceinline__ void begin_scores(const SharedStorage::Ring::State& state) {
    uint32_t keys[kPages];
    wait_for_tiles(keys, state);
    ptx::wgmma_fence();
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t start = keys[page] + step / 4 * kSlabBytes + step % 4 * 32;
        ptx::wgmma_m64n64k16_bf16(scores[page], query[step],
                                  ptx::wgmma_descriptor_swizzle_128b(start, 16, kRowGroupBytes), step > 0);
      }
    }
    ptx::wgmma_commit_group();
  }

  template <int kPages>
  __device__ __forceinline__ void begin_sums(const SharedStorage::Ring::State& state) {
    uint32_t values[kPages];
    wait_for_tiles(values, state);
    ptx::wgmma_fence();
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint32_t start = values[page] + group * 16 * kSlabRowBytes;
        ptx::wgmma_m64n128k16_trans_bf16(sums, weights[page][group],
                                         ptx::wgmma_descriptor_swizzle_128b(start, kSlabBytes, kRowGroupBytes), 1);
      }
    }
    ptx::wgmma_commit_group();
  }

  template <int kPages>
  __device__ __forceinline__ void hide_later_positions(int first_position) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = num_visible[half] - first_position;
      if (visible >= kPages * kPageTokens) continue;
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
#pragma unroll
        for (int index = 0; index < kPageScores / 2; ++index) {
          const int token = page * kPageTokens + index / 2 * 8 + lane() % 4 * 2 + index % 2;
          float& score = scores[page][index / 2 * 4 + 2 * half + index % 2];
          score = token < visible ? score : -INFINITY;
        }
      }
    }
  }

  template <int kPages>
  __device__ __forceinline__ void raise_exponents(float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -INFINITY;
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
#pragma unroll
        for (int index = 0; index < kPageScores / 2; ++index) {
          highest = fmaxf(highest, scores[page][index / 2 * 4 + 2 * half + index % 2]);
        }
      }
      const int raised = max(exponent[half], covering_exponent(max_of_quad(highest) * scale));
      keep[half] = power_of_two(exponent[half] - raised);
      exponent[half] = raised;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) weight_sums[group][half] *= keep[half];
    }
  }

  template <int kPages>
  __device__ __forceinline__ void weigh(float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto shift = static_cast<float>(-exponent[half]);
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          float group_sum = 0.0F;
#pragma unroll
          for (int column = 0; column < 4; ++column) {
            float& value = scores[page][group * 8 + column / 2 * 4 + 2 * half + column % 2];
            value = ptx::ex2_approx(fmaf(value, scale, shift));
            group_sum += value;
          }
          weight_sums[group][half] += group_sum;
        }
      }
    }
  }

  template <int kPages>
  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) {
          const int index = group * 8 + reg * 2;
          weights[page][group][reg] = ptx::pack_bf16(scores[page][index], scores[page][index + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void rescale_sums() {
#pragma unroll
    for (int index = 0; index < kOutSums; ++index) sums[index] *= keep[index / 2 % 2];
  }

  __device__ __forceinline__ void reduce_weight_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = weight_sums[0][half];
#pragma unroll
      for (int group = 1; group < kGroups; ++group) sum += weight_sums[group][half];
      reductions[half].add(exponent[half], sum_of_quad(sum));
    }
  }

  __device__ __forceinline__ void reduce_sums(bool is_first) {
#pragma unroll
    for (int tile = 0; tile < kOutSums / 4; ++tile) {
      float4& total = storage.totals[tile][threadIdx.x];
      const float4 before = is_first ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : total;
      total = make_float4(
          reductions[0].reduced(before.x, sums[4 * tile]), reductions[0].reduced(before.y, sums[4 * tile + 1]),
          reductions[1].reduced(before.z, sums[4 * tile + 2]), reductions[1].reduced(before.w, sums[4 * tile + 3]));
    }
    clear_sums();
  }

  __device__ __forceinline__ void store_out(const AttendCall& call, const PrefillItem& item) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!item.is_query(row(half))) continue;
      float* g_out = call.out + item.query_offset(row(half), call.num_heads, kHeadDim);
      const float weight_sum = reductions[half].weight_sum;
#pragma unroll
      for (int tile = 0; tile < kOutSums / 4; ++tile) {
        const float4 total = storage.totals[tile][threadIdx.x];
        const float2 pair = half == 0 ? make_float2(total.x, total.y) : make_float2(total.z, total.w);
        *reinterpret_cast<float2*>(g_out + tile * 8 + lane() % 4 * 2) =
            make_float2(__fdiv_rn(pair.x, weight_sum), __fdiv_rn(pair.y, weight_sum));
      }
    }
  }
};

inline constexpr int kFirstTurnBarrier = 2;

__device__ __forceinline__ int warpgroup() { return static_cast<int>(threadIdx.x) / kWarpgroupThreads; }

__device__ __forceinline__ void wait_for_turn() { ptx::bar_sync(kFirstTurnBarrier + warpgroup(), kConsumers); }

__device__ __forceinline__ void pass_turn() { ptx::bar_arrive(kFirstTurnBarrier + 1 - warpgroup(), kConsumers); }

template <int kPages>
__device__ __forceinline__ void release_pages(SharedStorage& storage, SharedStorage::Ring::State& state) {
#pragma unroll
  for (int page = 0; page < kPages; ++page) storage.ring.release(state);
}

template <int kPages>
__device__ __forceinline__ void zero_tails(SharedStorage& storage, SharedStorage::Ring::State state, int tokens) {
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    storage.ring.wait_until_arrived(state);
    storage.ring.template zero_tail<kConsumers>(state, tokens - page * kPageTokens);
    state.advance();
  }
}

template <int kPages>
__device__ __forceinline__ void weigh_pair(Lane& work, int pair, float scale) {
  work.template hide_later_positions<kPages>(pair * kPairTokens);
  work.template raise_exponents<kPages>(scale);
  work.template weigh<kPages>(scale);
}

template <int kPages>
__device__ __forceinline__ void attend_next_pair(Lane& work, SharedStorage::Ring::State& state, int pair, float scale) {
  SharedStorage& storage = work.storage;
  const bool is_split_start = pair % kSplitPairs == 0;
  SharedStorage::Ring::State keys = state;
  keys.advance();
  keys.advance();
  wait_for_turn();
  work.template begin_scores<kPages>(keys);
  work.template begin_sums<2>(state);
  pass_turn();
  ptx::wgmma_wait_group<1>();
  ptx::pin_registers(work.scores[0]);
  if constexpr (kPages == 2) ptx::pin_registers(work.scores[1]);
  release_pages<kPages>(storage, keys);
  if (is_split_start) {
    work.reduce_weight_sums();
    work.start_weights();
  }
  weigh_pair<kPages>(work, pair, scale);
  ptx::wgmma_wait_group<0>();
  ptx::pin_registers(work.sums);
  release_pages<2>(storage, state);
  state = keys;
  if (is_split_start) {
    work.reduce_sums(pair == kSplitPairs);
  } else {
    work.rescale_sums();
  }
  work.template round_weights<kPages>();
}

template <int kPages>
__device__ __forceinline__ void finish_pairs(Lane& work, SharedStorage::Ring::State& state, const PrefillItem& item,
                                             int pair) {
  zero_tails<kPages>(work.storage, state, item.num_positions() - pair * kPairTokens);
  work.template begin_sums<kPages>(state);
  work.reduce_weight_sums();
  ptx::wgmma_wait_group<0>();
  ptx::pin_registers(work.sums);
  release_pages<kPages>(work.storage, state);
  work.reduce_sums(pair < kSplitPairs);
}

template <int kPages>
__device__ __forceinline__ void attend_first_pair(Lane& work, SharedStorage::Ring::State& state, float scale) {
  work.template begin_scores<kPages>(state);
  ptx::wgmma_wait_group<0>();
  ptx::pin_registers(work.scores[0]);
  if constexpr (kPages == 2) ptx::pin_registers(work.scores[1]);
  release_pages<kPages>(work.storage, state);
  weigh_pair<kPages>(work, 0, scale);
  work.template round_weights<kPages>();
}

__device__ __forceinline__ void attend_item(Lane& work, SharedStorage::Ring::State& state, const PrefillItem& item,
                                            float scale) {
  const int page_count = item.page_count();
  const int last_pair = (page_count - 1) / 2;
  const bool has_odd_page = page_count % 2 == 1;
  if (last_pair == 0 && has_odd_page) {
    attend_first_pair<1>(work, state, scale);
    return finish_pairs<1>(work, state, item, 0);
  }
  attend_first_pair<2>(work, state, scale);
  for (int pair = 1; pair < last_pair + (has_odd_page ? 0 : 1); ++pair) {
    attend_next_pair<2>(work, state, pair, scale);
  }
  if (!has_odd_page) return finish_pairs<2>(work, state, item, last_pair);
  attend_next_pair<1>(work, state, last_pair, scale);
  finish_pairs<1>(work, state, item, last_pair);
}

__device__ __forceinline__ void load_pages_one_lane(const PrefillCall& call, SharedStorage::Ring& ring) {
  SharedStorage::Ring::State state;
  for (PrefillWalk walk(call); walk.has_item(); walk.advance()) {
    const PrefillItem item = walk.item();
    const PageSource source{call.attend.pages, call.attend.page_table + item.task.page_first, item.kv_head};
    load_page_pairs(ring, state, source, item);
  }
}

__global__ void __launch_bounds__(kThreads, 1) attention_prefill_hopper_kernel(const PrefillCall call) {
  extern __shared__ std::byte s_memory[];
  auto& storage = *reinterpret_cast<SharedStorage*>(aligned_storage(s_memory));
  ptx::griddepcontrol_launch_dependents();
  storage.ring.template prepare<kConsumers / kWarpLanes>();
  ptx::griddepcontrol_wait();
  if (threadIdx.x < kConsumers) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    if (warpgroup() == 1) pass_turn();
    SharedStorage::Ring::State state;
    Lane work(storage);
    const float scale = kLog2E / sqrtf(static_cast<float>(kHeadDim));
    for (PrefillWalk walk(call); walk.has_item(); walk.advance()) {
      const PrefillItem item = walk.item();
      work.start(call.attend, item);
      attend_item(work, state, item, scale);
      work.store_out(call.attend, item);
    }
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == kConsumers) load_pages_one_lane(call, storage.ring);
  }
}

}

namespace glint::cuda {

void launch_attention_prefill_hopper(const PrefillCall& call, cudaStream_t stream) {
  require_argument(call.attend.head_dim == hopper::kHeadDim, "head_dim is ", call.attend.head_dim,
                   "; the Hopper prefill kernel is built for ", hopper::kHeadDim);
  start_persistent<hopper::SharedStorage>(hopper::attention_prefill_hopper_kernel, call, hopper::kThreads, stream);
}

}
