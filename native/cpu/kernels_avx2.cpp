#include <immintrin.h>

#include "cpu/lane_attention.h"
#include "cpu/lane_gemm.h"
#include "cpu/lane_peak.h"
#include "cpu/lane_quantise.h"
#include "cpu/x86_upper_halves.h"

namespace glint {

namespace {

struct Avx2Isa {
  static constexpr int kLanes = 8;
  static constexpr int kFp8Vectors = 2;
  static constexpr int kBf16Vectors = 2;
  static constexpr int kTokens = 3;
  static constexpr int64_t kPanelBytes = 20 << 10;
  static constexpr float kFp8Factor = 0x1p-8F;

  static __m256 multiply_add(__m256 left, __m256 right, __m256 sum) { return _mm256_fmadd_ps(left, right, sum); }

  static __m256 broadcast(float value) { return _mm256_set1_ps(value); }

  static float sum(__m256 values) {
    const __m256 pairs = _mm256_hadd_ps(values, values);
    const __m256 quads = _mm256_hadd_ps(pairs, pairs);
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
  }

  static Vectors<4>::Floats sum_rows(__m256 row0, __m256 row1, __m256 row2, __m256 row3) {
    const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(row0, row1), _mm256_hadd_ps(row2, row3));
    return _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
  }

  static __m256 in_register(__m256 value) {
    asm("" : "+x"(value));
    return value;
  }

  static constexpr int direct_rows(int tokens) { return tokens <= 2 ? 4 : 2; }

  static __m256 load_bf16(const std::byte* source) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }

  struct Bf16Values {
    const std::byte* source;
    __m256 operator[](int vector) const { return load_bf16(source + 2 * kLanes * vector); }
  };

  struct Fp16Values {
    __m128i halves[kFp8Vectors];
    __m256 operator[](int vector) const {
      __m256 floats;
      asm("vcvtph2ps %1, %0" : "=x"(floats) : "m"(halves[vector]));
      return floats;
    }
  };

  static Bf16Values decode_bf16(const std::byte* source) { return {source}; }

  static Fp16Values decode_fp8(const std::byte* source) {
    const __m256i clear_copied_sign = _mm256_set1_epi16(static_cast<int16_t>(0xbfff));
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    Fp16Values values;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values.halves),
                        _mm256_and_si256(_mm256_slli_epi16(words, 7), clear_copied_sign));
    return values;
  }
};

}

const KernelSet& avx2_kernels() {
  static constexpr KernelSet kernels{.name = "avx2",
                                     .id = GLINT_KERNELS_AVX2,
                                     .fp8_form = OperandForm::kFloat,
                                     .gemm_fp8 = kClearingUpperHalves<LaneGemm<Avx2Isa>::fp8>,
                                     .gemm_floats = kClearingUpperHalves<LaneGemm<Avx2Isa>::floats>,
                                     .attend = kClearingUpperHalves<LaneAttention<Avx2Isa>::attend>,
                                     .swiglu = kClearingUpperHalves<lane_swiglu<Avx2Isa>>,
                                     .quantise = kClearingUpperHalves<LaneQuantise<Avx2Isa>::to_floats>,
                                     .rows = kRowKernels,
                                     .multiply_adds = lane_multiply_adds<Avx2Isa>,
                                     .sums_groups = true};
  return kernels;
}

}
