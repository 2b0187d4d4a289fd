#pragma once

#include <cstdint>
#include <string>

#include "cuda/device_choice.h"
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/memory/device_memory.h"
#include "include/glint.h"

namespace glint::cuda {

struct DeviceProperties {
  std::string name;
  int32_t index;
  int32_t kernels;
  int32_t num_multiprocessors;
  uint64_t memory_total;
  uint64_t memory_free;
  GpuProperties gpu;
  KernelChoice choice;
  bool is_shared = false;

  Multiply multiply() const { return kernels == GLINT_KERNELS_HOPPER ? Multiply::kWgmma : Multiply::kMmaSync; }
};

DeviceProperties find_device(const glint_engine_options& options, int32_t rank);
DeviceProperties fullest_device(const glint_engine_options& options);
void describe_device(int32_t index, int32_t kernels, glint_device& device);
double measure_read(const DeviceMemory& memory, cudaStream_t stream);

}
