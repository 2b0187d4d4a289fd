#pragma once

#include "cuda/kernels/decode_pages.cuh"

namespace glint::cuda {

inline constexpr int kGroupTokens = kPageTokens / kDecodeWarps;

__device__ __forceinline__ uint32_t cluster_address(const void* s_pointer, int rank) {
  return hopper::address_in_cluster(shared_address(s_pointer), static_cast<uint32_t>(rank));
}

__device__ __forceinline__ void send_float(uint32_t target, float value, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(target),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

template <int kHeadDim, bool kIsWhole, int kShare>
struct DecodeLane {
  using Plan = DecodePlan<kHeadDim>;
  using Place = typename Plan::Ring::Place;
  using PageScores = FragmentC[2];
  using PairScores = PageScores[kPairPages];
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kBlockDims = kHeadDim / kShare;
  static constexpr int kWarpDims = kBlockDims / kDecodeWarps;
  static constexpr int kDimTiles = kWarpDims / 8;
  static constexpr int kPairs = kShare == 1 ? 1 : kSharedPairs;
  static constexpr int kOwnPages = kPairs * kPairPages / kShare;
  using JoinedSums = HeadSums<kHeadDim / 8 / kDecodeWarps>;

  Plan& plan;
  int rank;
  FragmentA query[kSteps];
  HeadSums<kDimTiles> attended;
  float keep[kPairs][2];
  int round = 0;
  uint32_t magnitude_phase = 0;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int head_dim(const AttendCall& call) { return kIsWhole ? kHeadDim : call.head_dim; }

  __device__ DecodeLane(Plan& shared, int rank_given) : plan(shared), rank(rank_given) {}

  __device__ __forceinline__ void start(const AttendCall& call, const DecodeItem& item) {
    const int group_heads = call.num_heads / call.num_kv_heads;
    const uint16_t* g_query =
        call.query + (int64_t{item.task.row} * call.num_heads + item.kv_head * group_heads) * kHeadDim;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        const int dim = step * 16 + decode_lane() % 4 * 2 + reg / 2 * 8;
        const int head = decode_head(reg % 2);
        query[step].regs[reg] =
            head < group_heads ? *reinterpret_cast<const uint32_t*>(g_query + head * kHeadDim + dim) : 0U;
      }
    }
    attended.clear(rank * kBlockDims + decode_warp() * kWarpDims);
  }

  template <int kPages>
  __device__ __forceinline__ void score(PageScores* scores, Place& place) {
    const int token = decode_warp() * kGroupTokens + decode_lane() / 16 * 8 + decode_lane() % 8;
    const std::byte* s_keys[kPages];
    Place arriving = place;
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      s_keys[page] = plan.ring.wait_until_arrived(arriving);
      arriving.advance();
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
        uint32_t keys[4];
        ldmatrix_x4(keys, swizzled_address(s_keys[page], token, step * 16 + decode_lane() / 8 % 2 * 8));
        mma_bf16(scores[page][0], query[step], keys[0], keys[1]);
        mma_bf16(scores[page][1], query[step], keys[2], keys[3]);
      }
    }
