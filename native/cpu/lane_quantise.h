#pragma once

#include <type_traits>

#include "cpu/lanes.h"

namespace glint {

namespace {

template <typename Isa>
class LaneQuantise {
 public:
  using Lane = Lanes<Isa::kLanes>;
  using Floats = typename Lane::Floats;
  using Ints = typename Lane::Ints;

  static float to_floats(std::byte* out, const float* in, int64_t count) {
    const float scale = row_scale(in, count);
    auto* target = reinterpret_cast<float*>(out);
    write_fp8(in, count, scale, [target](int64_t index, Floats values) { Lane::store(target + index, values); });
    return scale;
  }

  static float to_bf16(std::byte* out, const float* in, int64_t count) {
    const float scale = row_scale(in, count);
    auto* target = reinterpret_cast<uint16_t*>(out);
    write_fp8(in, count, scale, [target](int64_t index, Floats values) { Isa::store_bf16(target + index, values); });
    return scale;
  }

 private:
  static float row_scale(const float* in, int64_t count) {
    Floats highest = {};
    int64_t index = 0;
    for (; index + Isa::kLanes <= count; index += Isa::kLanes) {
      const Floats magnitude = magnitude_of(Lane::load(in + index));
      highest = magnitude > highest ? magnitude : highest;
    }
    float most = 0.0F;
    for (int lane = 0; lane < Isa::kLanes; ++lane) most = std::max(most, highest[lane]);
    for (; index < count; ++index) most = std::fabs(in[index]) > most ? std::fabs(in[index]) : most;
    const float scale = most / kE4m3Max;
    return scale == 0.0F ? 1.0F : scale;
  }

  static Floats magnitude_of(Floats value) { return std::bit_cast<Floats>(std::bit_cast<Ints>(value) & 0x7fffffff); }

  static Floats round_to_e4m3(Floats value) {
    constexpr float kSmallestNormal = 0x1p-6F;
    constexpr float kKeepThreeBits = 0x1.8p20F;
    const Floats power = std::bit_cast<Floats>(std::bit_cast<Ints>(value) & 0x7f800000);
    const Floats rounder = (power < kSmallestNormal ? Lane::broadcast(kSmallestNormal) : power) * kKeepThreeBits;
    const Floats rounded = (value + rounder) - rounder;
    return rounded;
  }

  template <typename Write>
  static void write_fp8(const float* in, int64_t count, float scale, const Write& write) {
    int64_t index = 0;
    for (; index + Isa::kLanes <= count; index += Isa::kLanes) {
      write(index, round_to_e4m3(Lane::load(in + index) / scale));
    }
    if (index == count) return;
    float rest[Isa::kLanes] = {};
    std::copy(in + index, in + count, rest);
    write(index, round_to_e4m3(Lane::load(rest) / scale));
  }
};

}

}
