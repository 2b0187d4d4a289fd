#pragma once

#include <cstdint>

namespace glint::cuda::ptx {

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}

namespace glint::cuda {

inline constexpr int64_t kLateRows = 4;

__device__ __forceinline__ void wait_and_launch_dependents(int64_t num_rows) {
  if (num_rows > kLateRows) ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (num_rows <= kLateRows) ptx::griddepcontrol_launch_dependents();
}

}
