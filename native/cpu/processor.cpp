#include "cpu/processor.h"

#if defined(GLINT_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "include/glint.h"

namespace glint {

#if defined(GLINT_X86)

namespace {

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_tile_instructions() {
  constexpr uint32_t kOsSavesState = 1U << 27U;
  constexpr uint32_t kAmxBf16 = 1U << 22U;
  constexpr uint32_t kAmxTile = 1U << 24U;
  constexpr uint32_t kTileState = 3U << 17U;
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsSavesState) == 0) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (eax & kTileState) == kTileState;
}

bool ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return has_avx512() && has_tile_instructions() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}

bool processor_runs(int32_t kernels) {
  switch (kernels) {
    case GLINT_KERNELS_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case GLINT_KERNELS_AVX512:
      return has_avx512();
    case GLINT_KERNELS_AMX: {
      static const bool has_tiles = ask_for_tiles();
      return has_tiles;
    }
    default:
      return true;
  }
}

#else

bool processor_runs(int32_t) { return true; }

#endif

}
