#pragma once

#include <arm_neon.h>

#include "cpu/lane_attention.h"
#include "cpu/lane_gemm.h"
#include "cpu/lane_peak.h"
#include "cpu/lane_quantise.h"

#define GLINT_WIDE_SUMS(copy)                                                                                    \
  copy " q0, q1, [%[sums]]\n " copy " q2, q3, [%[sums], #32]\n " copy " q4, q5, [%[sums], #64]\n " copy          \
       " q6, q7, [%[sums], #96]\n " copy " q8, q9, [%[sums], #128]\n " copy " q10, q11, [%[sums], #160]\n " copy \
       " q12, q13, [%[sums], #192]\n " copy " q14, q15, [%[sums], #224]\n"
#define GLINT_WIDE_TOKEN(token, low, high)                                                  \
  "ldp q29, q30, [%[token" token "]], #32\n fmla v" low ".4s, v20.4s, v29.4s\n fmla v" high \
  ".4s, v21.4s, v29.4s\n fmla v" low ".4s, v22.4s, v30.4s\n fmla v" high ".4s, v23.4s, v30.4s\n"
#define GLINT_WIDE_PRODUCTS                                                                          \
  GLINT_WIDE_TOKEN("0", "0", "8")                                                                    \
  GLINT_WIDE_TOKEN("1", "1", "9")                                                                    \
  GLINT_WIDE_TOKEN("2", "2", "10")                                                                   \
  GLINT_WIDE_TOKEN("3", "3", "11") GLINT_WIDE_TOKEN("4", "4", "12") GLINT_WIDE_TOKEN("5", "5", "13") \
      GLINT_WIDE_TOKEN("6", "6", "14") GLINT_WIDE_TOKEN("7", "7", "15")
#define GLINT_WIDE_OPERANDS                                                                               \
  [row0] "+r"(step.rows[0]), [row1] "+r"(step.rows[1]), [next] "+r"(step.next_rows), [steps] "+r"(steps), \
      [token0] "+r"(step.tokens[0]), [token1] "+r"(step.tokens[1]), [token2] "+r"(step.tokens[2]),        \
      [token3] "+r"(step.tokens[3]), [token4] "+r"(step.tokens[4]), [token5] "+r"(step.tokens[5]),        \
      [token6] "+r"(step.tokens[6]), [token7] "+r"(step.tokens[7])
#define GLINT_WIDE_CLOBBERS                                                                                      \
  "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", \
      "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v28", "v29", "v30"

namespace glint {

namespace {

struct NeonIsa {
  static constexpr int kLanes = 4;
  static constexpr int kFp8Vectors = 4;
  static constexpr int kBf16Vectors = 4;
  static constexpr int kTokens = 4;
  static constexpr int64_t kPanelBytes = 40 << 10;
  static constexpr float kFp8Factor = 0x1p-120F;
  static constexpr int kWideTokens = 8;
  static constexpr int kWideRows = 2;
  using Floats = Lanes<kLanes>::Floats;

  struct WideStep {
    Floats sums[kWideRows][kWideTokens] = {};
    const float* tokens[kWideTokens] = {};
    const std::byte* rows[kWideRows] = {};
    const std::byte* next_rows = nullptr;
    int64_t cols;
  };

  static float32x4_t multiply_add(float32x4_t left, float32x4_t right, float32x4_t sum) {
    return vfmaq_f32(sum, left, right);
  }

  static float32x4_t broadcast(float value) { return vdupq_n_f32(value); }

  static float sum(float32x4_t values) { return vaddvq_f32(values); }

  static float32x4_t sum_rows(float32x4_t row0, float32x4_t row1, float32x4_t row2, float32x4_t row3) {
    return vpaddq_f32(vpaddq_f32(row0, row1), vpaddq_f32(row2, row3));
  }

  static void store_bf16(uint16_t* target, float32x4_t values) {
    vst1_u16(target, vshrn_n_u32(vreinterpretq_u32_f32(values), 16));
  }

