#pragma once

#include <cstdint>
#include <cstring>

namespace modelled {

template <typename Vector>
Vector load(const void* source) {
  Vector vector;
  std::memcpy(&vector, source, sizeof(vector));
  return vector;
}

template <typename Element, typename Vector>
Element element(const Vector& vector, int index) {
  Element value;
  std::memcpy(&value, reinterpret_cast<const char*>(&vector) + index * static_cast<int>(sizeof(Element)),
              sizeof(value));
  return value;
}

inline __mmask32 words_without_common_bits(__m512i left, __m512i right) {
  __mmask32 mask = 0;
  for (int index = 0; index < 32; ++index) {
    const bool is_zero = (element<uint16_t>(left, index) & element<uint16_t>(right, index)) == 0;
    mask |= static_cast<__mmask32>(is_zero) << index;
  }
  return mask;
}

inline __mmask64 bytes_without_common_bits(__m512i left, __m512i right) {
  __mmask64 mask = 0;
  for (int index = 0; index < 64; ++index) {
    const bool is_zero = (element<uint8_t>(left, index) & element<uint8_t>(right, index)) == 0;
    mask |= static_cast<__mmask64>(is_zero) << index;
  }
  return mask;
}

inline bool is_odd(unsigned bits) { return (__builtin_popcount(bits) & 1) != 0; }

inline __m512i times_bit_matrices(__m512i values, __m512i matrices, int inverted) {
  uint8_t bytes[64];
  for (int index = 0; index < 64; ++index) {
    unsigned result = 0;
    for (int bit = 0; bit < 8; ++bit) {
      const unsigned row = element<uint8_t>(matrices, index / 8 * 8 + 7 - bit);
      result |= static_cast<unsigned>(is_odd(row & element<uint8_t>(values, index))) << bit;
    }
    bytes[index] = static_cast<uint8_t>(result ^ static_cast<unsigned>(inverted));
  }
  return load<__m512i>(bytes);
}

inline __m256i low_words(__m512i numbers) {
  uint16_t words[16];
  for (int index = 0; index < 16; ++index) words[index] = static_cast<uint16_t>(element<uint32_t>(numbers, index));
  return load<__m256i>(words);
}

inline __m512i widened_words(__m256i words) {
  uint32_t numbers[16];
  for (int index = 0; index < 16; ++index) numbers[index] = element<uint16_t>(words, index);
  return load<__m512i>(numbers);
}

inline __m512 floats_of_halves(__m256i halves) {
  const __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                           _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  return load<__m512>(parts);
}

inline __m256 eight_floats(__m512 floats, int half) { return element<__m256>(floats, half); }

inline void store_chosen_floats(void* target, __mmask16 mask, __m512 floats) {
  for (int index = 0; index < 16; ++index) {
    if ((mask >> index & 1) != 0) std::memcpy(static_cast<float*>(target) + index, &floats[index], sizeof(float));
  }
}

inline __m512 multiply_add(__m512 left, __m512 right, __m512 sum) {
  const __m256 parts[2] = {_mm256_fmadd_ps(eight_floats(left, 0), eight_floats(right, 0), eight_floats(sum, 0)),
                           _mm256_fmadd_ps(eight_floats(left, 1), eight_floats(right, 1), eight_floats(sum, 1))};
  return load<__m512>(parts);
}

}

#undef _mm512_fmadd_ps
#define _mm512_cvtepi32_epi16 modelled::low_words
#define _mm512_cvtepu16_epi32 modelled::widened_words
#define _mm512_cvtph_ps modelled::floats_of_halves
#define _mm512_extractf32x8_ps modelled::eight_floats
#define _mm512_fmadd_ps modelled::multiply_add
#define _mm512_gf2p8affine_epi64_epi8 modelled::times_bit_matrices
#define _mm512_mask_storeu_ps modelled::store_chosen_floats
#define _mm512_testn_epi16_mask modelled::words_without_common_bits
#define _mm512_testn_epi8_mask modelled::bytes_without_common_bits
