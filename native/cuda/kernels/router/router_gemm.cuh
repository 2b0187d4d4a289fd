#pragma once

#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/kernels/ptx/mma.cuh"
#include "cuda/kernels/ptx/reduce.cuh"
#include "cuda/kernels/router/router.h"

namespace glint::cuda {

inline constexpr int kRouterStepCols = 64;
inline constexpr int kRouterChunkCols = 8;
inline constexpr int kLaneChunks = kRouterStepCols / kRouterChunkCols / 4;
inline constexpr int kLaneCols = kLaneChunks * kRouterChunkCols;
inline constexpr int kStepMmas = kRouterStepCols / 16;
inline constexpr int kTermCount = 3;
inline constexpr int kTermWords = kStepMmas * kTermCount * 2;

__device__ __forceinline__ int router_lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }

__device__ __forceinline__ int lane_col(int index) {
  const int chunk = index / kRouterChunkCols * 4 + router_lane() % 4;
  return chunk * kRouterChunkCols + index % kRouterChunkCols;
}

struct LaneWeights {
  uint32_t pairs[2][kLaneCols / 2];

  __device__ __forceinline__ void take_chunk(int half, int chunk, const uint4& loaded) {
    pairs[half][4 * chunk] = loaded.x;
    pairs[half][4 * chunk + 1] = loaded.y;
    pairs[half][4 * chunk + 2] = loaded.z;
    pairs[half][4 * chunk + 3] = loaded.w;
  }

  __device__ __forceinline__ void load(const RouterCall& call, int expert_first, int step_first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int expert = expert_first + router_lane() / 4 + 8 * half;
      const uint16_t* g_weight = call.weight + int64_t{expert} * call.width + step_first;
#pragma unroll
      for (int index = 0; index < kLaneCols / 2; ++index) {
        const int col = lane_col(2 * index);
        const bool has_low = expert < call.num_experts && step_first + col < call.width;
        const bool has_high = expert < call.num_experts && step_first + col + 1 < call.width;
        const uint32_t low = has_low ? g_weight[col] : 0U;
        const uint32_t high = has_high ? g_weight[col + 1] : 0U;
        pairs[half][index] = low | (high << 16U);
      }
    }
  }

  __device__ __forceinline__ void load_whole(const RouterCall& call, int expert_first, int step_first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int expert = expert_first + router_lane() / 4 + 8 * half;
      const uint16_t* g_weight = call.weight + int64_t{expert} * call.width + step_first;
#pragma unroll
      for (int chunk = 0; chunk < kLaneChunks; ++chunk) {
        take_chunk(half, chunk, __ldg(reinterpret_cast<const uint4*>(g_weight + lane_col(chunk * kRouterChunkCols))));
      }
    }
  }

  __device__ __forceinline__ ptx::FragmentA fragment(int mma) const {
    return {{pairs[0][2 * mma], pairs[1][2 * mma], pairs[0][2 * mma + 1], pairs[1][2 * mma + 1]}};
  }
};

struct LaneInputs {
  float values[kLaneCols];

  __device__ __forceinline__ void load(const RouterCall& call, int64_t row, int step_first) {
    const float* g_in = call.in + row * call.width + step_first;
    const bool is_row = row < call.count;
    const bool is_whole = step_first + kRouterStepCols <= call.width && call.width % 4 == 0;
    if (is_whole && is_row) {
#pragma unroll
      for (int index = 0; index < kLaneCols; index += 4) {
        const float4 loaded = *reinterpret_cast<const float4*>(g_in + lane_col(index));
        values[index] = loaded.x;
        values[index + 1] = loaded.y;
        values[index + 2] = loaded.z;
        values[index + 3] = loaded.w;
      }
      return;
    }
#pragma unroll
    for (int index = 0; index < kLaneCols; ++index) {
      values[index] = is_row && step_first + lane_col(index) < call.width ? g_in[lane_col(index)] : 0.0F;
    }
  }
};

struct LaneTerms {
  ptx::FragmentB terms[kStepMmas][kTermCount];

  __device__ __forceinline__ void split(const LaneInputs& inputs) {
#pragma unroll
    for (int pair_index = 0; pair_index < kLaneCols / 2; ++pair_index) {
      float low = inputs.values[2 * pair_index];
      float high = inputs.values[2 * pair_index + 1];
#pragma unroll
      for (int term = 0; term < kTermCount; ++term) {
        const uint32_t pair = ptx::pack_bf16(low, high);
        low -= __uint_as_float(pair << 16U);
        high -= __uint_as_float(pair & 0xffff0000U);
        terms[pair_index / 2][term].regs[pair_index % 2] = pair;
      }
    }
  }

  __device__ __forceinline__ uint32_t& word(int index) {
    return terms[index / 2 / kTermCount][index / 2 % kTermCount].regs[index % 2];
  }

  __device__ __forceinline__ uint4 get(int vector) {
    return make_uint4(word(4 * vector), word(4 * vector + 1), word(4 * vector + 2), word(4 * vector + 3));
  }

  __device__ __forceinline__ void set(int vector, const uint4& words) {
    word(4 * vector) = words.x;
    word(4 * vector + 1) = words.y;
    word(4 * vector + 2) = words.z;
    word(4 * vector + 3) = words.w;
  }
};

