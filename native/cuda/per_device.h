#pragma once

#include <array>
#include <mutex>

#include "cuda/check.h"

namespace glint::cuda {

class PerDevice {
 public:
  template <typename Find>
  int get(Find find) {
    int device = 0;
    GLINT_CHECK_CUDA(cudaGetDevice(&device));
    require(device < kMaxDevices, GLINT_STATUS_UNSUPPORTED, "device ", device, " is one of more than ", kMaxDevices,
            " GPUs: make fewer visible with CUDA_VISIBLE_DEVICES");
    const auto index = static_cast<size_t>(device);
    std::call_once(is_found_[index], [&] { values_[index] = find(); });
    return values_[index];
  }

 private:
  static constexpr int kMaxDevices = 64;

  std::array<std::once_flag, kMaxDevices> is_found_;
  std::array<int, kMaxDevices> values_{};
};

}
