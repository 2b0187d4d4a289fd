#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/split_columns.h"

namespace glint {

namespace {

inline constexpr int64_t kTileEdge = 16;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kTileBytes = kTileEdge * kTileRowBytes;

inline __attribute__((always_inline)) void keep_memory_order() { asm volatile("" ::: "memory"); }

constexpr uint16_t kFp8Magnitude = 0x07f0;
constexpr uint16_t kExponentShift = 120 << 7;

constexpr std::array<uint16_t, 32> make_subnormal_shifts() {
  std::array<uint16_t, 32> shifts{};
  for (uint32_t mantissa = 0; mantissa < 8; ++mantissa) {
    const uint32_t value = std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-9F) >> 16U;
    shifts[mantissa] = static_cast<uint16_t>(value - (mantissa << 4U));
  }
  return shifts;
}

alignas(64) constexpr std::array<uint16_t, 32> kSubnormalShifts = make_subnormal_shifts();

inline __m512i same_words(uint16_t value) { return _mm512_set1_epi16(static_cast<int16_t>(value)); }

inline __m512i bf16_from_repeated_fp8(__m512i repeated) {
  constexpr int kFirstOrBothOthers = 0xf8;
  const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(repeated, 4), same_words(kFp8Magnitude));
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(repeated, same_words(0x78));
  const __m512i subnormal_shifts = _mm512_load_si512(kSubnormalShifts.data());
  const __m512i shifts =
      _mm512_mask_permutexvar_epi16(same_words(kExponentShift), is_subnormal, repeated, subnormal_shifts);
  const __m512i shifted = _mm512_add_epi16(magnitude, shifts);
  return _mm512_ternarylogic_epi32(shifted, repeated, same_words(0x8000), kFirstOrBothOthers);
}

inline __m512i every_fourth_row(const std::byte* source, int64_t stride) {
  const auto load = [source, stride](int64_t row) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + row * stride));
  };
  __m512i rows = _mm512_broadcast_i32x4(load(0));
  rows = _mm512_mask_broadcast_i32x4(rows, 0x00f0, load(4));
  rows = _mm512_mask_broadcast_i32x4(rows, 0x0f00, load(8));
  return _mm512_mask_broadcast_i32x4(rows, 0xf000, load(12));
}

template <typename Write>
inline void transpose_dwords(const std::byte* source, int64_t stride, const Write& write,
                             int64_t columns = kTileEdge) {
  for (int64_t column = 0; column < columns; column += 4, source += 16) {
    const __m512i rows0 = every_fourth_row(source, stride);
    const __m512i rows1 = every_fourth_row(source + stride, stride);
    const __m512i rows2 = every_fourth_row(source + 2 * stride, stride);
    const __m512i rows3 = every_fourth_row(source + 3 * stride, stride);
    const __m512i low01 = _mm512_unpacklo_epi32(rows0, rows1);
    const __m512i high01 = _mm512_unpackhi_epi32(rows0, rows1);
    const __m512i low23 = _mm512_unpacklo_epi32(rows2, rows3);
    const __m512i high23 = _mm512_unpackhi_epi32(rows2, rows3);
    write(column, _mm512_unpacklo_epi64(low01, low23));
    write(column + 1, _mm512_unpackhi_epi64(low01, low23));
    write(column + 2, _mm512_unpacklo_epi64(high01, high23));
    write(column + 3, _mm512_unpackhi_epi64(high01, high23));
  }
}

struct Window {
  const std::byte* source;
  int64_t stride;
  int64_t rows;
  int64_t first;
  int64_t last;

  bool is_whole() const { return rows == kTileEdge && first == 0 && last == kStepCols; }
};

inline void copy_window(std::byte* target, const Window& window, int64_t element_bytes) {
  const int64_t skipped = element_bytes * window.first;
  const auto bytes = static_cast<size_t>(element_bytes * (window.last - window.first));
  for (int64_t row = 0; row < window.rows; ++row) {
    std::memcpy(target + row * element_bytes * kStepCols + skipped, window.source + row * window.stride + skipped,
                bytes);
  }
}

