#pragma once

#include "cuda/kernels/sampling/sample_changes.cuh"
#include "cuda/kernels/sampling/sample_select.cuh"

namespace glint::cuda {

struct RowScan {
  RankedLogit best;
  bool is_usable;
};

__device__ __forceinline__ void load_slice(const SampleSlice& slice, const SampleSettings& row, int vocab_size) {
  const float* g_logits = row.logits + slice.first;
  if (vocab_size % 4 == 0) {
    const int vectors = slice.count / 4;
    for (int index = SampleSlice::thread(); index < vectors; index += kSampleThreads) {
      reinterpret_cast<float4*>(slice.s_values)[index] = reinterpret_cast<const float4*>(g_logits)[index];
    }
  } else {
    slice.for_each([&](int index) { slice.s_values[index] = g_logits[index]; });
  }
  __syncthreads();
}

__device__ __forceinline__ RowScan scan_slice(SampleSlice& slice) {
  RankedLogit best{-INFINITY, static_cast<int32_t>(kLastToken)};
  slice.for_each([&](int index) {
    const float logit = slice.s_values[index];
    const RankedLogit item{isnan(logit) ? INFINITY : logit, slice.token(index)};
    if (is_before(item, best)) best = item;
  });
  best = first_of_cluster(slice, best, slice.plan.warp_best, slice.plan.best);
  return {{best.value + 0.0F, best.token}, best.value < INFINITY && best.value > -INFINITY};
}

__device__ __forceinline__ RankedLogit best_after(const SampleSlice& slice, const RankedLogit& last) {
  RankedLogit best{-INFINITY, static_cast<int32_t>(kLastToken)};
  slice.for_each([&](int index) {
    const RankedLogit item{slice.s_values[index], slice.token(index)};
    if (is_before(last, item) && is_before(item, best)) best = item;
  });
  return best;
}

struct BestQueue {
  static constexpr RankedLogit kNothing{-INFINITY, static_cast<int32_t>(kLastToken)};
  RankedLogit first = kNothing;
  RankedLogit second = kNothing;
  RankedLogit third = kNothing;

  __device__ __forceinline__ void offer(const RankedLogit& item) {
    if (!is_before(item, third)) return;
    const bool leads = is_before(item, first);
    const bool follows = is_before(item, second);
    third = follows ? second : item;
    second = leads ? first : (follows ? item : second);
    first = leads ? item : first;
  }

