#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/contract.h"
#include "include/glint.h"

namespace glint::cuda {

inline constexpr int32_t kHopperMajor = 9;
inline constexpr int32_t kBlackwellMajor = 10;
inline constexpr const char* kLeastDriver = "580";

struct Driver {
  int32_t cuda_version;
  int32_t needed_version;
  std::string package_version;
};

struct GpuProperties {
  std::string name;
  int32_t compute_major;
  int32_t compute_minor;
  uint64_t shared_bytes;
  bool compiles_ptx;
};

struct KernelChoice {
  int32_t kernels;
  std::string reason;
  std::string code;
};

inline bool compiles_ptx() {
  const char* value = std::getenv("CUDA_FORCE_PTX_JIT");
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

inline std::string cuda_version_text(int32_t version) { return text(version / 1000, ".", version % 1000 / 10); }

inline void require_driver(const Driver& driver) {
  require(driver.cuda_version >= driver.needed_version, GLINT_STATUS_UNSUPPORTED, "the NVIDIA driver",
          driver.package_version.empty() ? "" : " ", driver.package_version, " supports CUDA ",
          cuda_version_text(driver.cuda_version), ", the library needs CUDA ", cuda_version_text(driver.needed_version),
          ": install driver ", kLeastDriver,
          " or newer on the machine and start it again (nvidia-smi shows the driver), or use the CPU library");
}

inline void require_gpu(const GpuProperties& gpu, uint64_t needed_shared_bytes) {
  require(
      gpu.compute_major >= kHopperMajor && gpu.shared_bytes >= needed_shared_bytes, GLINT_STATUS_UNSUPPORTED, gpu.name,
      " has compute capability ", gpu.compute_major, ".", gpu.compute_minor, " and ", gpu.shared_bytes,
      " bytes of shared memory for a thread block; the kernels need 9.0 or newer and ", needed_shared_bytes,
      ": use a Hopper or Blackwell data-centre GPU (H100, H200, B200), hide this one with CUDA_VISIBLE_DEVICES, or ",
      "use the CPU library");
}

inline std::string code_of(int32_t kernels, const GpuProperties& gpu) {
  const bool has_machine_code = gpu.compute_major == kHopperMajor || gpu.compute_major == kBlackwellMajor;
  if (gpu.compiles_ptx) return "compute_90 PTX that the driver compiles, as CUDA_FORCE_PTX_JIT asks";
  if (!has_machine_code) return "compute_90 PTX that the driver compiles: the library has no machine code for this GPU";
  if (kernels == GLINT_KERNELS_HOPPER) return "machine code for sm_90a and sm_90";
  return gpu.compute_major == kHopperMajor ? "machine code for sm_90" : "machine code for sm_100";
}

inline KernelChoice choose_kernels(int32_t requested, const GpuProperties& gpu) {
  const std::string capability = text("compute capability ", gpu.compute_major, ".", gpu.compute_minor);
  const bool has_wgmma = gpu.compute_major == kHopperMajor && !gpu.compiles_ptx;
  const int32_t best = has_wgmma ? GLINT_KERNELS_HOPPER : GLINT_KERNELS_PORTABLE;
  const int32_t chosen = requested == GLINT_KERNELS_AUTO ? best : requested;
  const std::string why = has_wgmma                           ? text(capability, " has wgmma")
                          : gpu.compute_major == kHopperMajor ? std::string("wgmma has no PTX to compile")
                                                              : text(capability, " has no wgmma");
  require(chosen == GLINT_KERNELS_PORTABLE || (chosen == GLINT_KERNELS_HOPPER && has_wgmma), GLINT_STATUS_UNSUPPORTED,
          "options.kernels is ", requested, ", which ", gpu.name, " cannot run (", why,
          "): CUDA has the kernels portable (", GLINT_KERNELS_PORTABLE, "), and hopper (", GLINT_KERNELS_HOPPER,
          ") on compute capability 9");
  return {.kernels = chosen,
          .reason = requested == GLINT_KERNELS_AUTO ? why : text("asked for; ", why),
          .code = code_of(chosen, gpu)};
}

}
