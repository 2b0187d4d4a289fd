#include "cuda/device.h"

#include <cstdlib>

#include "cuda/check.h"

namespace glint::cuda {

namespace {

constexpr int32_t kHopperMajor = 9;
constexpr size_t kNeededSharedBytes = kSharedLimitBytes;

int32_t choose_kernels(int32_t requested, int32_t compute_major) {
  const bool is_hopper = compute_major == kHopperMajor;
  if (requested == GLINT_KERNELS_AUTO) return is_hopper ? GLINT_KERNELS_HOPPER : GLINT_KERNELS_PORTABLE;
  require(requested == GLINT_KERNELS_PORTABLE || (requested == GLINT_KERNELS_HOPPER && is_hopper),
          GLINT_STATUS_UNSUPPORTED, "options.kernels is ", requested,
          ", which this GPU cannot run: CUDA has the kernels portable, and hopper on compute capability 9");
  return requested;
}

}

DeviceProperties find_device(const glint_engine_options& options, int32_t rank) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  require(error == cudaSuccess && count > 0, GLINT_STATUS_UNSUPPORTED,
          "no NVIDIA GPU can be used: ", error == cudaSuccess ? "none is visible" : cudaGetErrorString(error),
          "; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU library");
  cudaDeviceProp properties{};
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  require(options.num_ranks <= count || options.shares_devices != 0, GLINT_STATUS_UNSUPPORTED, "options.num_ranks is ",
          options.num_ranks, " and ", count,
          " GPUs are visible: lower options.num_ranks, or check CUDA_VISIBLE_DEVICES");
  const int device = rank % count;
  GLINT_CHECK_CUDA(cudaSetDevice(device));
  GLINT_CHECK_CUDA(cudaGetDeviceProperties(&properties, device));
  require(properties.major >= kHopperMajor && properties.sharedMemPerBlockOptin >= kNeededSharedBytes,
          GLINT_STATUS_UNSUPPORTED, properties.name, " has compute capability ", properties.major, ".",
          properties.minor, " and ", properties.sharedMemPerBlockOptin,
          " bytes of shared memory for a thread block; the kernels need 9.0 (Hopper) or newer and ",
          kNeededSharedBytes);
  GLINT_CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {.name = properties.name,
          .index = device,
          .kernels =
              choose_kernels(options.shares_devices != 0 ? GLINT_KERNELS_PORTABLE : options.kernels, properties.major),
          .is_shared = options.shares_devices != 0,
          .num_multiprocessors = properties.multiProcessorCount,
          .memory_total = total_bytes,
          .memory_free = free_bytes};
}

DeviceProperties fullest_device(const glint_engine_options& options) {
  DeviceProperties fullest = find_device(options, 0);
  for (int32_t rank = 1; rank < options.num_ranks; ++rank) {
    const DeviceProperties properties = find_device(options, rank);
    if (properties.memory_free < fullest.memory_free) fullest = properties;
  }
  GLINT_CHECK_CUDA(cudaSetDevice(0));
  return fullest;
}

}
