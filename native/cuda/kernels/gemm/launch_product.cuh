#pragma once

#include "cuda/check.h"
#include "cuda/kernels/gemm/tile_product.cuh"
#include "cuda/per_device.h"

namespace glint::cuda {

inline int device_multiprocessors() {
  static const int count = [] {
    int value = 0;
    GLINT_CHECK_CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    return value;
  }();
  return count;
}

struct LaunchAttributes {
  cudaLaunchAttribute values[3];
  cudaLaunchConfig_t config;

  LaunchAttributes(unsigned threads, size_t shared_bytes, unsigned cluster, cudaStream_t stream) : values{}, config{} {
    values[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    values[0].val.programmaticStreamSerializationAllowed = 1;
    values[1].id = cudaLaunchAttributeClusterDimension;
    values[1].val.clusterDim.x = cluster;
    values[1].val.clusterDim.y = 1;
    values[1].val.clusterDim.z = 1;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = values;
    const unsigned last = cluster > 1 ? 2 : 1;
    values[last].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    values[last].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    config.numAttrs = last + 1;
  }
};

template <class Shape, class Walk, class Finish>
int max_product_clusters() {
  static PerDevice count;
  return count.get([] {
    const auto kernel = tile_product_kernel<Shape, Walk, Finish>;
    constexpr int kBytes = sizeof(SharedPlan<Shape>);
    static_assert(kBytes <= kSharedLimitBytes, "the shared plan is larger than one thread block may have");
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    LaunchAttributes launch(kProductThreads, kBytes, kSpreadPieces, nullptr);
    launch.config.gridDim = dim3(kSpreadPieces);
    int clusters = 0;
    GLINT_CHECK_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config));
    return clusters;
  });
}

template <class Shape, class Walk, class Finish>
void launch_tile_product(const ProductInputs& inputs, const Walk& walk, const Finish& finish, int64_t max_tiles,
                         cudaStream_t stream) {
  const int64_t most = max_product_clusters<Shape, Walk, Finish>();
  const auto clusters = static_cast<unsigned>(max_tiles < most ? max_tiles : most);
  LaunchAttributes launch(kProductThreads, sizeof(SharedPlan<Shape>), kSpreadPieces, stream);
  launch.config.gridDim = dim3(clusters * kSpreadPieces);
  GLINT_CHECK_CUDA(
      cudaLaunchKernelEx(&launch.config, tile_product_kernel<Shape, Walk, Finish>, inputs, walk, finish));
}

}