template <int kExpertTiles, int kRowTiles>
__device__ __forceinline__ void multiply(ptx::FragmentC (&sums)[kExpertTiles][kRowTiles],
                                         const LaneWeights (&weights)[kExpertTiles],
                                         const LaneTerms (&inputs)[kRowTiles]) {
#pragma unroll
  for (int mma = 0; mma < kStepMmas; ++mma) {
#pragma unroll
    for (int term = 0; term < kTermCount; ++term) {
#pragma unroll
      for (int expert_tile = 0; expert_tile < kExpertTiles; ++expert_tile) {
#pragma unroll
        for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
          const ptx::FragmentB& right = inputs[row_tile].terms[mma][term];
          ptx::mma_m16n8k16_bf16(sums[expert_tile][row_tile], weights[expert_tile].fragment(mma), right.regs[0],
                                 right.regs[1]);
        }
      }
    }
  }
}

__device__ __forceinline__ void store_sums(float* g_out, const ptx::FragmentC& sum, const RouterCall& call,
                                           int expert_first, int64_t row_first) {
#pragma unroll
  for (int element = 0; element < 4; ++element) {
    const int expert = expert_first + router_lane() / 4 + element / 2 * 8;
    const int64_t row = row_first + router_lane() % 4 * 2 + element % 2;
    if (expert < call.num_experts && row < call.count) g_out[row * call.num_experts + expert] = sum.values[element];
  }
}

inline constexpr int kSplitSteps = kRouterSplitCols / kRouterStepCols;
inline constexpr int kFewExpertTiles = 2;
inline constexpr int kFewExperts = 16 * kFewExpertTiles;
inline constexpr int kFewMostThreads = kMaxRouterExperts / kFewExperts * kWarpLanes;

using FewWeights = LaneWeights[kSplitSteps][kFewExpertTiles];

__device__ __forceinline__ void load_few_weights(FewWeights& weights, const RouterCall& call, int expert_first,
                                                 int split_first) {
#pragma unroll
  for (int step = 0; step < kSplitSteps; ++step) {
    const int step_first = split_first + step * kRouterStepCols;
    const bool is_whole = step_first + kRouterStepCols <= call.width && call.width % kRouterChunkCols == 0;
#pragma unroll
    for (int index = 0; index < kFewExpertTiles; ++index) {
      if (is_whole && expert_first + 16 * (index + 1) <= call.num_experts) {
        weights[step][index].load_whole(call, expert_first + 16 * index, step_first);
      } else {
        weights[step][index].load(call, expert_first + 16 * index, step_first);
      }
    }
  }
}

template <int kRowTiles>
struct FewTerms {
  uint4 words[kSplitSteps][kRowTiles][kTermWords / 4][kWarpLanes];

  __device__ __forceinline__ void split(const RouterCall& call, int64_t row_first, int split_first) {
    const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
    for (int unit = static_cast<int>(threadIdx.x) / kWarpLanes; unit < kSplitSteps * kRowTiles; unit += num_warps) {
      const int step = unit / kRowTiles;
      const int row_tile = unit % kRowTiles;
      LaneInputs inputs;
      LaneTerms terms;
      inputs.load(call, row_first + row_tile * 8 + router_lane() / 4, split_first + step * kRouterStepCols);
      terms.split(inputs);
#pragma unroll
      for (int index = 0; index < kTermWords / 4; ++index) {
        words[step][row_tile][index][router_lane()] = terms.get(index);
      }
    }
  }

  __device__ __forceinline__ void read(LaneTerms& terms, int step, int row_tile) const {
#pragma unroll
    for (int index = 0; index < kTermWords / 4; ++index) terms.set(index, words[step][row_tile][index][router_lane()]);
  }
};

template <int kRowTiles>
__global__ void __launch_bounds__(kFewMostThreads) router_gemm_few_kernel(const RouterCall call) {
  __shared__ FewTerms<kRowTiles> s_terms;
  const int expert_first = static_cast<int>(threadIdx.x) / kWarpLanes * kFewExperts;
  const int split_first = static_cast<int>(blockIdx.x) * kRouterSplitCols;
  const int64_t row_first = int64_t{blockIdx.y} * 8 * kRowTiles;
  ptx::FragmentC sums[kFewExpertTiles][kRowTiles] = {};
  FewWeights weights;
  load_few_weights(weights, call, expert_first, split_first);
  wait_and_launch_dependents(call.count);
  s_terms.split(call, row_first, split_first);
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kSplitSteps; ++step) {
    LaneTerms terms[kRowTiles];
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) s_terms.read(terms[row_tile], step, row_tile);
    multiply(sums, weights[step], terms);
  }
  float* g_split = call.splits + int64_t{blockIdx.x} * call.count * call.num_experts;
#pragma unroll
  for (int tile = 0; tile < kFewExpertTiles * kRowTiles; ++tile) {
    store_sums(g_split, sums[tile / kRowTiles][tile % kRowTiles], call, expert_first + tile / kRowTiles * 16,
               row_first + tile % kRowTiles * 8);
  }
}

}
