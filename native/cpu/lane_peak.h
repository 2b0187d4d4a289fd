#pragma once

#include "cpu/lanes.h"

namespace glint {

namespace {

template <typename Isa>
int64_t lane_multiply_adds(float* values, int64_t rounds) {
  using Lane = Lanes<Isa::kLanes>;
  using Floats = typename Lane::Floats;
  constexpr int kLefts = 3;
  constexpr int kRights = 4;
  static_assert((kLefts + kRights) * Isa::kLanes <= kPeakValues);
  Floats sums[kLefts][kRights] = {};
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" ::: "memory");
#pragma GCC unroll 4
    for (int left = 0; left < kLefts; ++left) {
#pragma GCC unroll 4
      for (int right = 0; right < kRights; ++right) {
        sums[left][right] = Isa::multiply_add(Lane::load(values + left * Isa::kLanes),
                                              Lane::load(values + (kLefts + right) * Isa::kLanes), sums[left][right]);
      }
    }
  }
  asm volatile("" ::: "memory");
#pragma GCC unroll 4
  for (int left = 0; left < kLefts; ++left) {
#pragma GCC unroll 4
    for (int right = 0; right < kRights; ++right) {
      const int place = (left + right) * Isa::kLanes;
      Lane::store(values + place, Lane::load(values + place) + sums[left][right]);
    }
  }
  return rounds * kLefts * kRights * Isa::kLanes;
}

}

}
