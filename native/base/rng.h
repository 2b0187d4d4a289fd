#pragma once

#include <cmath>
#include <cstdint>

namespace glint {

constexpr uint64_t mix_bits(uint64_t value) {
  value ^= value >> 30;
  value *= 0xbf58476d1ce4e5b9U;
  value ^= value >> 27;
  value *= 0x94d049bb133111ebU;
  value ^= value >> 31;
  return value;
}

constexpr uint64_t row_key(uint64_t seed, uint32_t choice_index, int32_t position) {
  const uint64_t place = (uint64_t{choice_index} << 32) | static_cast<uint32_t>(position);
  return mix_bits(mix_bits(seed + 0x9e3779b97f4a7c15U) + mix_bits(place + 0xd1b54a32d192ed03U));
}

constexpr uint64_t token_bits(uint64_t key, int32_t token) {
  return mix_bits(key + 0x9e3779b97f4a7c15U * (uint64_t{static_cast<uint32_t>(token)} + 1));
}

constexpr uint64_t random_bits(uint64_t seed, uint32_t choice_index, int32_t position, int32_t token) {
  return token_bits(row_key(seed, choice_index, position), token);
}

constexpr double open_uniform(uint64_t bits) { return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52; }

inline double gumbel(uint64_t bits) { return -std::log(-std::log(open_uniform(bits))); }

}
