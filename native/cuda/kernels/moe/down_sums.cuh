#pragma once

#include "cuda/kernels/moe/down_records.cuh"

namespace glint::cuda {

constexpr int kWideFloats = 32;
constexpr int kNarrowFloats = kDownTileRows - kWideFloats;

struct TokenSums {
  static constexpr int kUnusedPlace = kDownBlockTokens;
  static constexpr int kPlaces = kDownBlockTokens + 1;

  alignas(128) float values[kPlaces * kDownTileRows];

  __device__ __forceinline__ float* wide(int place) { return values + place * kWideFloats; }

  __device__ __forceinline__ float* narrow(int place) {
    return values + kPlaces * kWideFloats + place * kNarrowFloats;
  }
};

struct StoredVector {
  static constexpr int kVectors = kDownTileRows / 4;

  int token;
  int vector;
  float2* s_low;
  float2* s_high;

  __device__ __forceinline__ StoredVector(TokenSums& s_sums, int index)
      : token(index / kVectors), vector(index % kVectors) {
    const int group = vector / 2;
    const bool is_wide = group < kWideFloats / 8;
    float* s_values = is_wide ? s_sums.wide(token) + group / 2 * 16 + vector % 2 * 8 + group % 2 * 2
                              : s_sums.narrow(token) + vector % 2 * 4;
    s_low = reinterpret_cast<float2*>(s_values);
    s_high = s_low + (is_wide ? 2 : 1);
  }
};

template <int kThreads>
__device__ __forceinline__ void store_and_clear(TokenSums& s_sums, const DownInputs& inputs, int token_block,
                                                int owner) {
  constexpr int kBatch = 4;
  const int token_first = token_block * inputs.block_tokens;
  const int num_vectors = min(inputs.block_tokens, inputs.num_tokens - token_first) * StoredVector::kVectors;
  float* g_out = inputs.out + int64_t{token_first} * inputs.hidden_size + owner * kDownTileRows;
  __syncthreads();
  for (int first = threadIdx.x; first < num_vectors; first += kBatch * kThreads) {
    float2 r_low[kBatch];
    float2 r_high[kBatch];
#pragma unroll
    for (int next = 0; next < kBatch; ++next) {
      const StoredVector stored(s_sums, min(first + next * kThreads, num_vectors - 1));
      r_low[next] = *stored.s_low;
      r_high[next] = *stored.s_high;
    }
#pragma unroll
    for (int next = 0; next < kBatch; ++next) {
      const int index = first + next * kThreads;
      if (index >= num_vectors) break;
      const StoredVector stored(s_sums, index);
      *stored.s_low = {};
      *stored.s_high = {};
      const float4 values = {r_low[next].x, r_low[next].y, r_high[next].x, r_high[next].y};
      __stcs(reinterpret_cast<float4*>(g_out + int64_t{stored.token} * inputs.hidden_size) + stored.vector, values);
    }
  }
  __syncthreads();
}

}