#pragma unroll
    for (int page = 0; page < kPages; ++page) plan.ring.release(place);
  }

  __device__ __forceinline__ void score_own_pages(PageScores (&own)[kOwnPages], Place& place, int visible) {
    constexpr int kStrideTokens = kShare * kPageTokens;
#pragma unroll
    for (int page = 0; page < kOwnPages; page += 2) {
      const int first = rank * kPageTokens + page * kStrideTokens;
      if (visible > first + kStrideTokens) {
        score<2>(own + page, place);
      } else if (visible > first) {
        score<1>(own + page, place);
      }
    }
  }

  __device__ __forceinline__ void exchange_scores(PairScores (&scores)[kPairs], const PageScores (&own)[kOwnPages]) {
    auto& s_pairs = plan.pairs[round];
    uint64_t* s_barrier = &plan.scores_arrived[round];
    const uint32_t peer_barrier = cluster_address(s_barrier, rank ^ 1);
    if (thread() == 0) mbarrier_expect(s_barrier, sizeof(s_pairs));
#pragma unroll
    for (int part = 0; part < kPairs * 2; ++part) {
      hopper::st_async(cluster_address(&s_pairs[part / 2].peer_scores[part % 2][thread()], rank ^ 1),
                       own[part / 2][part % 2].values, peer_barrier);
    }
    mbarrier_wait(s_barrier, 0);
#pragma unroll
    for (int part = 0; part < kPairs * 2; ++part) {
      const float4 arrived = s_pairs[part / 2].peer_scores[part % 2][thread()];
      const FragmentC other = {{arrived.x, arrived.y, arrived.z, arrived.w}};
      scores[part / 2][0][part % 2] = rank == 0 ? own[part / 2][part % 2] : other;
      scores[part / 2][1][part % 2] = rank == 0 ? other : own[part / 2][part % 2];
    }
  }

  __device__ __forceinline__ static bool is_visible(int tile, int column, int visible) {
    return decode_warp() * kGroupTokens + tile * 8 + decode_lane() % 4 * 2 + column < visible;
  }

  __device__ __forceinline__ void share_highest(const PairScores (&scores)[kPairs], int visible, float scale) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float highest[2] = {static_cast<float>(kLowestExponent), static_cast<float>(kLowestExponent)};
#pragma unroll
      for (int tile = 0; tile < 2 * kPairPages; ++tile) {
#pragma unroll
        for (int element = 0; element < 4; ++element) {
          if (is_visible(tile % 2, element % 2, visible - pair * kPairTokens - tile / 2 * kPageTokens)) {
            const float score = scores[pair][tile / 2][tile % 2].values[element] * scale;
            highest[element / 2] = fmaxf(highest[element / 2], score);
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        highest[half] = max_of_quad(highest[half]);
        if (decode_lane() % 4 == 0) plan.highest[pair][decode_warp()][decode_head(half)] = highest[half];
      }
    }
  }

  __device__ __forceinline__ void raise_exponents(int pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = plan.highest[pair][0][decode_head(half)];
#pragma unroll
      for (int other = 1; other < kDecodeWarps; ++other) {
        highest = fmaxf(highest, plan.highest[pair][other][decode_head(half)]);
      }
      const int raised = max(attended.exponent[half], covering_exponent(highest));
      keep[pair][half] = power_of_two(attended.exponent[half] - raised);
      attended.exponent[half] = raised;
      attended.weight_sum[half] *= keep[pair][half];
    }
  }

  __device__ __forceinline__ void weigh(std::byte* s_weights, const FragmentC (&scores)[2], int visible, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto reference = static_cast<float>(-attended.exponent[half]);
      float group_sum = 0.0F;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float weights[2];
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const float raised = ex2_approx(fmaf(scores[tile].values[2 * half + column], scale, reference));
          weights[column] = is_visible(tile, column, visible) ? raised : 0.0F;
          group_sum += weights[column];
        }
        const int token = decode_warp() * kGroupTokens + tile * 8 + decode_lane() % 4 * 2;
        *reinterpret_cast<uint32_t*>(s_weights + swizzled_offset(decode_head(half), token)) =
            pack_bf16(weights[0], weights[1]);
      }
      attended.weight_sum[half] += group_sum;
    }
  }

  __device__ __forceinline__ void weigh_pairs(const PairScores (&scores)[kPairs], int visible, float scale) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      raise_exponents(pair);
