#include "cuda/device.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>

#include "cuda/check.h"
#include "cuda/comm/nccl.h"

namespace glint::cuda {

namespace {

constexpr const char* kDriverVersionFile = "/sys/module/nvidia/version";

Driver find_driver() {
  Driver driver{};
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess) driver.cuda_version = version;
  GLINT_CHECK_CUDA(cudaRuntimeGetVersion(&version));
  driver.needed_version = version;
  std::ifstream(kDriverVersionFile) >> driver.package_version;
  return driver;
}

int count_devices() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  const char* reason = error == cudaSuccess ? "none is visible" : cudaGetErrorString(error);
  if (error == cudaErrorInsufficientDriver) {
    const Driver driver = find_driver();
    if (driver.cuda_version > 0) require_driver(driver);
    reason = "no NVIDIA driver is installed";
  }
  require(error == cudaSuccess && count > 0, GLINT_STATUS_UNSUPPORTED, "no NVIDIA GPU can be used: ", reason,
          "; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU library");
  return count;
}

DeviceProperties select_device(int32_t requested_kernels, int device) {
  cudaDeviceProp properties{};
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  GLINT_CHECK_CUDA(cudaGetDeviceProperties(&properties, device));
  const GpuProperties gpu = {.name = properties.name,
                        .compute_major = properties.major,
                        .compute_minor = properties.minor,
                        .shared_bytes = properties.sharedMemPerBlockOptin,
                        .compiles_ptx = compiles_ptx()};
  require_gpu(gpu, kSharedLimitBytes);
  const KernelChoice choice = choose_kernels(requested_kernels, gpu);
  GLINT_CHECK_CUDA(cudaSetDevice(device));
  GLINT_CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {.name = gpu.name,
          .index = device,
          .kernels = choice.kernels,
          .num_multiprocessors = properties.multiProcessorCount,
          .memory_total = total_bytes,
          .memory_free = free_bytes,
          .gpu = gpu,
          .choice = choice};
}

std::string describe_nccl() {
  try {
    const std::shared_ptr<const Nccl> nccl = Nccl::load("");
    return text(nccl->version_text(), " (", nccl->path(), ")");
  } catch (const Failure& failure) {
    return failure.what();
  }
}

template <size_t kBytes>
void write_text(char (&out)[kBytes], const std::string& words) {
  *std::copy_n(words.begin(), std::min(words.size(), kBytes - 1), out) = '\0';
}

}

DeviceProperties find_device(const glint_engine_options& options, int32_t rank) {
  const int count = count_devices();
  require(options.num_ranks <= count || options.shares_devices != 0, GLINT_STATUS_UNSUPPORTED, "options.num_ranks is ",
          options.num_ranks, " and ", count,
          " GPUs are visible: lower options.num_ranks, or check CUDA_VISIBLE_DEVICES");
  DeviceProperties device =
      select_device(options.shares_devices != 0 ? GLINT_KERNELS_PORTABLE : options.kernels, rank % count);
  device.is_shared = options.shares_devices != 0;
  return device;
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

void describe_device(int32_t index, int32_t kernels, glint_device& device) {
  prepare_nccl_environment(false);
  const int count = count_devices();
  require_argument(index >= 0 && index < count, "the device index is ", index, ", and ", count, " GPUs are visible");
  const DeviceProperties properties = select_device(kernels, index);
  const Driver driver = find_driver();
  device.num_devices = count;
  device.compute_major = properties.gpu.compute_major;
  device.compute_minor = properties.gpu.compute_minor;
  device.driver_version = driver.cuda_version;
  device.runtime_version = driver.needed_version;
  device.kernels = properties.kernels;
  device.num_multiprocessors = properties.num_multiprocessors;
  device.shared_bytes = properties.gpu.shared_bytes;
  device.memory_total = properties.memory_total;
  device.memory_free = properties.memory_free;
  for (int peer = 0; peer < std::min(count, 64); ++peer) {
    int can_access = 0;
    if (peer != index) GLINT_CHECK_CUDA(cudaDeviceCanAccessPeer(&can_access, index, peer));
    if (can_access != 0) device.peers |= uint64_t{1} << peer;
  }
  write_text(device.name, properties.name);
  write_text(device.driver, driver.package_version);
  write_text(device.kernels_reason, properties.choice.reason);
  write_text(device.code, properties.choice.code);
  write_text(device.nccl, describe_nccl());
}

}
