#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/sampling/sampling.h"

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

struct SamplePlan {
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
  SamplePlan& plan;
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

}
