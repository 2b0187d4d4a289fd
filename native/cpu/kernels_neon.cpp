#include "cpu/arm64_neon.h"

namespace glint {

const KernelSet& neon_kernels() {
  static const KernelSet kernels{.name = "neon",
                                 .id = GLINT_KERNELS_NEON,
                                 .fp8_form = OperandForm::kFloat,
                                 .gemm_fp8 = LaneGemm<NeonIsa>::fp8,
                                 .gemm_floats = LaneGemm<NeonIsa>::floats,
                                 .attend = LaneAttention<NeonIsa>::attend,
                                 .swiglu = lane_swiglu<NeonIsa>,
                                 .quantise = LaneQuantise<NeonIsa>::to_floats,
                                 .rows = kRowKernels,
                                 .multiply_adds = lane_multiply_adds<NeonIsa>,
                                 .sums_groups = true};
  return kernels;
}

}
