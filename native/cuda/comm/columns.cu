#include <algorithm>

#include "base/contract.h"
#include "cuda/comm/columns.h"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

constexpr unsigned kThreads = 256;

__global__ void __launch_bounds__(kThreads) concat_columns_kernel(const ConcatColumnsCall call) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t part = blockIdx.z;
  const int64_t row = blockIdx.y;
  const float* in = call.in + (part * call.rows + row) * call.cols;
  float* out = call.out + (row * call.num_parts + part) * call.cols;
  for (int64_t col = blockIdx.x * kThreads + threadIdx.x; col < call.cols; col += int64_t{gridDim.x} * kThreads) {
    out[col] = in[col];
  }
}

__device__ __forceinline__ void repeat_words(void* rows, int64_t words, int32_t num_ranks) {
  auto* g_words = static_cast<uint32_t*>(rows);
  for (int64_t word = int64_t{blockIdx.x} * kThreads + threadIdx.x; word < words;
       word += int64_t{gridDim.x} * kThreads) {
    const uint32_t value = g_words[word];
    for (int32_t rank = 1; rank < num_ranks; ++rank) g_words[rank * words + word] = value;
  }
}

__global__ void __launch_bounds__(kThreads)
    repeat_rows_kernel(const GatheredRows rows, int64_t rows_per_rank, int32_t num_ranks) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  constexpr int64_t kWordBytes = sizeof(uint32_t);
  repeat_words(rows.first, rows_per_rank * rows.row_bytes / kWordBytes, num_ranks);
  if (rows.second == nullptr) return;
  repeat_words(rows.second, rows_per_rank * rows.second_row_bytes / kWordBytes, num_ranks);
}

}

void launch_repeat_rows(const GatheredRows& rows, int64_t rows_per_rank, int32_t num_ranks, cudaStream_t stream) {
  constexpr unsigned kBlocks = 264;
  launch_dependent(repeat_rows_kernel, {kBlocks, kThreads, 0}, stream, rows, rows_per_rank, num_ranks);
}

void launch_concat_columns(const ConcatColumnsCall& call, cudaStream_t stream) {
  constexpr int64_t kColumnsPerThread = 4;
  constexpr int64_t kMostRows = 65535;
  require_argument(call.rows <= kMostRows, "logits of ", call.rows, " rows are joined; at most ", kMostRows);
  if (call.rows == 0) return;
  const int64_t wide = (call.cols + kThreads * kColumnsPerThread - 1) / (kThreads * kColumnsPerThread);
  launch_dependent(
      concat_columns_kernel,
      {dim3(static_cast<unsigned>(wide), static_cast<unsigned>(call.rows), static_cast<unsigned>(call.num_parts)),
       kThreads, 0},
      stream, call);
}

}
