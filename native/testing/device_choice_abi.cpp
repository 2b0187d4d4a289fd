#include <cstdint>
#include <string>

#include "cuda/device_choice.h"
#include "testing/guarded.h"

namespace {

thread_local std::string words;

}

extern "C" {

GLINT_API int32_t glint_testing_choose_kernels(int32_t requested, const char* name, int32_t compute_major,
                                               int32_t compute_minor, uint64_t shared_bytes, uint64_t needed_bytes,
                                               int32_t compiles_ptx, int32_t* kernels) {
  return glint::testing::guarded([&] {
    const glint::cuda::GpuProperties gpu = {.name = name,
                                       .compute_major = compute_major,
                                       .compute_minor = compute_minor,
                                       .shared_bytes = shared_bytes,
                                       .compiles_ptx = compiles_ptx != 0};
    glint::cuda::require_gpu(gpu, needed_bytes);
    const glint::cuda::KernelChoice choice = glint::cuda::choose_kernels(requested, gpu);
    *kernels = choice.kernels;
    words = glint::text(choice.reason, "; ", choice.code);
  });
}

GLINT_API int32_t glint_testing_require_driver(int32_t cuda_version, int32_t needed_version,
                                               const char* package_version) {
  return glint::testing::guarded([&] {
    glint::cuda::require_driver(
        {.cuda_version = cuda_version, .needed_version = needed_version, .package_version = package_version});
  });
}

GLINT_API const char* glint_testing_choice_text(void) { return words.c_str(); }

GLINT_API const char* glint_testing_choice_error(void) { return glint::testing::last_error.c_str(); }
}
