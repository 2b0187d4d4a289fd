#include "cpu/x86_broadcast_gemm.h"

namespace glint {

const KernelSet& avx512_kernels() {
  static constexpr KernelSet kernels{.name = "avx512",
                                     .id = GLINT_KERNELS_AVX512,
                                     .fp8_form = OperandForm::kFloat,
                                     .gemm_fp8 = BroadcastGemm<Fp8Pairs>::multiply,
                                     .gemm_floats = BroadcastGemm<Bf16Pairs>::multiply,
                                     .attend = LaneAttention<Avx512Isa>::attend,
                                     .swiglu = lane_swiglu<Avx512Isa>,
                                     .quantise = LaneQuantise<Avx512Isa>::to_floats,
                                     .rows = kRowKernels,
                                     .multiply_adds = lane_multiply_adds<Avx512Isa>};
  return kernels;
}

}
