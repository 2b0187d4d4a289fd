#include "cuda/kernels/moe/experts.h"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

constexpr int kCombineThreads = 256;
constexpr int kPlaceThreads = 128;
constexpr int kMaxChoices = 32;

__global__ void __launch_bounds__(kPlaceThreads) place_rows_kernel(const PlaceRowsCall call) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (static_cast<int>(blockIdx.x) >= *call.num_tiles) return;
  const TokenTile tile = call.tiles[blockIdx.x];
  const int expert = call.expert_first + tile.expert;
  for (int index = threadIdx.x; index < tile.row_count; index += kPlaceThreads) {
    const int row = tile.row_first + index;
    const int64_t token = call.row_tokens[row];
    int choice = call.experts_per_token;
    for (int other = 0; expert < call.expert_last && other < call.experts_per_token; ++other) {
      if (call.experts[token * call.experts_per_token + other] == expert) choice = other;
    }
    call.token_rows[token * (call.experts_per_token + 1) + choice] = row;
  }
}

__device__ __forceinline__ int find_own_row(const CombineRowsCall& call, int64_t token, int choice) {
  if (choice > call.experts_per_token) return -1;
  if (choice == call.experts_per_token) {
    return call.has_shared != 0 ? call.token_rows[token * (call.experts_per_token + 1) + choice] : -1;
  }
  const int expert = call.experts[token * call.experts_per_token + choice];
  if (expert < call.expert_first || expert >= call.expert_last) return -1;
  return call.token_rows[token * (call.experts_per_token + 1) + choice];
}

__device__ __forceinline__ int list_rows_ascending(const CombineRowsCall& call, int64_t token, int32_t* s_rows,
                                                   float* s_weights) {
  __shared__ int s_count;
  if (threadIdx.x < kMaxChoices) {
    const int row = find_own_row(call, token, static_cast<int>(threadIdx.x));
    int place = 0;
    for (int lane = 0; lane < kMaxChoices; ++lane) {
      const int other = __shfl_sync(~0U, row, lane);
      if (other >= 0 && other < row) ++place;
    }
    const unsigned present = __ballot_sync(~0U, row >= 0);
    if (row >= 0) s_rows[place] = row;
    if (row >= 0) s_weights[place] = call.row_weights[row];
    if (threadIdx.x == 0) s_count = __popc(present);
  }
  __syncthreads();
  return s_count;
}

__global__ void __launch_bounds__(kCombineThreads) combine_rows_kernel(const CombineRowsCall call) {
  __shared__ int32_t s_rows[kMaxChoices];
  __shared__ float s_weights[kMaxChoices];
  const int64_t token = blockIdx.x;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (call.num_real_tokens != nullptr && token >= *call.num_real_tokens) return;
  const int count = list_rows_ascending(call, token, s_rows, s_weights);
  for (int64_t dim = int64_t{blockIdx.y} * kCombineThreads + threadIdx.x; dim < call.hidden_size;
       dim += int64_t{gridDim.y} * kCombineThreads) {
    double sum = 0.0;
#pragma unroll 4
    for (int index = 0; index < count; ++index) {
      const double value = call.routed[s_rows[index] * call.hidden_size + dim];
      sum = fma(static_cast<double>(s_weights[index]), value, sum);
    }
    if (call.shared != nullptr) sum += static_cast<double>(call.shared[token * call.hidden_size + dim]);
    call.out[token * call.hidden_size + dim] = static_cast<float>(sum);
  }
}

}

int64_t token_rows_count(int64_t num_tokens, int32_t experts_per_token) {
  return num_tokens * (int64_t{experts_per_token} + 1);
}

void launch_place_rows(const PlaceRowsCall& call, cudaStream_t stream) {
  if (call.max_tiles == 0) return;
  launch_dependent(place_rows_kernel, {static_cast<unsigned>(call.max_tiles), kPlaceThreads, 0}, stream, call);
}

void launch_combine_rows(const CombineRowsCall& call, cudaStream_t stream) {
  constexpr int64_t kFewTokens = 128;
  require_argument(call.experts_per_token < kMaxChoices, "a token has ", call.experts_per_token, " experts; at most ",
                   kMaxChoices - 1, " are combined");
  if (call.num_tokens == 0) return;
  const int64_t parts = call.num_tokens > kFewTokens ? 1 : (call.hidden_size + kCombineThreads - 1) / kCombineThreads;
  const dim3 grid(static_cast<unsigned>(call.num_tokens), static_cast<unsigned>(parts));
  launch_dependent(combine_rows_kernel, {grid, kCombineThreads, 0}, stream, call);
}

}