#pragma unroll
      for (int page = 0; page < kPairPages; ++page) {
        weigh(plan.pairs[round][pair].weights[page], scores[pair][page],
              visible - pair * kPairTokens - page * kPageTokens, scale);
      }
    }
  }

  __device__ __forceinline__ void add_values(const std::byte* s_weights, const std::byte* s_values, int visible) {
    const int dim_first = decode_warp() * kWarpDims;
#pragma unroll
    for (int step = 0; step < kPageTokens / 16; ++step) {
      if (step * 16 >= visible) break;
      FragmentA weights;
      ldmatrix_x4(weights.regs, swizzled_address(s_weights, decode_lane() % 16, step * 16 + decode_lane() / 16 * 8));
#pragma unroll
      for (int tile = 0; tile < kDimTiles; tile += 2) {
        uint32_t values[4];
        const int token = step * 16 + decode_lane() % 16;
        ldmatrix_x4_trans(values, swizzled_address(s_values, token, dim_first + tile * 8 + decode_lane() / 16 * 8));
        mma_bf16(attended.sums[tile], weights, values[0], values[1]);
        mma_bf16(attended.sums[tile + 1], weights, values[2], values[3]);
      }
    }
  }

  __device__ __forceinline__ void add_pair(Place& place, int pair, int visible) {
    if (visible <= 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) attended.scale_sums(half, keep[pair][half]);
    if constexpr (kShare == 1) {
#pragma unroll
      for (int page = 0; page < kPairPages; ++page) {
        const int page_visible = visible - page * kPageTokens;
        if (page_visible <= 0) break;
        const std::byte* s_values = plan.ring.wait_until_arrived(place);
        plan.ring.template zero_tail<kDecodeConsumers>(place, page_visible);
        add_values(plan.pairs[round][pair].weights[page], s_values, page_visible);
        plan.ring.release(place);
      }
    } else {
      const std::byte* s_values = plan.ring.wait_until_arrived(place);
      plan.ring.template zero_slab_pair_tail<kDecodeConsumers>(place, visible);
      add_values(plan.pairs[round][pair].weights[0], s_values, visible);
      add_values(plan.pairs[round][pair].weights[1], s_values + kSlabBytes, visible - kPageTokens);
      plan.ring.release(place);
    }
  }

  __device__ __forceinline__ void attend_round(Place& place, int visible, float scale) {
    PageScores own[kOwnPages] = {};
    PairScores scores[kPairs];
    score_own_pages(own, place, visible);
    if constexpr (kShare == 1) {
#pragma unroll
      for (int part = 0; part < 2 * kPairPages; ++part) scores[0][part / 2][part % 2] = own[part / 2][part % 2];
    } else {
      exchange_scores(scores, own);
    }
    share_highest(scores, visible, scale);
    sync_consumers<kDecodeConsumers>();
    weigh_pairs(scores, visible, scale);
    sync_consumers<kDecodeConsumers>();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) add_pair(place, pair, visible - pair * kPairTokens);
    if constexpr (kShare > 1) ++round;
  }

  __device__ __forceinline__ void join_weight_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) plan.sums[decode_warp()][decode_lane()][half] = attended.weight_sum[half];
    sync_consumers<kDecodeConsumers>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = plan.sums[0][decode_lane()][half];
#pragma unroll
      for (int group = 1; group < kDecodeWarps; ++group) sum += plan.sums[group][decode_lane()][half];
      attended.weight_sum[half] = sum_of_quad(sum);
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ float exchange_magnitude(float magnitude) {
    if (thread() == 0) mbarrier_expect(&plan.magnitudes_arrived, kBlocks * kDecodeWarps * sizeof(float));
    if (decode_lane() == 0) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int target = static_cast<int>(hopper::cluster_rank()) ^ block;
        send_float(cluster_address(&plan.magnitudes[block * kDecodeWarps + decode_warp()], target), magnitude,
                   cluster_address(&plan.magnitudes_arrived, target));
      }
    }
    mbarrier_wait(&plan.magnitudes_arrived, magnitude_phase);
    magnitude_phase ^= 1U;
    float highest = plan.magnitudes[0];
