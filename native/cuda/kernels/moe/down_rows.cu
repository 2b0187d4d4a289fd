#include "cuda/kernels/moe/packed_tiles.cuh"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

constexpr int kQuantiseThreads = 256;
constexpr int kSumThreads = 256;
constexpr int kMostTokenRows = kMaxExpertsPerToken + 1;

struct FlatRow {
  uint8_t* fp8;

  __device__ __forceinline__ uint8_t* place(int unit) const { return fp8 + unit; }
};

__global__ void __launch_bounds__(kQuantiseThreads) quantise_rows_kernel(const QuantiseRowsCall call) {
  const int64_t row = int64_t{blockIdx.x} * (kQuantiseThreads / 32) + threadIdx.x / 32;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (row >= __ldcg(call.num_rows)) return;
  HiddenRow<kWideVectors> r_row;
  r_row.load(call.hidden + row * call.width, call.width);
  const float scale = r_row.quantise_by_converged_warp(FlatRow{call.rows.fp8 + row * call.width}, call.width);
  if (threadIdx.x % 32 == 0) call.rows.scales[row] = scale;
}

struct TokenRows {
  int32_t rows[kMostTokenRows];
  float weights[kMostTokenRows];
  int32_t count;
};

__device__ __forceinline__ void list_ascending(const SumRowsCall& call, TokenRows& s_list) {
  const int lane = static_cast<int>(threadIdx.x);
  const bool is_listed = lane < call.rows_per_token;
  const int row = is_listed ? __ldcg(call.token_rows + int64_t{blockIdx.x} * call.rows_per_token + lane) : -1;
  int place = 0;
#pragma unroll
  for (int other = 0; other < kMostTokenRows; ++other) {
    const int other_row = __shfl_sync(~0U, row, other);
    if (other_row >= 0 && other_row < row) ++place;
  }
  const unsigned present = __ballot_sync(~0U, row >= 0);
  if (row >= 0) s_list.rows[place] = row;
  if (row >= 0) s_list.weights[place] = __ldcg(call.row_weights + row);
  if (lane == 0) s_list.count = __popc(present);
}

__global__ void __launch_bounds__(kSumThreads) sum_rows_kernel(const SumRowsCall call) {
  __shared__ TokenRows s_list;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (threadIdx.x < 32) list_ascending(call, s_list);
  __syncthreads();
  const int count = s_list.count;
  const int num_vectors = call.hidden_size / 4;
  const auto* g_routed = reinterpret_cast<const float4*>(call.routed);
  auto* g_out = reinterpret_cast<float4*>(call.out) + int64_t{blockIdx.x} * num_vectors;
  for (int vector = threadIdx.x; vector < num_vectors; vector += kSumThreads) {
    float4 r_values[kMostTokenRows];
#pragma unroll
    for (int index = 0; index < kMostTokenRows; ++index) {
      if (index < count) r_values[index] = __ldcs(g_routed + int64_t{s_list.rows[index]} * num_vectors + vector);
    }
    float4 sum = {};
#pragma unroll
    for (int index = 0; index < kMostTokenRows; ++index) {
      if (index >= count) continue;
      const float weight = s_list.weights[index];
      sum = {__fmaf_rn(weight, r_values[index].x, sum.x), __fmaf_rn(weight, r_values[index].y, sum.y),
             __fmaf_rn(weight, r_values[index].z, sum.z), __fmaf_rn(weight, r_values[index].w, sum.w)};
    }
    g_out[vector] = sum;
  }
}

}

void launch_quantise_rows(const QuantiseRowsCall& call, cudaStream_t stream) {
  constexpr int64_t kBlockRows = kQuantiseThreads / 32;
  const auto blocks = static_cast<unsigned>((call.max_rows + kBlockRows - 1) / kBlockRows);
  launch_dependent(quantise_rows_kernel, {blocks, kQuantiseThreads, 0}, stream, call);
}

void launch_sum_rows(const SumRowsCall& call, cudaStream_t stream) {
  launch_dependent(sum_rows_kernel, {static_cast<unsigned>(call.num_tokens), kSumThreads, 0}, stream, call);
}

}
