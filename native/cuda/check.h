#pragma once

#include <cuda_runtime_api.h>

#include "base/contract.h"

namespace glint::cuda {

inline constexpr int kSharedLimitBytes = 227 * 1024;

inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) cudaGetLastError();
  require(error == cudaSuccess, GLINT_STATUS_INTERNAL, call, " failed: ", cudaGetErrorString(error));
}

}

#define GLINT_CHECK_CUDA(call) ::glint::cuda::check((call), #call)
