#include <arm_neon.h>

#include "cpu/lane_attention.h"
#include "cpu/lane_gemm.h"
#include "cpu/lane_peak.h"
#include "cpu/lane_quantise.h"

namespace glint {

namespace {

struct NeonIsa {
  static constexpr int kLanes = 4;
  static constexpr int kFp8Vectors = 4;
  static constexpr int kRows = 4;
  static constexpr int kTokens = 4;
  static constexpr int kDirectRows = 4;
  static constexpr float kFp8Factor = 0x1p-120F;
  static constexpr uint32_t kValueBits = 0x87f0;

  static float32x4_t multiply_add(float32x4_t left, float32x4_t right, float32x4_t sum) {
    return vfmaq_f32(sum, left, right);
  }

  static float32x4_t broadcast(float value) { return vdupq_n_f32(value); }

  static float sum(float32x4_t values) { return vaddvq_f32(values); }

  static float32x4_t load_bf16(const std::byte* source) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(source)), 16));
  }

  static std::array<Lanes<kLanes>::Floats, kFp8Vectors> decode_fp8(const std::byte* source) {
    const int8x16_t values = vld1q_s8(reinterpret_cast<const int8_t*>(source));
    const int16x8_t value_bits = vdupq_n_s16(static_cast<int16_t>(kValueBits));
    const int16x8_t zeros = vdupq_n_s16(0);
    const int16x8_t low = vandq_s16(vshll_n_s8(vget_low_s8(values), 4), value_bits);
    const int16x8_t high = vandq_s16(vshll_high_n_s8(values, 4), value_bits);
    return {widen(vzip1q_s16(zeros, low)), widen(vzip2q_s16(zeros, low)), widen(vzip1q_s16(zeros, high)),
            widen(vzip2q_s16(zeros, high))};
  }

  static void sum_fp8(Lanes<kLanes>::Floats (&sums)[kDirectRows][1], const std::byte* values, int64_t stride,
                      const float* input, int64_t steps) {
    const std::byte* rows[kDirectRows] = {values, values + stride, values + 2 * stride, values + 3 * stride};
    auto* out = reinterpret_cast<float*>(sums);
    asm volatile(
        "dup v31.8h, %w[bits]\n movi v30.4s, #0\n"
        "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n"
        "1:\n"
        "ldr q16, [%[row0]], #16\n ldr q17, [%[row1]], #16\n ldr q18, [%[row2]], #16\n ldr q19, [%[row3]], #16\n"
        "ldp q24, q25, [%[input]], #32\n ldp q26, q27, [%[input]], #32\n"
        "prfm pldl1keep, [%[row0], %[ahead]]\n prfm pldl1keep, [%[row1], %[ahead]]\n"
        "prfm pldl1keep, [%[row2], %[ahead]]\n prfm pldl1keep, [%[row3], %[ahead]]\n"
        "sshll v4.8h, v16.8b, #4\n sshll2 v5.8h, v16.16b, #4\n and v4.16b, v4.16b, v31.16b\n"
        "and v5.16b, v5.16b, v31.16b\n zip1 v20.8h, v30.8h, v4.8h\n zip2 v21.8h, v30.8h, v4.8h\n"
        "zip1 v22.8h, v30.8h, v5.8h\n zip2 v23.8h, v30.8h, v5.8h\n"
        "sshll v6.8h, v17.8b, #4\n fmla v0.4s, v20.4s, v24.4s\n sshll2 v7.8h, v17.16b, #4\n"
        "and v6.16b, v6.16b, v31.16b\n fmla v0.4s, v21.4s, v25.4s\n and v7.16b, v7.16b, v31.16b\n"
        "zip1 v28.8h, v30.8h, v6.8h\n fmla v0.4s, v22.4s, v26.4s\n zip2 v29.8h, v30.8h, v6.8h\n"
        "zip1 v8.8h, v30.8h, v7.8h\n fmla v0.4s, v23.4s, v27.4s\n zip2 v9.8h, v30.8h, v7.8h\n"
        "sshll v4.8h, v18.8b, #4\n fmla v1.4s, v28.4s, v24.4s\n sshll2 v5.8h, v18.16b, #4\n"
        "and v4.16b, v4.16b, v31.16b\n fmla v1.4s, v29.4s, v25.4s\n and v5.16b, v5.16b, v31.16b\n"
        "zip1 v20.8h, v30.8h, v4.8h\n fmla v1.4s, v8.4s, v26.4s\n zip2 v21.8h, v30.8h, v4.8h\n"
        "zip1 v22.8h, v30.8h, v5.8h\n fmla v1.4s, v9.4s, v27.4s\n zip2 v23.8h, v30.8h, v5.8h\n"
        "sshll v6.8h, v19.8b, #4\n fmla v2.4s, v20.4s, v24.4s\n sshll2 v7.8h, v19.16b, #4\n"
        "and v6.16b, v6.16b, v31.16b\n fmla v2.4s, v21.4s, v25.4s\n and v7.16b, v7.16b, v31.16b\n"
        "zip1 v28.8h, v30.8h, v6.8h\n fmla v2.4s, v22.4s, v26.4s\n zip2 v29.8h, v30.8h, v6.8h\n"
        "zip1 v8.8h, v30.8h, v7.8h\n fmla v2.4s, v23.4s, v27.4s\n zip2 v9.8h, v30.8h, v7.8h\n"
        "fmla v3.4s, v28.4s, v24.4s\n subs %[steps], %[steps], #1\n fmla v3.4s, v29.4s, v25.4s\n"
        "fmla v3.4s, v8.4s, v26.4s\n fmla v3.4s, v9.4s, v27.4s\n"
        "b.ne 1b\n"
        "stp q0, q1, [%[out]]\n stp q2, q3, [%[out], #32]\n"
        : [row0] "+r"(rows[0]), [row1] "+r"(rows[1]), [row2] "+r"(rows[2]), [row3] "+r"(rows[3]), [input] "+r"(input),
          [steps] "+r"(steps)
        : [out] "r"(out), [bits] "r"(kValueBits), [ahead] "r"(kDirectRows * stride)
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v16", "v17", "v18", "v19", "v20",
          "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31");
  }

  static void sum_panel(Lanes<kLanes>::Floats (&sums)[kRows][kTokens], const float* panel, int64_t stride,
                        const float* const* inputs, int64_t cols) {
    const float* rows[kRows] = {panel, panel + stride, panel + 2 * stride, panel + 3 * stride};
    const float* tokens[kTokens] = {inputs[0], inputs[1], inputs[2], inputs[3]};
    int64_t steps = (cols + 7) / 8;
    auto* out = reinterpret_cast<float*>(sums);
    asm volatile(
        "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n"
        "movi v4.4s, #0\n movi v5.4s, #0\n movi v6.4s, #0\n movi v7.4s, #0\n"
        "movi v8.4s, #0\n movi v9.4s, #0\n movi v10.4s, #0\n movi v11.4s, #0\n"
        "movi v12.4s, #0\n movi v13.4s, #0\n movi v14.4s, #0\n movi v15.4s, #0\n"
        "1:\n"
        "ldp q16, q24, [%[row0]], #32\n ldp q20, q28, [%[token0]], #32\n"
        "ldp q21, q29, [%[token1]], #32\n ldp q22, q30, [%[token2]], #32\n ldp q23, q31, [%[token3]], #32\n"
        "fmla v0.4s, v16.4s, v20.4s\n fmla v1.4s, v16.4s, v21.4s\n"
        "fmla v2.4s, v16.4s, v22.4s\n fmla v3.4s, v16.4s, v23.4s\n"
        "ldp q17, q25, [%[row1]], #32\n"
        "fmla v4.4s, v17.4s, v20.4s\n fmla v5.4s, v17.4s, v21.4s\n"
        "fmla v6.4s, v17.4s, v22.4s\n fmla v7.4s, v17.4s, v23.4s\n"
        "ldp q18, q26, [%[row2]], #32\n"
        "fmla v8.4s, v18.4s, v20.4s\n fmla v9.4s, v18.4s, v21.4s\n"
        "fmla v10.4s, v18.4s, v22.4s\n fmla v11.4s, v18.4s, v23.4s\n"
        "ldp q19, q27, [%[row3]], #32\n"
        "fmla v12.4s, v19.4s, v20.4s\n fmla v13.4s, v19.4s, v21.4s\n"
        "fmla v14.4s, v19.4s, v22.4s\n fmla v15.4s, v19.4s, v23.4s\n"
        "fmla v0.4s, v24.4s, v28.4s\n fmla v1.4s, v24.4s, v29.4s\n"
        "fmla v2.4s, v24.4s, v30.4s\n fmla v3.4s, v24.4s, v31.4s\n"
        "fmla v4.4s, v25.4s, v28.4s\n fmla v5.4s, v25.4s, v29.4s\n"
        "fmla v6.4s, v25.4s, v30.4s\n fmla v7.4s, v25.4s, v31.4s\n"
        "fmla v8.4s, v26.4s, v28.4s\n fmla v9.4s, v26.4s, v29.4s\n"
        "fmla v10.4s, v26.4s, v30.4s\n fmla v11.4s, v26.4s, v31.4s\n"
        "fmla v12.4s, v27.4s, v28.4s\n fmla v13.4s, v27.4s, v29.4s\n"
        "fmla v14.4s, v27.4s, v30.4s\n fmla v15.4s, v27.4s, v31.4s\n"
        "subs %[steps], %[steps], #1\n b.ne 1b\n"
        "stp q0, q1, [%[out]]\n stp q2, q3, [%[out], #32]\n stp q4, q5, [%[out], #64]\n"
        "stp q6, q7, [%[out], #96]\n stp q8, q9, [%[out], #128]\n stp q10, q11, [%[out], #160]\n"
        "stp q12, q13, [%[out], #192]\n stp q14, q15, [%[out], #224]\n"
        : [row0] "+r"(rows[0]), [row1] "+r"(rows[1]), [row2] "+r"(rows[2]), [row3] "+r"(rows[3]),
          [token0] "+r"(tokens[0]), [token1] "+r"(tokens[1]), [token2] "+r"(tokens[2]), [token3] "+r"(tokens[3]),
          [steps] "+r"(steps)
        : [out] "r"(out)
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",
          "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29",
          "v30", "v31");
  }

  static float32x4_t widen(int16x8_t pairs) { return vreinterpretq_f32_s16(pairs); }
};

}

const KernelSet& neon_kernels() {
  static const KernelSet kernels{.name = "neon",
                                 .id = GLINT_KERNELS_NEON,
                                 .fp8_form = OperandForm::kFloat,
                                 .gemm_fp8 = LaneGemm<NeonIsa>::fp8,
                                 .gemm_floats = LaneGemm<NeonIsa>::floats,
                                 .attend = LaneAttention<NeonIsa>::attend,
                                 .swiglu = lane_swiglu<NeonIsa>,
                                 .quantise = LaneQuantise<NeonIsa>::to_floats,
                                 .multiply_adds = lane_multiply_adds<NeonIsa>};
  return kernels;
}

}