  static float32x4_t load_bf16(const std::byte* source) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(source)), 16));
  }

  static std::array<Floats, kBf16Vectors> decode_bf16(const std::byte* source) {
    const uint16x8_t low = vld1q_u16(reinterpret_cast<const uint16_t*>(source));
    const uint16x8_t high = vld1q_u16(reinterpret_cast<const uint16_t*>(source) + 8);
    const uint16x8_t zeros = vdupq_n_u16(0);
    return {vreinterpretq_f32_u16(vzip1q_u16(zeros, low)), vreinterpretq_f32_u16(vzip2q_u16(zeros, low)),
            vreinterpretq_f32_u16(vzip1q_u16(zeros, high)), vreinterpretq_f32_u16(vzip2q_u16(zeros, high))};
  }

  static constexpr int direct_rows(int tokens) { return tokens <= 2 ? 4 : 2; }

  static uint8x16_t bytes_of_four(uint8_t first) {
    constexpr uint8_t kNone = 255;
    const uint8x16_t bytes = {kNone, kNone, 0, 16, kNone, kNone, 1, 17, kNone, kNone, 2, 18, kNone, kNone, 3, 19};
    return vqaddq_u8(bytes, vdupq_n_u8(first));
  }

  static std::array<Floats, kFp8Vectors> decode_fp8(const std::byte* source) {
    const uint8x16_t values = vld1q_u8(reinterpret_cast<const uint8_t*>(source));
    Floats first;
    Floats second;
    Floats third;
    Floats fourth;
    asm("shl v30.16b, %[values].16b, #4\n sshr v31.16b, %[values].16b, #4\n and v31.16b, v31.16b, %[bits].16b\n"
        "tbl %[first].16b, {v30.16b, v31.16b}, %[bytes0].16b\n tbl %[second].16b, {v30.16b, v31.16b}, %[bytes4].16b\n"
        "tbl %[third].16b, {v30.16b, v31.16b}, %[bytes8].16b\n tbl %[fourth].16b, {v30.16b, v31.16b}, %[bytes12].16b\n"
        : [first] "=&w"(first), [second] "=&w"(second), [third] "=&w"(third), [fourth] "=w"(fourth)
        : [values] "w"(values), [bits] "w"(vdupq_n_u8(0x87)), [bytes0] "w"(bytes_of_four(0)),
          [bytes4] "w"(bytes_of_four(4)), [bytes8] "w"(bytes_of_four(8)), [bytes12] "w"(bytes_of_four(12))
        : "v30", "v31");
    return {first, second, third, fourth};
  }

  static void add_fp8(WideStep& step) {
    int64_t steps = step.cols / 16;
    asm volatile(
        GLINT_WIDE_SUMS("ldp")
        "movi v28.16b, #0x87\n"
        "1:\n"
        "prfm pldl1keep, [%[next]]\n add %[next], %[next], #32\n"
        "ldr q17, [%[row0]], #16\n ldr q19, [%[row1]], #16\n"
        "shl v16.16b, v17.16b, #4\n sshr v17.16b, v17.16b, #4\n and v17.16b, v17.16b, v28.16b\n"
        "shl v18.16b, v19.16b, #4\n sshr v19.16b, v19.16b, #4\n and v19.16b, v19.16b, v28.16b\n"
        "tbl v20.16b, {v16.16b, v17.16b}, %[bytes0].16b\n tbl v21.16b, {v18.16b, v19.16b}, %[bytes0].16b\n"
        "tbl v22.16b, {v16.16b, v17.16b}, %[bytes4].16b\n tbl v23.16b, {v18.16b, v19.16b}, %[bytes4].16b\n"
        GLINT_WIDE_PRODUCTS
        "tbl v20.16b, {v16.16b, v17.16b}, %[bytes8].16b\n tbl v21.16b, {v18.16b, v19.16b}, %[bytes8].16b\n"
        "tbl v22.16b, {v16.16b, v17.16b}, %[bytes12].16b\n tbl v23.16b, {v18.16b, v19.16b}, %[bytes12].16b\n"
        GLINT_WIDE_PRODUCTS
        "subs %[steps], %[steps], #1\n b.ne 1b\n"
        GLINT_WIDE_SUMS("stp")
        : GLINT_WIDE_OPERANDS
        : [sums] "r"(&step.sums), [bytes0] "w"(bytes_of_four(0)), [bytes4] "w"(bytes_of_four(4)),
          [bytes8] "w"(bytes_of_four(8)), [bytes12] "w"(bytes_of_four(12))
        : GLINT_WIDE_CLOBBERS);
  }

  static void add_bf16(WideStep& step) {
    int64_t steps = step.cols / 16;
    asm volatile(
        GLINT_WIDE_SUMS("ldp")
        "1:\n"
        "prfm pldl1keep, [%[next]]\n add %[next], %[next], #64\n"
        "ldp q16, q17, [%[row0]], #32\n ldp q18, q19, [%[row1]], #32\n"
        "zip1 v20.8h, %[zeros].8h, v16.8h\n zip1 v21.8h, %[zeros].8h, v18.8h\n"
        "zip2 v22.8h, %[zeros].8h, v16.8h\n zip2 v23.8h, %[zeros].8h, v18.8h\n"
        GLINT_WIDE_PRODUCTS
        "zip1 v20.8h, %[zeros].8h, v17.8h\n zip1 v21.8h, %[zeros].8h, v19.8h\n"
        "zip2 v22.8h, %[zeros].8h, v17.8h\n zip2 v23.8h, %[zeros].8h, v19.8h\n"
        GLINT_WIDE_PRODUCTS
        "subs %[steps], %[steps], #1\n b.ne 1b\n"
        GLINT_WIDE_SUMS("stp")
        : GLINT_WIDE_OPERANDS
        : [sums] "r"(&step.sums), [zeros] "w"(vdupq_n_u16(0))
        : GLINT_WIDE_CLOBBERS);
  }

  static void sum_panel(Floats (&sums)[4][kTokens], const float* (&rows)[4], const float* (&tokens)[kTokens],
                        int64_t cols) {
    int64_t steps = cols / 8;
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
};

}

}

#undef GLINT_WIDE_SUMS
#undef GLINT_WIDE_TOKEN
#undef GLINT_WIDE_PRODUCTS
#undef GLINT_WIDE_OPERANDS
#undef GLINT_WIDE_CLOBBERS
