#include "cuda/kernels/sampling/sampling.h"

#include <cooperative_groups.h>

#include <cfloat>
#include <cstdint>

#include "base/rng.h"
#include "cuda/check.h"
#include "cuda/kernels/ptx/reduce.cuh"

namespace glint::cuda {

inline constexpr int kSampleRanks = 8;
inline constexpr int kSampleThreads = 512;
inline constexpr int kSampleWarps = kSampleThreads / kWarpLanes;
inline constexpr int kThreadBins = 2;
inline constexpr int kSampleBins = kThreadBins * kSampleThreads;
inline constexpr int kRankBins = kSampleBins / kSampleRanks;
inline constexpr int kMassLimbs = 3;
inline constexpr int kSliceAlignment = 32;

struct RankedLogit {
  float value;
  int32_t token;
};

struct ScoredToken {
  double score;
  int32_t token;
};

struct Histogram {
  uint32_t counts[kSampleBins];
  uint32_t limbs[kMassLimbs][kSampleBins];
};

struct alignas(16) BinSum {
  uint64_t amount;
  uint32_t count;
};

struct Crossing {
  int32_t bin;
  uint32_t count;
  uint64_t before;
  uint64_t amount;
};

struct SampleStorage {
  Histogram histogram;
  RankedLogit top[GLINT_MAX_LOGPROBS];
  RankedLogit all_top[kSampleRanks * GLINT_MAX_LOGPROBS];
  BinSum bin_sums[kRankBins];
  RankedLogit warp_best[kSampleWarps];
  ScoredToken warp_scores[kSampleWarps];
  uint64_t warp_sums[kSampleWarps];
  RankedLogit best[2];
  ScoredToken best_score[2];
  uint64_t sum[2];
  Crossing crossing;
};

struct SampleSlice {
  cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  SampleStorage& storage;
  float* s_values;
  int first;
  int count;
  int turn = 0;

  __device__ int rank() const { return static_cast<int>(cluster.block_rank()); }
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / kWarpLanes; }
  __device__ static int lane() { return thread() % kWarpLanes; }
  __device__ int next_turn() { return turn++ % 2; }
  __device__ int token(int index) const { return first + index; }

  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
#pragma unroll 4
    for (int index = thread(); index < count; index += kSampleThreads) visit(index);
  }
};

__host__ __device__ constexpr int slice_tokens(int vocab_size) {
  const int share = (vocab_size + kSampleRanks - 1) / kSampleRanks;
  return (share + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment;
}

__device__ __forceinline__ bool is_before(const RankedLogit& left, const RankedLogit& right) {
  return left.value > right.value || (left.value == right.value && left.token < right.token);
}

__device__ __forceinline__ bool is_before(const ScoredToken& left, const ScoredToken& right) {
  return left.score > right.score || (left.score == right.score && left.token < right.token);
}

__device__ __forceinline__ RankedLogit shuffled(const RankedLogit& item, int distance) {
  return {__shfl_xor_sync(kWholeWarp, item.value, distance), __shfl_xor_sync(kWholeWarp, item.token, distance)};
}

__device__ __forceinline__ ScoredToken shuffled(const ScoredToken& item, int distance) {
  return {__shfl_xor_sync(kWholeWarp, item.score, distance), __shfl_xor_sync(kWholeWarp, item.token, distance)};
}

template <typename Item>
__device__ __forceinline__ Item first_of_warp(Item item) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    const Item other = shuffled(item, distance);
    if (is_before(other, item)) item = other;
  }
  return item;
}

template <typename Item>
__device__ __forceinline__ Item first_of_thread_block(Item item, Item* s_items) {
  item = first_of_warp(item);
  if (SampleSlice::lane() == 0) s_items[SampleSlice::warp()] = item;
  __syncthreads();
  item = first_of_warp(s_items[SampleSlice::lane() % kSampleWarps]);
  __syncthreads();
  return item;
}

template <typename Item>
__device__ __forceinline__ Item first_of_cluster(SampleSlice& slice, Item item, Item* s_items, Item (&s_best)[2]) {
  Item* s_own = s_best + slice.next_turn();
  item = first_of_thread_block(item, s_items);
  if (SampleSlice::thread() == 0) *s_own = item;
  slice.cluster.sync();
  Item others[kSampleRanks];
#pragma unroll
  for (unsigned rank = 0; rank < kSampleRanks; ++rank) others[rank] = *slice.cluster.map_shared_rank(s_own, rank);
#pragma unroll
  for (const Item& other : others) {
    if (is_before(other, item)) item = other;
  }
  return item;
}

