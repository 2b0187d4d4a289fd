#include "cpu/x86_avx512.h"

namespace glint {

const KernelSet& avx512_kernels() {
  static constexpr KernelSet kernels{.name = "avx512",
                                     .id = GLINT_KERNELS_AVX512,
                                     .fp8_form = OperandForm::kFloat,
                                     .gemm_fp8 = LaneGemm<Avx512Isa>::fp8,
                                     .gemm_floats = LaneGemm<Avx512Isa>::floats,
                                     .attend = LaneAttention<Avx512Isa>::attend,
                                     .swiglu = lane_swiglu<Avx512Isa>,
                                     .quantise = LaneQuantise<Avx512Isa>::to_floats,
                                     .multiply_adds = lane_multiply_adds<Avx512Isa>,
                                     .sums_groups = true};
  return kernels;
}

}