  __device__ __forceinline__ void take(const SampleSlice& slice) {
    const RankedLogit taken = first;
    first = second;
    second = third;
    third = kNothing;
    if (first.token == kNothing.token && taken.token != kNothing.token) first = best_after(slice, taken);
  }
};

__device__ __forceinline__ void rank_slice(SampleSlice& slice, int limit) {
  BestQueue own;
  slice.for_each([&](int index) { own.offer({slice.s_values[index], slice.token(index)}); });
  for (int place = 0; place < limit; ++place) {
    const RankedLogit best = first_of_thread_block(own.first, slice.plan.warp_best);
    if (SampleSlice::thread() == 0) slice.plan.top[place] = best;
    if (own.first.token == best.token) own.take(slice);
  }
}

__device__ __forceinline__ void store_top(SampleSlice& slice, SampleResult& result, int limit, double log_total) {
  rank_slice(slice, limit);
  slice.cluster.sync();
  const int items = kSampleRanks * limit;
  const int own_rank = min(SampleSlice::thread() / limit, kSampleRanks - 1);
  const RankedLogit own =
      slice.cluster.map_shared_rank(slice.plan.top, static_cast<unsigned>(own_rank))[SampleSlice::thread() % limit];
  if (SampleSlice::thread() < items) slice.plan.all_top[SampleSlice::thread()] = own;
  __syncthreads();
  if (slice.rank() == 0 && SampleSlice::thread() < items) {
    int place = 0;
    for (int other = 0; other < items; ++other) place += is_before(slice.plan.all_top[other], own) ? 1 : 0;
    if (place < limit && own.value > -INFINITY) {
      result.top_tokens[place] = own.token;
      result.top_logprobs[place] = static_cast<float>(static_cast<double>(own.value) - log_total);
      atomicAdd(&result.top_count, 1);
    }
  }
}

__device__ __forceinline__ double log_sum_exp(SampleSlice& slice, float highest) {
  uint64_t mass = 0;
  slice.for_each([&](int index) { mass += mass_of_gap(__fsub_rn(highest, slice.s_values[index])); });
  mass = sum_of_cluster(slice, mass);
  return static_cast<double>(highest) + log(static_cast<double>(mass) / static_cast<double>(kMassOne));
}

__device__ __forceinline__ uint64_t kept_mass(SampleSlice& slice, const KeyLimit& limit) {
  uint64_t mass = 0;
  slice.for_each([&](int index) {
    const float gap = slice.s_values[index];
    if (limit.keeps(gap, static_cast<uint32_t>(slice.token(index)))) mass += mass_of_gap(gap);
  });
  return sum_of_cluster(slice, mass);
}

__device__ __forceinline__ uint64_t kept_count(SampleSlice& slice, const KeyLimit& limit) {
  uint64_t count = 0;
  slice.for_each([&](int index) {
    count += limit.keeps(slice.s_values[index], static_cast<uint32_t>(slice.token(index))) ? 1 : 0;
  });
  return sum_of_cluster(slice, count);
}

__device__ __forceinline__ void measure_gaps(SampleSlice& slice, float highest, float temperature) {
  const float inverse = fminf(__fdiv_rn(1.0F, temperature), FLT_MAX);
  slice.for_each([&](int index) {
    slice.s_values[index] = __fmul_rn(__fsub_rn(highest, slice.s_values[index]), inverse);
  });
  __syncthreads();
}

__device__ __forceinline__ float top_p_reach(double top_p, uint64_t mass, int vocab_size) {
  constexpr double kMargin = 1e-3;
  const double total = static_cast<double>(mass) / static_cast<double>(kMassOne);
  return static_cast<float>(kMargin - log((1.0 - top_p) * total / static_cast<double>(vocab_size)));
}

__device__ __forceinline__ KeyLimit keep_by_mass(SampleSlice& slice, const KeyLimit& limit, double top_p,
                                                 uint64_t total) {
  return Selection<true>(slice, limit, __double2ull_ru(top_p * static_cast<double>(total))).find();
}

__device__ __forceinline__ KeyLimit choose_limit(SampleSlice& slice, const SampleSettings& row, int vocab_size) {
  const auto top_p = static_cast<double>(row.top_p);
  const bool is_top_p_alone = top_p < 1.0 && row.top_k == 0 && row.min_p == 0.0F;
  KeyLimit limit{__float_as_uint(kGumbelReach), kLastToken};
  if (is_top_p_alone) {
    const uint64_t total = kept_mass(slice, {__float_as_uint(INFINITY), kLastToken});
    limit.gap_bits = __float_as_uint(fminf(kGumbelReach, top_p_reach(top_p, total, vocab_size)));
    return keep_by_mass(slice, limit, top_p, total);
  }
  if (row.min_p > 0.0F) {
    limit.gap_bits = __float_as_uint(fminf(kGumbelReach, fabsf(static_cast<float>(log(static_cast<double>(row.min_p))))));
  }
  if (row.top_k > 0 && static_cast<uint64_t>(row.top_k) < kept_count(slice, limit)) {
    limit = Selection<false>(slice, limit, static_cast<uint64_t>(row.top_k)).find();
  }
  if (top_p < 1.0) return keep_by_mass(slice, limit, top_p, kept_mass(slice, limit));
  return limit;
}

inline constexpr int kDrawsAtOnce = 4;

struct Draws {
  float gaps[kDrawsAtOnce];
  uint64_t bits[kDrawsAtOnce];
  float bounds[kDrawsAtOnce];

  __device__ __forceinline__ Draws(const SampleSlice& slice, uint64_t key, int first, const KeyLimit& limit) {
#pragma unroll
    for (int draw = 0; draw < kDrawsAtOnce; ++draw) {
      const int index = first + draw * kSampleThreads;
      const bool is_inside = index < slice.count;
      gaps[draw] = slice.s_values[is_inside ? index : 0];
      bits[draw] = token_bits(key, slice.token(index));
      const bool is_kept = is_inside && limit.keeps(gaps[draw], static_cast<uint32_t>(slice.token(index)));
      bounds[draw] = is_kept ? near_gumbel_bound(bits[draw]) - gaps[draw] : -INFINITY;
    }
  }
};

template <typename Visit>
__device__ __forceinline__ void for_each_draw(const SampleSlice& slice, uint64_t key, const KeyLimit& limit,
                                              Visit visit) {
  for (int first = SampleSlice::thread(); first < slice.count; first += kDrawsAtOnce * kSampleThreads) {
    const Draws draws(slice, key, first, limit);
#pragma unroll
    for (int draw = 0; draw < kDrawsAtOnce; ++draw) {
      visit(draws.bounds[draw], draws.bits[draw], draws.gaps[draw], slice.token(first + draw * kSampleThreads));
    }
  }
}

struct NearBest {
  RankedLogit best;
  float runner_up = -INFINITY;