__device__ __forceinline__ uint64_t sum_of_cluster(SampleSlice& slice, uint64_t value) {
  uint64_t* s_own = slice.storage.sum + slice.next_turn();
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, distance);
  }
  if (SampleSlice::lane() == 0) slice.storage.warp_sums[SampleSlice::warp()] = value;
  __syncthreads();
  if (SampleSlice::thread() == 0) {
    uint64_t sum = 0;
    for (int warp = 0; warp < kSampleWarps; ++warp) sum += slice.storage.warp_sums[warp];
    *s_own = sum;
  }
  slice.cluster.sync();
  value = 0;
#pragma unroll
  for (unsigned rank = 0; rank < kSampleRanks; ++rank) value += *slice.cluster.map_shared_rank(s_own, rank);
  return value;
}

inline constexpr float kMassOne = 0x1p45F;
inline constexpr float kGumbelReach = 40.35F;
inline constexpr float kNearMargin = 1e-3F;

__device__ __forceinline__ float next_term(float series, float rest, float constant) {
  return __fadd_rn(__fmul_rn(series, rest), constant);
}

__device__ __forceinline__ float weight_of_gap(float gap) {
  constexpr float kRounder = 12582912.0F;
  const uint32_t furthest = __float_as_uint(87.0F);
  const float value = -__uint_as_float(min(__float_as_uint(gap), furthest));
  const float shifted = __fadd_rn(__fmul_rn(value, 1.44269504F), kRounder);
  const float whole = __fsub_rn(shifted, kRounder);
  const float rest = __fadd_rn(__fsub_rn(value, __fmul_rn(whole, 0.693359375F)), __fmul_rn(whole, 2.12194440e-4F));
  float series = 1.0F / 5040.0F;
  series = next_term(series, rest, 1.0F / 720.0F);
  series = next_term(series, rest, 1.0F / 120.0F);
  series = next_term(series, rest, 1.0F / 24.0F);
  series = next_term(series, rest, 1.0F / 6.0F);
  series = next_term(series, rest, 0.5F);
  series = next_term(series, rest, 1.0F);
  series = next_term(series, rest, 1.0F);
  const int32_t exponent = __float_as_int(shifted) - __float_as_int(kRounder) + 127;
  return __fmul_rn(series, __int_as_float(exponent << 23));
}

__device__ __forceinline__ uint64_t mass_of_gap(float gap) { return __float2ull_rn(weight_of_gap(gap) * kMassOne); }

__device__ __forceinline__ double gumbel_of_bits(uint64_t bits) { return -log(-log(open_uniform(bits))); }

__device__ __forceinline__ float near_gumbel_bound(uint64_t bits) {
  constexpr float kLn2 = 0.6931472F;
  return static_cast<float>(__clzll(static_cast<long long>(~bits | 0xfffU)) + 1) * kLn2 + kNearMargin;
}

__device__ __forceinline__ float near_gumbel(uint64_t bits) {
  constexpr uint64_t kHighest = (uint64_t{1} << 52U) - 1;
  constexpr uint64_t kHalf = uint64_t{1} << 51U;
  const uint64_t drawn = bits >> 12U;
  const bool is_low = drawn < kHalf;
  const float share = (__ull2float_rn(is_low ? drawn : kHighest - drawn) + 0.5F) * 0x1p-52F;
  const float exponential = is_low ? -__logf(share) : -log1pf(-share);
  return -__logf(exponential);
}

inline constexpr float kBinsPerGap = 25.0F;
inline constexpr int kLimbBits = 16;
inline constexpr uint32_t kLastToken = 0x7fffffffU;

struct KeyLimit {
  uint32_t gap_bits;
  uint32_t token;

  __device__ __forceinline__ bool keeps(float gap, uint32_t other_token) const {
    const uint32_t bits = __float_as_uint(gap);
    return bits < gap_bits || (bits == gap_bits && other_token <= token);
  }
};

__device__ __forceinline__ int gap_bin(float gap) {
  return static_cast<int>(fminf(gap * kBinsPerGap, static_cast<float>(kSampleBins - 1)));
}

template <bool kByMass>
class Selection {
 public:
  __device__ Selection(SampleSlice& slice, const KeyLimit& limit, uint64_t target)
      : slice_(slice), limit_(limit), target_(target) {}

