#pragma once

#include <immintrin.h>

#include "cpu/lane_attention.h"
#include "cpu/lane_peak.h"
#include "cpu/lane_quantise.h"

namespace glint {

namespace {

struct Avx512Isa {
  static constexpr int kLanes = 16;

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

  static void store_bf16(uint16_t* target, __m512 values) {
    const __m512i words = _mm512_srli_epi32(_mm512_castps_si512(values), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(words));
  }

  static __m512 load_bf16(const std::byte* source) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
};

}

}