  __device__ __forceinline__ void offer(float bound, uint64_t bits, float gap, int32_t token) {
    if (!(bound > runner_up)) return;
    const RankedLogit item{near_gumbel(bits) - gap, token};
    const bool leads = is_before(item, best);
    runner_up = leads ? best.value : fmaxf(runner_up, item.value);
    best = leads ? item : best;
  }
};

__device__ __forceinline__ ScoredToken exact_score(const SampleSlice& slice, uint64_t key, int32_t token) {
  const float gap = slice.s_values[token - slice.first];
  return {gumbel_of_bits(token_bits(key, token)) - static_cast<double>(gap), token};
}

__device__ __forceinline__ ScoredToken exact_best(const SampleSlice& slice, uint64_t key, const KeyLimit& limit,
                                                  const NearBest& own, float wanted) {
  ScoredToken best{-INFINITY, static_cast<int32_t>(kLastToken)};
  if (own.best.value < wanted) return best;
  if (own.runner_up < wanted) return exact_score(slice, key, own.best.token);
  for_each_draw(slice, key, limit, [&](float bound, uint64_t, float, int32_t token) {
    if (bound < wanted) return;
    const ScoredToken item = exact_score(slice, key, token);
    if (is_before(item, best)) best = item;
  });
  return best;
}

__device__ __forceinline__ int32_t draw_token(SampleSlice& slice, const SampleSettings& row, const KeyLimit& limit) {
  const uint64_t key = row_key(row.seed, row.choice_index, row.position);
  NearBest own{{-INFINITY, static_cast<int32_t>(kLastToken)}};
  for_each_draw(slice, key, limit, [&](float bound, uint64_t bits, float gap, int32_t token) {
    own.offer(bound, bits, gap, token);
  });
  const RankedLogit near = first_of_cluster(slice, own.best, slice.plan.warp_best, slice.plan.best);
  const ScoredToken best = exact_best(slice, key, limit, own, near.value - kNearMargin);
  return first_of_cluster(slice, best, slice.plan.warp_scores, slice.plan.best_score).token;
}

__device__ __forceinline__ int32_t choose_token(SampleSlice& slice, const SampleSettings& row, const RowScan& scan,
                                                int vocab_size) {
  if (row.temperature == 0.0F) return scan.best.token;
  measure_gaps(slice, scan.best.value, row.temperature);
  return draw_token(slice, row, choose_limit(slice, row, vocab_size));
}

__device__ __forceinline__ void store_token(const SampleSlice& slice, SampleResult& result, const SampleSettings& row,
                                            int32_t token, double log_total) {
  if (slice.rank() != 0 || SampleSlice::thread() != 0) return;
  result.token = token;
  if (row.has_logprobs || row.has_given_token) {
    result.logprob = static_cast<float>(static_cast<double>(row.logits[token]) - log_total);
  }
}

__device__ __forceinline__ void start_result(SampleSlice& slice, SampleResult& result) {
  if (slice.rank() == 0 && SampleSlice::thread() == 0) result = {};
  __syncthreads();
}

__device__ __forceinline__ void fail(const SampleSlice& slice, SampleResult& result, int32_t failure) {
  if (slice.rank() == 0 && SampleSlice::thread() == 0) result.failure = failure;
}

__device__ __forceinline__ void sample_slice(SampleSlice& slice, SampleResult& result, const SampleSettings& row,
                                             uint32_t* s_counts, int vocab_size) {
  load_slice(slice, row, vocab_size);
  RowScan scan = scan_slice(slice);
  if (!scan.is_usable) return fail(slice, result, GLINT_FAILURE_NOT_FINITE);
  double log_total = 0.0;
  if (row.has_logprobs || row.has_given_token) {
    log_total = log_sum_exp(slice, scan.best.value);
    if (row.num_logprobs > 0) store_top(slice, result, row.num_logprobs, log_total);
  }
  if (row.has_given_token) return store_token(slice, result, row, row.given_token, log_total);
  if (has_changes(row)) {
    apply_bias(slice, row);
    apply_mask(slice, row);
    apply_penalties(slice, row, s_counts);
    scan = scan_slice(slice);
  }
  if (!scan.is_usable) return fail(slice, result, GLINT_FAILURE_NOTHING_ALLOWED);
  store_token(slice, result, row, choose_token(slice, row, scan, vocab_size), log_total);
}

__global__ void __launch_bounds__(kSampleThreads, 2) __cluster_dims__(kSampleRanks, 1, 1)
    sample_rows_kernel(const SampleCall call) {
  extern __shared__ float4 s_memory[];
  __shared__ SamplePlan plan;
  const int share = slice_tokens(call.vocab_size);
  SampleSlice slice{.plan = plan, .s_values = reinterpret_cast<float*>(s_memory), .first = 0, .count = 0};
  slice.first = min(slice.rank() * share, call.vocab_size);
  slice.count = min(share, call.vocab_size - slice.first);
  const auto index = static_cast<int>(blockIdx.x) / kSampleRanks;
  SampleResult& result = call.results[index];
  start_result(slice, result);
  sample_slice(slice, result, call.rows[index], reinterpret_cast<uint32_t*>(slice.s_values + share), call.vocab_size);
  slice.cluster.sync();
}

}