  __device__ KeyLimit find() {
    if (!take_bin([&](int index) { return gap_bin(slice_.s_values[index]); })) return limit_;
    const int bin = found_.bin;
    bin_ = bin;
    narrow_gap(edge_bits(static_cast<float>(bin) * (1.0F - kEdgeMargin)),
               edge_bits(static_cast<float>(bin + 1) * (1.0F + kEdgeMargin)));
    if (found_.count == 1) return {low_, kLastToken};
    narrow_token();
    return {gap_bits_, low_};
  }

 private:
  __device__ static uint32_t edge_bits(float bins) { return __float_as_uint(bins / kBinsPerGap); }

  __device__ void narrow_gap(uint32_t low, uint32_t high) {
    low_ = low;
    uint32_t span = high - low;
    while (span > 0) {
      const int shift = max(0, 32 - __clz(span) - kBinBits);
      take_bin([&](int index) {
        const uint32_t bits = __float_as_uint(slice_.s_values[index]);
        return gap_bin(slice_.s_values[index]) == bin_ && bits - low_ <= span ? static_cast<int>((bits - low_) >> shift)
                                                                              : kOutside;
      });
      low_ += static_cast<uint32_t>(found_.bin) << shift;
      span = (1U << shift) - 1U;
    }
    gap_bits_ = low_;
  }

  __device__ void narrow_token() {
    low_ = 0;
    uint32_t span = kTokenSpan;
    while (span > 0) {
      const int shift = max(0, 32 - __clz(span) - kBinBits);
      take_bin([&](int index) {
        const auto token = static_cast<uint32_t>(slice_.token(index));
        const bool is_inside = __float_as_uint(slice_.s_values[index]) == gap_bits_ && token - low_ <= span;
        return is_inside ? static_cast<int>((token - low_) >> shift) : kOutside;
      });
      low_ += static_cast<uint32_t>(found_.bin) << shift;
      span = (1U << shift) - 1U;
    }
  }

  template <typename BinOf>
  __device__ bool take_bin(BinOf bin_of) {
    Histogram& histogram = slice_.storage.histogram;
    clear(histogram);
    slice_.for_each([&](int index) {
      const float gap = slice_.s_values[index];
      if (!limit_.keeps(gap, static_cast<uint32_t>(slice_.token(index)))) return;
      const int bin = bin_of(index);
      if (bin != kOutside) add(histogram, bin, gap);
    });
    slice_.cluster.sync();
    return find_crossing(histogram, slice_.storage.bin_sums);
  }

  __device__ static void clear(Histogram& histogram) {
    for (int bin = SampleSlice::thread(); bin < kSampleBins; bin += kSampleThreads) {
      histogram.counts[bin] = 0;
      for (int limb = 0; limb < kMassLimbs; ++limb) histogram.limbs[limb][bin] = 0;
    }
    __syncthreads();
  }

  __device__ static void add(Histogram& histogram, int bin, float gap) {
    atomicAdd(histogram.counts + bin, 1U);
    if constexpr (kByMass) {
      const uint64_t mass = mass_of_gap(gap);
#pragma unroll
      for (int limb = 0; limb < kMassLimbs; ++limb) {
        atomicAdd(histogram.limbs[limb] + bin, static_cast<uint32_t>(mass >> (kLimbBits * limb)) & 0xffffU);
      }
    }
  }

  __device__ void sum_rank_bins(const Histogram& histogram, BinSum* s_sums) {
    if (SampleSlice::thread() >= kRankBins) return;
    const int bin = slice_.rank() * kRankBins + SampleSlice::thread();
    BinSum sum{};
#pragma unroll
    for (unsigned rank = 0; rank < kSampleRanks; ++rank) {
      const Histogram* other = slice_.cluster.map_shared_rank(&histogram, rank);
      const uint32_t count = other->counts[bin];
      sum.count += count;
      if constexpr (!kByMass) sum.amount += count;
      if constexpr (kByMass) {
#pragma unroll
        for (int limb = 0; limb < kMassLimbs; ++limb) {
          sum.amount += static_cast<uint64_t>(other->limbs[limb][bin]) << (kLimbBits * limb);
        }
      }
    }
    s_sums[SampleSlice::thread()] = sum;
  }

