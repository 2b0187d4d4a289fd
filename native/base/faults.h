#pragma once

#include <atomic>
#include <cstdint>

namespace glint {

enum class FaultPoint : int32_t { kLoad, kStep, kCollective, kCapture };

using FaultHook = void (*)(FaultPoint place, int32_t rank);

inline std::atomic<FaultHook> fault_hook = nullptr;

inline void pass_fault_point(FaultPoint place, int32_t rank) {
  const FaultHook hook = fault_hook.load(std::memory_order_relaxed);
  if (hook != nullptr) hook(place, rank);
}

}
