#include "cuda/check.h"
#include "cuda/kernels/moe/experts.h"

namespace glint::cuda {

namespace {

constexpr int kPackThreads = 256;

__global__ void pack_down_kernel(const PackCall call, const DownTilePlan plan, int64_t num_chunks) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= num_chunks) return;
  const int64_t columns = plan.k / 16;
  const int64_t num_steps = plan.packed_width(call.k_bytes) / plan.k;
  const int64_t tile_row = index % plan.rows;
  const int64_t column = index / plan.rows % columns;
  const int64_t tile = index / (plan.rows * columns);
  const int64_t row = tile / num_steps * plan.rows + tile_row;
  const int64_t first = tile % num_steps * plan.k + column * 16;
  uint4 chunk = {};
  if (first < call.k_bytes) chunk = *reinterpret_cast<const uint4*>(call.weights + row * call.k_bytes + first);
  reinterpret_cast<uint4*>(call.packed)[index] = chunk;
}

}

void require_down_shape(int64_t hidden_size, int64_t width) {
  const DownTilePlan plan = plan_down_tile(width);
  require_argument(is_down_shape(hidden_size, width), "a down GEMM of ", hidden_size, " rows and width ", width,
                   " is not made of tiles of ", plan.rows, " by ", plan.k,
                   "; its width is a multiple of 16 and at most ", kQuantisedWidthLimit);
}

int64_t packed_down_bytes(int64_t hidden_size, int64_t width) {
  require_down_shape(hidden_size, width);
  return hidden_size * plan_down_tile(width).packed_width(width);
}

void launch_pack_down(const PackCall& call, cudaStream_t stream) {
  const int64_t num_chunks = call.num_matrices * packed_down_bytes(call.rows, call.k_bytes) / 16;
  const auto blocks = static_cast<unsigned>((num_chunks + kPackThreads - 1) / kPackThreads);
  pack_down_kernel<<<blocks, kPackThreads, 0, stream>>>(call, plan_down_tile(call.k_bytes), num_chunks);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

}
