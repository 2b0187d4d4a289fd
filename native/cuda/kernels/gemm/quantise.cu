#include "cuda/kernels/gemm/quantise.h"

#include <type_traits>

#include "cuda/kernels/gemm/quantise.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

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

void launch_swiglu(const SwigluCall& call, cudaStream_t stream) {
  choose_vectors(call, [&](auto vectors) {
    launch_dependent(swiglu_kernel<decltype(vectors)::value>, {slice_grid(call), kRowThreads, 0}, stream, call);
  });
}

}
