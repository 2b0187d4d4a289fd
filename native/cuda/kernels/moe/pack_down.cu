#include "cuda/check.h"
#include "cuda/kernels/moe/experts.h"

namespace glint::cuda {

namespace {

constexpr int kPackThreads = 256;

__global__ void pack_down_kernel(const PackCall call, int64_t num_owners, int64_t num_chunks) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= num_chunks) return;
  constexpr int kColumns = kDownTileK / 16;
  const int64_t num_steps = call.k_bytes / kDownTileK;
  const int64_t tile_row = index % kDownTileRows;
  const int64_t column = index / kDownTileRows % kColumns;
  const int64_t tile = index / (kDownTileRows * kColumns);
  const int64_t k_step = tile % num_steps;
  const int64_t row = tile / num_steps % num_owners * kDownTileRows + tile_row;
  const int64_t matrix = tile / num_steps / num_owners;
  const int64_t offset = (matrix * call.rows + row) * call.k_bytes + k_step * kDownTileK + column * 16;
  reinterpret_cast<uint4*>(call.packed)[index] = *reinterpret_cast<const uint4*>(call.weights + offset);
}

}

void require_down_shape(int64_t hidden_size, int64_t width) {
  require_argument(hidden_size % kDownTileRows == 0 && width % kDownTileK == 0, "a down GEMM of ", hidden_size,
                   " rows and width ", width, " is not made of tiles of ", kDownTileRows, " by ", kDownTileK);
  require_argument(width <= kQuantisedWidthLimit, "an expert's width is at most ", kQuantisedWidthLimit, ", not ",
                   width);
}

int64_t packed_down_bytes(int64_t hidden_size, int64_t width) {
  require_down_shape(hidden_size, width);
  return hidden_size * width;
}

void launch_pack_down(const PackCall& call, cudaStream_t stream) {
  require_down_shape(call.rows, call.k_bytes);
  const int64_t num_chunks = call.num_matrices * call.rows * call.k_bytes / 16;
  const auto blocks = static_cast<unsigned>((num_chunks + kPackThreads - 1) / kPackThreads);
  pack_down_kernel<<<blocks, kPackThreads, 0, stream>>>(call, call.rows / kDownTileRows, num_chunks);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

}
