#pragma once

#include <utility>

#include "cuda/check.h"

namespace glint::cuda {

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  GLINT_CHECK_CUDA(cudaGetDevice(&device));
  GLINT_CHECK_CUDA(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

inline int device_multiprocessors() {
  static const int count = [] {
    int value = 0;
    GLINT_CHECK_CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    return value;
  }();
  return count;
}

struct LaunchShape {
  dim3 grid;
  dim3 threads;
  int shared_bytes;
  unsigned cluster = 1;
};

struct LaunchConfig {
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config = {};

  LaunchConfig(const LaunchShape& shape, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    attributes[2].id = cudaLaunchAttributeClusterDimension;
    attributes[2].val.clusterDim = {shape.cluster, 1, 1};
    config.gridDim = shape.grid;
    config.blockDim = shape.threads;
    config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = shape.cluster > 1 ? 3 : 2;
  }
};

template <typename... Wanted, typename... Given>
void launch_dependent(void (*kernel)(Wanted...), const LaunchShape& shape, cudaStream_t stream, Given&&... arguments) {
  const LaunchConfig launch(shape, stream);
  GLINT_CHECK_CUDA(cudaLaunchKernelEx(&launch.config, kernel, std::forward<Given>(arguments)...));
}

template <typename Storage, typename Kernel, typename Call>
void start_persistent(Kernel kernel, const Call& call, dim3 threads, cudaStream_t stream) {
  constexpr int kStorageAlignment = 1024;
  constexpr auto kSharedBytes = static_cast<int>(sizeof(Storage)) + kStorageAlignment;
  static_assert(kSharedBytes <= kSharedLimitBytes, "the shared storage is larger than one thread block may have");
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const auto thread_blocks = static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount));
  launch_dependent(kernel, {thread_blocks, threads, kSharedBytes}, stream, call);
}

}
