#pragma once

#include <cstdint>

namespace glint::cuda {

inline constexpr int64_t kLateRows = 4;

__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void wait_and_let_next_kernel_start(int64_t num_rows) {
  if (num_rows > kLateRows) let_next_kernel_start();
  wait_for_previous_kernel();
  if (num_rows <= kLateRows) let_next_kernel_start();
}

}
