#pragma once

#include <cuda_runtime_api.h>

#include "cuda/memory/device_memory.h"

namespace glint::cuda {

double measure_read(const DeviceMemory& memory, cudaStream_t stream);

}
