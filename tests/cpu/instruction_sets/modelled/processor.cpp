#include "cpu/machine.h"

#include "include/glint.h"

namespace glint {

bool processor_runs_itself(int32_t kernels);

bool processor_runs(int32_t kernels) {
  return processor_runs_itself(kernels) || kernels == GLINT_KERNELS_AVX512 || kernels == GLINT_KERNELS_AVX512_BF16 ||
         kernels == GLINT_KERNELS_AMX;
}

}
