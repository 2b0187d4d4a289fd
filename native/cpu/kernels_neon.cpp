#include <arm_neon.h>

#include "cpu/lane_attention.h"
#include "cpu/lane_products.h"

namespace glint {

namespace {

struct NeonIsa {
  static constexpr int kLanes = 4;
  static constexpr int kCodeVectors = 4;
  static constexpr int kRows = 4;
  static constexpr int kTokens = 4;
  static constexpr int kDirectRows = 4;
  static constexpr float kCodeFactor = 0x1p-8F;

  static std::array<Lanes<kLanes>::Floats, kCodeVectors> decode_codes(const std::byte* source) {
    const int8x16_t codes = vld1q_s8(reinterpret_cast<const int8_t*>(source));
    const int16x8_t clear_copied_sign = vdupq_n_s16(static_cast<int16_t>(0xbfff));
    const int16x8_t low = vandq_s16(vshll_n_s8(vget_low_s8(codes), 7), clear_copied_sign);
    const int16x8_t high = vandq_s16(vshll_high_n_s8(codes, 7), clear_copied_sign);
    const float16x8_t low_halves = vreinterpretq_f16_s16(low);
    const float16x8_t high_halves = vreinterpretq_f16_s16(high);
    return {vcvt_f32_f16(vget_low_f16(low_halves)), vcvt_high_f32_f16(low_halves),
            vcvt_f32_f16(vget_low_f16(high_halves)), vcvt_high_f32_f16(high_halves)};
  }
};

}

const KernelSet& neon_kernels() {
  static const KernelSet kernels{.name = "neon",
                                 .id = GLINT_KERNELS_NEON,
                                 .code_form = OperandForm::kFloat,
                                 .product_codes = LaneProducts<NeonIsa>::codes,
                                 .product_floats = LaneProducts<NeonIsa>::floats,
                                 .attend = LaneAttention<NeonIsa>::attend,
                                 .swiglu = lane_swiglu<NeonIsa>};
  return kernels;
}

}
