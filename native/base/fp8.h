#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace glint {

inline constexpr float kE4m3Max = 448.0F;

inline float float_from_bf16(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16U); }

inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const uint32_t rounded = bits + 0x7fffU + ((bits >> 16U) & 1U);
  return static_cast<uint16_t>((is_nan ? bits | 0x400000U : rounded) >> 16U);
}

inline float round_to_bf16(float value) { return float_from_bf16(bf16_from_float(value)); }

inline uint8_t e4m3_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t sign = (bits >> 24U) & 0x80U;
  const uint32_t max_bits = std::bit_cast<uint32_t>(kE4m3Max);
  const uint32_t smallest_normal_bits = 0x3c800000U;
  const uint32_t normal = ((magnitude + 0x7ffffU + ((magnitude >> 20U) & 1U)) >> 20U) - (120U << 3U);
  constexpr float kSubnormalRounder = 16384.0F;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kSubnormalRounder) -
                             std::bit_cast<uint32_t>(kSubnormalRounder);
  uint32_t e4m3 = magnitude < smallest_normal_bits ? subnormal : normal;
  e4m3 = magnitude >= max_bits ? 0x7eU : e4m3;
  e4m3 = magnitude > 0x7f800000U ? 0x7fU : e4m3;
  return static_cast<uint8_t>(sign | e4m3);
}

inline float float_from_e4m3(uint8_t e4m3) {
  const uint32_t magnitude = e4m3 & 0x7fU;
  const uint32_t sign = static_cast<uint32_t>(e4m3 & 0x80U) << 24U;
  if (magnitude == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  const float scaled = std::bit_cast<float>(magnitude << 20U) * 0x1p120F;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
}

inline const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (uint32_t e4m3 = 0; e4m3 < 256; ++e4m3) values[e4m3] = float_from_e4m3(static_cast<uint8_t>(e4m3));
    return values;
  }();
  return table;
}

}
