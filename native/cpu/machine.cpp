#include "cpu/machine.h"

#include <sys/utsname.h>
#include <unistd.h>
#if defined(GLINT_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#else
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <fstream>
#include <optional>

#include "include/glint.h"

#if defined(GLINT_ARM64) && !defined(HWCAP2_BF16)
#define HWCAP2_BF16 (1 << 14)
#endif

namespace glint::cpu {

namespace {

std::optional<std::string> line_after(const char* path, const std::string& label) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(label) || colon == std::string::npos) continue;
    const size_t first = line.find_first_not_of(" \t", colon + 1);
    return first == std::string::npos ? std::string() : line.substr(first);
  }
  return std::nullopt;
}

uint64_t memory_of(int page_count_name) {
  return static_cast<uint64_t>(sysconf(page_count_name)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}

std::string processor_name() {
  const std::optional<std::string> name = line_after("/proc/cpuinfo", "model name");
  if (name.has_value() && !name->empty()) return *name;
  utsname kind{};
  return uname(&kind) == 0 ? std::string(kind.machine) + " processor" : "processor";
}

uint64_t machine_memory() { return memory_of(_SC_PHYS_PAGES); }

uint64_t available_memory() {
  constexpr uint64_t kKibibyte = 1024;
  const std::optional<std::string> kibibytes = line_after("/proc/meminfo", "MemAvailable");
  return kibibytes.has_value() ? std::stoull(*kibibytes) * kKibibyte : memory_of(_SC_AVPHYS_PAGES);
}

}

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
  constexpr uint32_t kGfni = 1U << 8U;
  constexpr uint32_t kTileState = 3U << 17U;
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsSavesState) == 0) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((ecx & kGfni) == 0 || (edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (eax & kTileState) == kTileState;
}

bool ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return has_avx512() && has_tile_instructions() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}

bool prefers_bf16_dots() { return !__builtin_cpu_is("intel"); }

bool processor_runs(int32_t kernels) {
  switch (kernels) {
    case GLINT_KERNELS_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case GLINT_KERNELS_AVX512:
      return has_avx512();
    case GLINT_KERNELS_AVX512_BF16:
      return has_avx512() && __builtin_cpu_supports("avx512bf16");
    case GLINT_KERNELS_AMX: {
      static const bool has_tiles = ask_for_tiles();
      return has_tiles;
    }
    default:
      return true;
  }
}

#else

bool processor_runs(int32_t kernels) {
  return kernels != GLINT_KERNELS_NEON_BF16 || (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
}

#endif

}
