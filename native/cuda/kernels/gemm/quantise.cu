#include "cuda/kernels/gemm/quantise.h"

#include <type_traits>

#include "cuda/kernels/norm/row_tile.cuh"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

__device__ __forceinline__ float swiglu(float gate, float up) { return __fdiv_rn(gate, 1.0F + expf(-gate)) * up; }

template <int kVectors>
__device__ __forceinline__ void quantise_slice(const RowTile<kVectors>& tile, uint8_t* g_fp8, float* g_scale,
                                               int64_t width, int64_t stride) {
  __shared__ float s_magnitudes[kRowThreads / kWarpLanes];
  const float highest = reduce_thread_block<kRowThreads>(tile.highest_magnitude(), s_magnitudes, MaxOf());
  const float scale = fp8_scale(highest);
  if (threadIdx.x == 0) *g_scale = scale;
  tile.store_fp8(g_fp8, width, stride, scale, stride % kVectorFloats == 0);
}

template <int kVectors>
__global__ void __launch_bounds__(kRowThreads) quantise_kernel(const QuantiseCall call) {
  const int64_t row = blockIdx.x;
  const int64_t slice = blockIdx.y;
  const int64_t width = call.width / call.row_slices;
  const int64_t start = row * call.in_stride + slice * width;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  RowTile<kVectors> tile;
  tile.load(call.in + start, width, width % kVectorFloats == 0 && call.in_stride % kVectorFloats == 0);
  quantise_slice(tile, call.fp8 + (row * call.row_slices + slice) * call.slice_stride,
                 call.scales + slice * call.count + row, width, call.slice_stride);
}

constexpr int kPartVectors = 2;
constexpr int64_t kMaxPartWidth = kPartVectors * kRowThreads * kVectorFloats;

__device__ __forceinline__ float highest_of_parts(const float* g_magnitudes, int num_parts) {
  float highest = 0.0F;
  for (int part = static_cast<int>(threadIdx.x) % kWarpLanes; part < num_parts; part += kWarpLanes) {
    highest = fmaxf(highest, g_magnitudes[part]);
  }
  return reduce_warp(highest, MaxOf());
}

__global__ void __launch_bounds__(kRowThreads) quantise_parts_kernel(const QuantisePartsCall call) {
  const int64_t row = blockIdx.x;
  const int64_t first = blockIdx.y * call.part_width;
  const bool is_last = blockIdx.y + 1 == gridDim.y;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  RowTile<kPartVectors> tile;
  tile.load(call.in + row * call.num_parts * call.part_width + first, call.part_width, true);
  const float scale = fp8_scale(highest_of_parts(call.magnitudes + row * call.num_parts, call.num_parts));
  if (blockIdx.y == 0 && threadIdx.x == 0) call.scales[row] = scale;
  tile.store_fp8(call.fp8 + row * call.fp8_stride + first, call.part_width,
                 is_last ? call.fp8_stride - first : call.part_width, scale, true);
}

template <int kVectors>
__global__ void __launch_bounds__(kRowThreads) swiglu_kernel(const SwigluCall call) {
  const int64_t row = blockIdx.x;
  const int64_t slice = blockIdx.y;
  const int64_t width = call.width / call.row_slices;
  const int64_t start = row * call.in_stride + slice * width;
  const bool is_aligned = width % kVectorFloats == 0 && call.in_stride % kVectorFloats == 0;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  RowTile<kVectors> tile;
  RowTile<kVectors> up;
  tile.load(call.gate + start, width, is_aligned);
  up.load(call.up + start, width, is_aligned);
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
    for (int element = 0; element < kVectorFloats; ++element) {
      tile.values[vector][element] = swiglu(tile.values[vector][element], up.values[vector][element]);
    }
  }
  if (call.out != nullptr) tile.store(call.out + row * call.width + slice * width, width, is_aligned);
  if (call.fp8 == nullptr) return;
  quantise_slice(tile, call.fp8 + (row * call.row_slices + slice) * call.slice_stride,
                 call.scales + slice * call.count + row, width, call.slice_stride);
}

template <typename Call>
dim3 slice_grid(const Call& call) {
  return {static_cast<unsigned>(call.count), static_cast<unsigned>(call.row_slices), 1};
}

template <typename Call, typename Start>
void choose_vectors(const Call& call, Start start) {
  constexpr int64_t kTileFloats = kRowThreads * kVectorFloats;
  if (call.count == 0) return;
  require_argument(call.width % call.row_slices == 0, "a row of ", call.width, " cannot be cut in ", call.row_slices,
                   " slices; choose row slices that divide it");
  const int64_t width = call.width / call.row_slices;
  require_argument(width <= 12 * kTileFloats, "a slice is ", width, " wide; at most ", 12 * kTileFloats);
  if (width <= kTileFloats) {
    start(std::integral_constant<int, 1>());
  } else if (width <= 2 * kTileFloats) {
    start(std::integral_constant<int, 2>());
  } else if (width <= 5 * kTileFloats) {
    start(std::integral_constant<int, 5>());
  } else {
    start(std::integral_constant<int, 12>());
  }
}

}

void launch_quantise(const QuantiseCall& call, cudaStream_t stream) {
  choose_vectors(call, [&](auto vectors) {
    launch_dependent(quantise_kernel<decltype(vectors)::value>, {slice_grid(call), kRowThreads, 0}, stream, call);
  });
}

void launch_quantise_parts(const QuantisePartsCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  require_argument(call.part_width % kVectorFloats == 0 && call.part_width <= kMaxPartWidth &&
                       call.fp8_stride % kVectorFloats == 0 && call.fp8_stride >= call.num_parts * call.part_width,
                   "rows of ", call.num_parts, " parts of ", call.part_width, " are ", call.fp8_stride,
                   " bytes apart; a part has a multiple of ", kVectorFloats, ", at most ", kMaxPartWidth,
                   ", and rows lie such a multiple apart that holds all parts");
  const dim3 grid(static_cast<unsigned>(call.count), static_cast<unsigned>(call.num_parts), 1);
  launch_dependent(quantise_parts_kernel, {grid, kRowThreads, 0}, stream, call);
}

void launch_swiglu(const SwigluCall& call, cudaStream_t stream) {
  choose_vectors(call, [&](auto vectors) {
    launch_dependent(swiglu_kernel<decltype(vectors)::value>, {slice_grid(call), kRowThreads, 0}, stream, call);
  });
}

}