#pragma unroll
    for (int part = 1; part < kBlocks * kDecodeWarps; ++part) highest = fmaxf(highest, plan.magnitudes[part]);
    return highest;
  }

  template <int kBlocks, int kTiles>
  __device__ __forceinline__ void store_row(const DecodeCall& call, const DecodeItem& item, HeadSums<kTiles>& row) {
    const AttendCall& attend = call.attend;
    const HeadShape shape{attend.num_heads / attend.num_kv_heads, head_dim(attend)};
    const int64_t width = int64_t{attend.num_heads} * shape.head_dim;
    const int64_t row_index = item.task.row;
    row.divide_by_weights();
    if (attend.out != nullptr) row.store(attend.out + row_index * width + item.kv_head * shape.width(), shape);
    if (call.codes == nullptr) return;
    const float scale = code_scale(exchange_magnitude<kBlocks>(row.highest_magnitude_of_warp(shape)));
    uint8_t* g_codes = call.codes + row_index * call.code_stride;
    row.store_codes(g_codes, shape, scale);
    if (kBlocks > 1 && rank > 0) return;
    if (thread() == 0) call.scales[row_index] = scale;
    for (int64_t index = width + thread(); index < call.code_stride; index += kDecodeConsumers) g_codes[index] = 0;
  }

  __device__ __forceinline__ bool announce_partial(const DecodeCall& call, const DecodeItem& item) {
    __threadfence();
    sync_consumers<kDecodeConsumers>();
    if (thread() == 0) {
      int32_t* g_arrivals = call.arrivals + item.task.row * call.attend.num_kv_heads + item.kv_head;
      plan.is_last = atomicAdd(g_arrivals, 1) == item.task.num_splits * kShare - 1;
      if (plan.is_last) *g_arrivals = 0;
      __threadfence();
    }
    sync_consumers<kDecodeConsumers>();
    return plan.is_last;
  }

  __device__ __forceinline__ void finish(const DecodeCall& call, const DecodeItem& item) {
    join_weight_sums();
    if (item.task.num_splits == 1) return store_row<kShare>(call, item, attended);
    const int64_t stride = call.attend.num_kv_heads * partial_floats(kHeadDim);
    float* g_partials = call.partials + item.task.partial_first * stride + item.kv_head * partial_floats(kHeadDim);
    attended.store_partial(g_partials + item.task.split * stride, rank == 0 && decode_warp() == 0);
    if (!announce_partial(call, item)) return;
    JoinedSums joined;
    joined.clear(decode_warp() * kHeadDim / kDecodeWarps);
    joined.join_partials(g_partials, stride, item.task.num_splits);
    store_row<1>(call, item, joined);
  }
};

template <int kHeadDim, bool kIsWhole, int kShare>
__device__ __forceinline__ void decode_items(const DecodeCall& call, DecodePlan<kHeadDim>& plan, int num_items) {
  using Lane = DecodeLane<kHeadDim, kIsWhole, kShare>;
  const int rank = kShare == 1 ? 0 : static_cast<int>(hopper::cluster_rank());
  if (threadIdx.x == kDecodeConsumers) {
    PageLoader<DecodePlan<kHeadDim>> loader(call, plan);
    for_each_decode_item<kShare>(call, num_items, [&](const DecodeItem& item) {
      kShare == 1 ? loader.load_whole_pages(item) : loader.load_shared_pages(item, rank);
    });
  } else if (threadIdx.x < kDecodeConsumers) {
    const float scale = kLog2E / sqrtf(static_cast<float>(Lane::head_dim(call.attend)));
    typename DecodePlan<kHeadDim>::Ring::Place place;
    Lane work(plan, rank);
    for_each_decode_item<kShare>(call, num_items, [&](const DecodeItem& item) {
      wait_for_previous_kernel();
      work.start(call.attend, item);
      for (int first = 0; first < item.count(); first += Lane::kPairs * kPairTokens) {
        work.attend_round(place, item.count() - first, scale);
      }
      work.finish(call, item);
    });
  }
}

template <int kHeadDim, bool kIsWhole>
__global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocksPerSm) attention_decode_kernel(const DecodeCall call) {
  constexpr int kMostShare = kHeadDim / kSlabDims;
  extern __shared__ std::byte s_memory[];
  auto& plan = *reinterpret_cast<DecodePlan<kHeadDim>*>(aligned_plan(s_memory));
  let_next_kernel_start();
  const int num_items = count_decode_items(call);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int round = 0; round < kSharedRounds; ++round) mbarrier_init(&plan.scores_arrived[round], 1);
    mbarrier_init(&plan.magnitudes_arrived, 1);
  }
  plan.ring.template prepare<kDecodeWarps>();
  hopper::cluster_sync_relaxed();
  if (kMostShare > 1 && num_items * kMostShare <= static_cast<int>(gridDim.x)) {
    decode_items<kHeadDim, kIsWhole, kMostShare>(call, plan, num_items);
  } else {
    decode_items<kHeadDim, kIsWhole, 1>(call, plan, num_items);
  }
  wait_for_previous_kernel();
}

}