  __device__ bool find_crossing(const Histogram& histogram, BinSum* s_sums) {
    const int own_bin = kThreadBins * SampleSlice::thread();
    sum_rank_bins(histogram, s_sums);
    slice_.cluster.sync();
    const BinSum* sums = slice_.cluster.map_shared_rank(s_sums, static_cast<unsigned>(own_bin / kRankBins));
    const BinSum low = sums[own_bin % kRankBins];
    const BinSum high = sums[own_bin % kRankBins + 1];
    const uint64_t before = amount_before(low.amount + high.amount);
    if (SampleSlice::thread() == 0) slice_.storage.crossing.bin = kOutside;
    __syncthreads();
    announce(own_bin, before, low);
    announce(own_bin + 1, before + low.amount, high);
    __syncthreads();
    found_ = slice_.storage.crossing;
    __syncthreads();
    if (found_.bin == kOutside) return false;
    target_ -= found_.before;
    return true;
  }

  __device__ void announce(int bin, uint64_t before, const BinSum& sum) const {
    if (before < target_ && target_ <= before + sum.amount) {
      slice_.storage.crossing = {bin, sum.count, before, sum.amount};
    }
  }

  __device__ uint64_t amount_before(uint64_t amount) const {
    uint64_t inclusive = amount;
#pragma unroll
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const uint64_t other = __shfl_up_sync(kWholeWarp, inclusive, distance);
      if (SampleSlice::lane() >= distance) inclusive += other;
    }
    if (SampleSlice::lane() == kWarpLanes - 1) slice_.storage.warp_sums[SampleSlice::warp()] = inclusive;
    __syncthreads();
    uint64_t before = inclusive - amount;
    for (int warp = 0; warp < SampleSlice::warp(); ++warp) before += slice_.storage.warp_sums[warp];
    __syncthreads();
    return before;
  }

  static constexpr int kOutside = kSampleBins;
  static constexpr float kEdgeMargin = 1e-5F;
  static constexpr int kBinBits = 10;
  static constexpr uint32_t kTokenSpan = (1U << 2 * kBinBits) - 1U;
  static_assert(1 << kBinBits == kSampleBins, "a digit names a bin");

  SampleSlice& slice_;
  KeyLimit limit_;
  uint64_t target_;
  Crossing found_{};
  int bin_ = 0;
  uint32_t low_ = 0;
  uint32_t gap_bits_ = 0;
};

inline constexpr uint32_t kSeenBit = 0x80000000U;

__device__ __forceinline__ bool has_repetition(const SampleSettings& row) { return row.repetition_penalty != 1.0F; }
__device__ __forceinline__ bool has_counts(const SampleSettings& row) {
  return row.frequency_penalty != 0.0F || row.presence_penalty != 0.0F;
}
__device__ __forceinline__ bool has_changes(const SampleSettings& row) {
  return row.bias_count > 0 || row.allowed_words != nullptr || has_repetition(row) || has_counts(row);
}

__device__ __forceinline__ bool is_first_mention(const int32_t* g_tokens, int index) {
  for (int other = 0; other < index; ++other) {
    if (g_tokens[other] == g_tokens[index]) return false;
  }
  return true;
}

