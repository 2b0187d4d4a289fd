#include "cuda/check.h"
#include "cuda/kernels/gemm/gemm.h"

namespace glint::cuda {

namespace {

constexpr int kPackThreads = 256;
constexpr int kChunkBytes = 16;
constexpr int kHalfBytes = kChunkBytes / 2;

struct ChunkPlace {
  int64_t matrix;
  int64_t row_tile;
  int32_t tile_row;
  int64_t k_offset;
};

__device__ ChunkPlace place_of_chunk(int64_t index, int64_t row_tiles, int64_t k_steps) {
  const int32_t row = static_cast<int32_t>(index % 64);
  const int32_t k_half = static_cast<int32_t>(index / 64 % 2);
  const int32_t k_quarter = static_cast<int32_t>(index / 128 % 4);
  const int32_t warpgroup = static_cast<int32_t>(index / 512 % 2);
  const int64_t tile_step = index / 1024;
  const int64_t k_step = tile_step % k_steps;
  return {tile_step / k_steps / row_tiles, tile_step / k_steps % row_tiles, warpgroup * 64 + row,
          k_step * kGemmTileK + k_quarter * 32 + k_half * kChunkBytes};
}

struct SourceRow {
  const uint8_t* matrix;
  int64_t row;
};

struct PlainRows {
  __device__ SourceRow find(const PackCall& call, const ChunkPlace& place) const {
    return {call.weights, place.row_tile * kGemmTileRows + place.tile_row};
  }
};

struct GateUpRows {
  __device__ SourceRow find(const PackCall& call, const ChunkPlace& place) const {
    const int32_t fragment_row = place.tile_row % 16;
    const int64_t row = place.row_tile * (kGemmTileRows / 2) + place.tile_row / 16 * 8 + fragment_row % 8;
    return {fragment_row < 8 ? call.weights : call.up_weights, row};
  }
};

__device__ uint2 load_half(const uint8_t* g_row, int64_t offset, int64_t k_bytes) {
  if (offset >= k_bytes) return {};
  return *reinterpret_cast<const uint2*>(g_row + offset);
}

template <class Rows>
__global__ void pack_weight_kernel(const PackCall call, Rows rows, int64_t row_tiles, int64_t num_chunks) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= num_chunks) return;
  const ChunkPlace place = place_of_chunk(index, row_tiles, padded_k_bytes(call.k_bytes) / kGemmTileK);
  const SourceRow source = rows.find(call, place);
  uint4 chunk = {0, 0, 0, 0};
  if (source.row < call.rows) {
    const uint8_t* g_row = source.matrix + (place.matrix * call.rows + source.row) * call.k_bytes;
    const uint2 low = load_half(g_row, place.k_offset, call.k_bytes);
    const uint2 high = load_half(g_row, place.k_offset + kHalfBytes, call.k_bytes);
    chunk = {low.x, low.y, high.x, high.y};
  }
  reinterpret_cast<uint4*>(call.packed)[index] = chunk;
}

template <class Rows>
void launch_pack(const PackCall& call, Rows rows, int64_t row_tiles, cudaStream_t stream) {
  require_argument(call.k_bytes % kHalfBytes == 0, "weight rows of ", call.k_bytes,
                   " bytes cannot be packed; give a multiple of ", kHalfBytes);
  const int64_t num_chunks =
      call.num_matrices * row_tiles * (padded_k_bytes(call.k_bytes) / kGemmTileK) * (kGemmTileBytes / kChunkBytes);
  const auto blocks = static_cast<unsigned>((num_chunks + kPackThreads - 1) / kPackThreads);
  pack_weight_kernel<<<blocks, kPackThreads, 0, stream>>>(call, rows, row_tiles, num_chunks);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

int64_t tiles_of(int64_t rows, int64_t tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

}

int64_t packed_weight_bytes(int64_t rows, int64_t k_bytes) {
  return tiles_of(rows, kGemmTileRows) * kGemmTileRows * padded_k_bytes(k_bytes);
}

int64_t packed_gate_up_bytes(int64_t width, int64_t k_bytes) {
  return tiles_of(width, kGemmTileRows / 2) * kGemmTileRows * padded_k_bytes(k_bytes);
}

void launch_pack_rows(const PackCall& call, cudaStream_t stream) {
  launch_pack(call, PlainRows{}, tiles_of(call.rows, kGemmTileRows), stream);
}

void launch_pack_gate_up(const PackCall& call, cudaStream_t stream) {
  launch_pack(call, GateUpRows{}, tiles_of(call.rows, kGemmTileRows / 2), stream);
}

}
