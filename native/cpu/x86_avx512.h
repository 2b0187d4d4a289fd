#pragma once

#include <immintrin.h>

#include "cpu/lane_attention.h"
#include "cpu/lane_gemm.h"
#include "cpu/lane_peak.h"
#include "cpu/lane_quantise.h"

namespace glint {

namespace {

struct Avx512Isa {
  static constexpr int kLanes = 16;
  static constexpr int kFp8Vectors = 2;
  static constexpr int kBf16Vectors = 2;
  static constexpr int kTokens = 4;
  static constexpr int64_t kPanelBytes = 20 << 10;
  static constexpr float kFp8Factor = 0x1p-8F;

  static __m512 multiply_add(__m512 left, __m512 right, __m512 sum) { return _mm512_fmadd_ps(left, right, sum); }

  static __m512 broadcast(float value) { return _mm512_set1_ps(value); }

  static __m256 add_halves(__m512 values) {
    return _mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1));
  }

  static float sum(__m512 values) {
    const __m256 halves = add_halves(values);
    const __m256 pairs = _mm256_hadd_ps(halves, halves);
    const __m256 quads = _mm256_hadd_ps(pairs, pairs);
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
  }

  static Vectors<4>::Floats sum_rows(__m512 row0, __m512 row1, __m512 row2, __m512 row3) {
    const __m256 pairs01 = _mm256_hadd_ps(add_halves(row0), add_halves(row1));
    const __m256 pairs23 = _mm256_hadd_ps(add_halves(row2), add_halves(row3));
    const __m256 quads = _mm256_hadd_ps(pairs01, pairs23);
    return _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
  }

  static constexpr int direct_rows(int tokens) { return tokens <= 4 ? 4 : 2; }

  static void store_bf16(uint16_t* target, __m512 values) {
    const __m512i words = _mm512_srli_epi32(_mm512_castps_si512(values), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(words));
  }

  static __m512 load_bf16(const std::byte* source) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }

  static std::array<Lanes<kLanes>::Floats, kBf16Vectors> decode_bf16(const std::byte* source) {
    return {load_bf16(source), load_bf16(source + 2 * kLanes)};
  }

  static std::array<Lanes<kLanes>::Floats, kFp8Vectors> decode_fp8(const std::byte* source) {
    const __m512i clear_copied_sign = _mm512_set1_epi16(static_cast<int16_t>(0xbfff));
    const __m512i nan_magnitude = _mm512_set1_epi16(static_cast<int16_t>(0xfe00));
    const __m512i half_nan = _mm512_set1_epi16(0x7e00);
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    const __m512i numbers = _mm512_and_si512(_mm512_slli_epi16(words, 7), clear_copied_sign);
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_slli_epi16(words, 9), nan_magnitude);
    const __m512i halves = _mm512_mask_mov_epi16(numbers, is_nan, half_nan);
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))};
  }
};

}

}
