#pragma once

#include <cstdint>
#include <functional>

#include "cuda/memory/device_memory.h"

namespace glint::testing {

class Timer {
 public:
  Timer();

  double median_microseconds(const std::function<void()>& launch) const;
  double peak_bytes_per_second() const;

 private:
  cuda::DeviceMemory memory_;
};

void launch_empty();
void launch_flush(const cuda::DeviceMemory& memory);
void poison_shared_memory();

}
