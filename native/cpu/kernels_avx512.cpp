#include "cpu/x86_broadcast_gemm.h"
#include "cpu/x86_upper_halves.h"

namespace glint {

const KernelSet& avx512_kernels() {
  static constexpr KernelSet kernels{.name = "avx512",
                                     .id = GLINT_KERNELS_AVX512,
                                     .fp8_form = OperandForm::kFloat,
                                     .gemm_fp8 = kClearingUpperHalves<BroadcastGemm<Fp8Pairs>::multiply>,
                                     .gemm_floats = kClearingUpperHalves<BroadcastGemm<Bf16Pairs>::multiply>,
                                     .attend = kClearingUpperHalves<LaneAttention<Avx512Isa>::attend>,
                                     .swiglu = kClearingUpperHalves<lane_swiglu<Avx512Isa>>,
                                     .quantise = kClearingUpperHalves<LaneQuantise<Avx512Isa>::to_floats>,
                                     .rows = kRowKernels,
                                     .multiply_adds = lane_multiply_adds<Avx512Isa>};
  return kernels;
}

}
