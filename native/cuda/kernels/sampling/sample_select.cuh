#pragma once

#include "cuda/kernels/sampling/sample_reduce.cuh"
#include "cuda/kernels/sampling/sample_weight.cuh"

namespace glint::cuda {

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
        return gap_bin(slice_.s_values[index]) == bin_ && bits - low_ <= span
                   ? static_cast<int>((bits - low_) >> shift)
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
    Histogram& histogram = slice_.plan.histogram;
    clear(histogram);
    slice_.for_each([&](int index) {
      const float gap = slice_.s_values[index];
      if (!limit_.keeps(gap, static_cast<uint32_t>(slice_.token(index)))) return;
      const int bin = bin_of(index);
      if (bin != kOutside) add(histogram, bin, gap);
    });
    slice_.cluster.sync();
    return find_crossing(histogram, slice_.plan.bin_sums);
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
    if (SampleSlice::thread() == 0) slice_.plan.crossing.bin = kOutside;
    __syncthreads();
    announce(own_bin, before, low);
    announce(own_bin + 1, before + low.amount, high);
    __syncthreads();
    found_ = slice_.plan.crossing;
    __syncthreads();
    if (found_.bin == kOutside) return false;
    target_ -= found_.before;
    return true;
  }

  __device__ void announce(int bin, uint64_t before, const BinSum& sum) const {
    if (before < target_ && target_ <= before + sum.amount) {
      slice_.plan.crossing = {bin, sum.count, before, sum.amount};
    }
  }

  __device__ uint64_t amount_before(uint64_t amount) const {
    uint64_t inclusive = amount;
#pragma unroll
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const uint64_t other = __shfl_up_sync(kWholeWarp, inclusive, distance);
      if (SampleSlice::lane() >= distance) inclusive += other;
    }
    if (SampleSlice::lane() == kWarpLanes - 1) slice_.plan.warp_sums[SampleSlice::warp()] = inclusive;
    __syncthreads();
    uint64_t before = inclusive - amount;
    for (int warp = 0; warp < SampleSlice::warp(); ++warp) before += slice_.plan.warp_sums[warp];
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

}