__device__ __forceinline__ void apply_bias(const SampleSlice& slice, const SampleSettings& row) {
  for (int index = SampleSlice::thread(); index < row.bias_count; index += kSampleThreads) {
    const int place = row.bias_tokens[index] - slice.first;
    if (place < 0 || place >= slice.count || !is_first_mention(row.bias_tokens, index)) continue;
    for (int other = index; other < row.bias_count; ++other) {
      if (row.bias_tokens[other] == row.bias_tokens[index]) slice.s_values[place] += row.bias_values[other];
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void apply_mask(const SampleSlice& slice, const SampleSettings& row) {
  if (row.allowed_words == nullptr) return;
  slice.for_each([&](int index) {
    const uint32_t word = row.allowed_words[slice.token(index) / 32];
    if (((word >> (slice.token(index) % 32)) & 1U) == 0) slice.s_values[index] = -INFINITY;
  });
  __syncthreads();
}

__device__ __forceinline__ void count_history(const SampleSlice& slice, const SampleSettings& row, uint32_t* s_counts) {
  slice.for_each([&](int index) { s_counts[index] = 0; });
  __syncthreads();
  for (int index = SampleSlice::thread(); index < row.history_count; index += kSampleThreads) {
    const int place = row.history[index] - slice.first;
    if (place < 0 || place >= slice.count) continue;
    atomicOr(s_counts + place, kSeenBit);
    if (index >= row.prompt_count) atomicAdd(s_counts + place, 1U);
  }
  __syncthreads();
}

__device__ __forceinline__ float repeated(float logit, float penalty) {
  const float changed = logit > 0.0F ? __fdiv_rn(logit, penalty) : __fmul_rn(logit, penalty);
  return logit == -INFINITY ? logit : fminf(fmaxf(changed, -FLT_MAX), FLT_MAX);
}

__device__ __forceinline__ void apply_penalties(const SampleSlice& slice, const SampleSettings& row,
                                                uint32_t* s_counts) {
  if (!has_repetition(row) && !has_counts(row)) return;
  count_history(slice, row, s_counts);
  slice.for_each([&](int index) {
    const uint32_t seen = s_counts[index];
    const uint32_t count = seen & ~kSeenBit;
    float logit = slice.s_values[index];
    if (has_repetition(row) && seen != 0) logit = repeated(logit, row.repetition_penalty);
    if (has_counts(row) && count > 0) {
      const float cost = __fadd_rn(__fmul_rn(row.frequency_penalty, static_cast<float>(count)), row.presence_penalty);
      logit = __fsub_rn(logit, cost);
    }
    slice.s_values[index] = logit;
  });
  __syncthreads();
}

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
  best = first_of_cluster(slice, best, slice.storage.warp_best, slice.storage.best);
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
    const RankedLogit best = first_of_thread_block(own.first, slice.storage.warp_best);
    if (SampleSlice::thread() == 0) slice.storage.top[place] = best;
    if (own.first.token == best.token) own.take(slice);
  }
}

__device__ __forceinline__ void store_top(SampleSlice& slice, SampleResult& result, int limit, double log_total) {
  rank_slice(slice, limit);
  slice.cluster.sync();
  const int items = kSampleRanks * limit;
  const int own_rank = min(SampleSlice::thread() / limit, kSampleRanks - 1);
  const RankedLogit own =
      slice.cluster.map_shared_rank(slice.storage.top, static_cast<unsigned>(own_rank))[SampleSlice::thread() % limit];
  if (SampleSlice::thread() < items) slice.storage.all_top[SampleSlice::thread()] = own;
  __syncthreads();
  if (slice.rank() == 0 && SampleSlice::thread() < items) {
    int place = 0;
    for (int other = 0; other < items; ++other) place += is_before(slice.storage.all_top[other], own) ? 1 : 0;
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
  slice.for_each(
      [&](int index) { slice.s_values[index] = __fmul_rn(__fsub_rn(highest, slice.s_values[index]), inverse); });
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
    limit.gap_bits =
        __float_as_uint(fminf(kGumbelReach, fabsf(static_cast<float>(log(static_cast<double>(row.min_p))))));
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
  for_each_draw(slice, key, limit,
                [&](float bound, uint64_t bits, float gap, int32_t token) { own.offer(bound, bits, gap, token); });
  const RankedLogit near = first_of_cluster(slice, own.best, slice.storage.warp_best, slice.storage.best);
  const ScoredToken best = exact_best(slice, key, limit, own, near.value - kNearMargin);
  return first_of_cluster(slice, best, slice.storage.warp_scores, slice.storage.best_score).token;
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
  __shared__ SampleStorage storage;
  const int share = slice_tokens(call.vocab_size);
  SampleSlice slice{.storage = storage, .s_values = reinterpret_cast<float*>(s_memory), .first = 0, .count = 0};
  slice.first = min(slice.rank() * share, call.vocab_size);
  slice.count = min(share, call.vocab_size - slice.first);
  const auto index = static_cast<int>(blockIdx.x) / kSampleRanks;
  SampleResult& result = call.results[index];
  start_result(slice, result);
  sample_slice(slice, result, call.rows[index], reinterpret_cast<uint32_t*>(slice.s_values + share), call.vocab_size);
  slice.cluster.sync();
}

void launch_sample_rows(const SampleCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  const int slice_bytes = slice_tokens(call.vocab_size) * static_cast<int>(sizeof(float));
  const int shared_bytes = (call.has_penalties ? 2 : 1) * slice_bytes;
  const int room_bytes = kSharedLimitBytes - static_cast<int>(sizeof(SampleStorage));
  require_argument(2 * slice_bytes <= room_bytes, "the vocabulary has ", call.vocab_size,
                   " tokens; the CUDA sampler holds at most ",
                   room_bytes / 2 / static_cast<int>(sizeof(float)) * kSampleRanks);
  GLINT_CHECK_CUDA(
      cudaFuncSetAttribute(sample_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * slice_bytes));
  const auto thread_blocks = static_cast<unsigned>(call.count * kSampleRanks);
  sample_rows_kernel<<<thread_blocks, kSampleThreads, static_cast<size_t>(shared_bytes), stream>>>(call);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

}
