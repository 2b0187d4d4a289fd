#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/fp8.h"
#include "cpu/kernels.h"

namespace glint {

namespace {

template <int kLanes>
struct Vectors;

template <>
struct Vectors<4> {
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
};

template <>
struct Vectors<8> {
  typedef float Floats __attribute__((vector_size(32)));
  typedef int32_t Ints __attribute__((vector_size(32)));
};

template <>
struct Vectors<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef int32_t Ints __attribute__((vector_size(64)));
};

template <int kLanes>
struct Lanes {
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;

  static Floats broadcast(float value) {
    Floats lanes = {};
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = value;
    return lanes;
  }

  static Ints places(int64_t first) {
    Ints lanes = {};
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    return lanes + static_cast<int32_t>(first);
  }

  static float highest(Floats lanes) {
    float values[kLanes];
    store(values, lanes);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) values[lane] = std::max(values[lane], values[lane + width]);
    }
    return values[0];
  }

  static Floats load(const float* source) {
    Floats value;
    std::memcpy(&value, source, sizeof(value));
    return value;
  }

  static void store(float* target, Floats value) { std::memcpy(target, &value, sizeof(value)); }

  static Floats round_to_bf16(Floats value) {
    value = value != value ? broadcast(std::numeric_limits<float>::quiet_NaN()) : value;
    const auto bits = std::bit_cast<Ints>(value);
    return std::bit_cast<Floats>((bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffff);
  }

  static Floats exponential(Floats value, float factor = 1.0F) {
    constexpr float kLog2E = 1.44269504088896340736F;
    constexpr float kLn2High = 0.693359375F;
    constexpr float kLn2Low = -2.12194440e-4F;
    constexpr float kLowest = -87.0F;
    constexpr float kHighest = 88.0F;
    value = value < kLowest ? broadcast(kLowest) : value;
    value = value > kHighest ? broadcast(kHighest) : value;
    const Floats scaled = value * kLog2E;
    const Floats shifted = scaled + (scaled < 0.0F ? broadcast(-0.5F) : broadcast(0.5F));
    const Ints power = __builtin_convertvector(shifted, Ints);
    const Floats whole = __builtin_convertvector(power, Floats);
    const Floats rest = value - whole * kLn2High - whole * kLn2Low;
    Floats series = broadcast(1.9875691500e-4F);
    series = series * rest + 1.3981999507e-3F;
    series = series * rest + 8.3334519073e-3F;
    series = series * rest + 4.1665795894e-2F;
    series = series * rest + 1.6666665459e-1F;
    series = series * rest + 5.0000001201e-1F;
    series = series * rest * rest + rest + 1.0F;
    const Ints bits = (power << 23) + std::bit_cast<int32_t>(factor);
    return series * std::bit_cast<Floats>(bits);
  }
};

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}

}