template <typename Write>
inline void transpose_pairs(const std::byte* source, int64_t stride, const Write& write) {
  constexpr int64_t kHalfCols = kStepCols / 2;
  for (int64_t pair = 0; pair < kStepCols / 2; pair += kHalfCols / 2, source += kHalfCols) {
    const __m512i rows0 = every_fourth_row(source, stride);
    const __m512i rows1 = every_fourth_row(source + stride, stride);
    const __m512i rows2 = every_fourth_row(source + 2 * stride, stride);
    const __m512i rows3 = every_fourth_row(source + 3 * stride, stride);
    const __m512i low01 = _mm512_unpacklo_epi16(rows0, rows1);
    const __m512i high01 = _mm512_unpackhi_epi16(rows0, rows1);
    const __m512i low23 = _mm512_unpacklo_epi16(rows2, rows3);
    const __m512i high23 = _mm512_unpackhi_epi16(rows2, rows3);
    write(pair, _mm512_unpacklo_epi32(low01, low23));
    write(pair + 2, _mm512_unpackhi_epi32(low01, low23));
    write(pair + 4, _mm512_unpacklo_epi32(high01, high23));
    write(pair + 6, _mm512_unpackhi_epi32(high01, high23));
  }
}

template <typename Write>
inline void transpose_pairs(const Window& window, const Write& write) {
  if (window.is_whole()) {
    transpose_pairs(window.source, window.stride, write);
    return;
  }
  alignas(64) std::byte values[kTileEdge * kStepCols] = {};
  copy_window(values, window, 1);
  transpose_pairs(values, kStepCols, write);
}

inline void write_fp8_tile(std::byte* target, const Window& window) {
  transpose_pairs(window, [target](int64_t pair, __m512i pairs) {
    std::byte* rows = target + pair * kTileRowBytes;
    _mm512_store_si512(rows, bf16_from_repeated_fp8(_mm512_unpacklo_epi8(pairs, pairs)));
    _mm512_store_si512(rows + kTileRowBytes, bf16_from_repeated_fp8(_mm512_unpackhi_epi8(pairs, pairs)));
  });
}

struct Fp8Pairs {
  static constexpr float kUnit = 0x1p8F;
  static constexpr int64_t kElementBytes = 1;

  alignas(64) uint16_t even[kStepCols / 2][kTileEdge];
  alignas(64) uint16_t odd[kStepCols / 2][kTileEdge];

  void write(const Window& window) {
    for_each_two(window, [this](int64_t pair, __m512i even_halves, __m512i odd_halves) {
      _mm512_store_si512(even[pair], even_halves);
      _mm512_store_si512(odd[pair], odd_halves);
    });
  }

  template <typename Visit>
  static void for_each(const Window& window, const Visit& visit) {
    Fp8Pairs halves;
    halves.write(window);
    keep_memory_order();
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < kStepCols / 2; ++pair) visit(pair, halves.even_at(pair), halves.odd_at(pair));
  }

  __m512 even_at(int64_t pair) const { return floats_of(even[pair]); }
  __m512 odd_at(int64_t pair) const { return floats_of(odd[pair]); }

 private:
  template <typename Visit>
  static void for_each_two(const Window& window, const Visit& visit) {
    transpose_pairs(window, [&visit](int64_t pair, __m512i pairs) {
      const __m512i one_pair_in_each_half = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
      const __m512i odd_bytes = _mm512_permutexvar_epi64(one_pair_in_each_half, pairs);
      const __m512i even_bytes = _mm512_slli_epi16(odd_bytes, 8);
      const __m512i sign_and_magnitude = same_words(0xbf80);
      visit(pair, _mm512_and_si512(_mm512_srai_epi16(even_bytes, 1), sign_and_magnitude),
            _mm512_and_si512(_mm512_srai_epi16(odd_bytes, 1), sign_and_magnitude));
    });
  }

  static __m512 floats_of(const uint16_t (&halves)[kTileEdge]) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
  }
};

struct Bf16Pairs {
  static constexpr float kUnit = 1.0F;
  static constexpr int64_t kElementBytes = 2;

  alignas(64) uint32_t both[kStepCols / 2][kTileEdge];

  void write(const Window& window) {
    transpose(window, [this](int64_t pair, __m512i values) { _mm512_store_si512(both[pair], values); });
  }

  template <typename Visit>
  static void for_each(const Window& window, const Visit& visit) {
    transpose(window, [&visit](int64_t pair, __m512i values) { visit(pair, even_of(values), odd_of(values)); });
  }

  __m512 even_at(int64_t pair) const { return even_of(_mm512_load_si512(both[pair])); }
  __m512 odd_at(int64_t pair) const { return odd_of(_mm512_load_si512(both[pair])); }

 private:
  static __m512 even_of(__m512i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(values, 16)); }
  static __m512 odd_of(__m512i values) {
    return _mm512_castsi512_ps(_mm512_and_si512(values, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
  }

  template <typename Write>
  static void transpose(const Window& window, const Write& write) {
    if (window.is_whole()) {
      transpose_dwords(window.source, window.stride, write);
      return;
    }
    alignas(64) std::byte values[kTileEdge * 2 * kStepCols] = {};
    copy_window(values, window, 2);
    transpose_dwords(values, 2 * kStepCols, write);
  }
};

}

}
