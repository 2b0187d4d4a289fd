#pragma once

#include <cmath>

#include "base/fp8.h"
#include "cpu/kernels.h"

namespace glint {

namespace {

inline double sum_of_squares(const float* values, int64_t count) {
  constexpr int64_t kSumLanes = 8;
  double lanes[kSumLanes] = {};
  int64_t index = 0;
  for (; index + kSumLanes <= count; index += kSumLanes) {
    for (int64_t lane = 0; lane < kSumLanes; ++lane) {
      const auto value = static_cast<double>(values[index + lane]);
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (; index < count; ++index) sum += static_cast<double>(values[index]) * static_cast<double>(values[index]);
  return sum;
}

inline void norm_row(float* out, const float* in, const float* weight, int64_t width, double epsilon) {
  const double mean = sum_of_squares(in, width) / static_cast<double>(width);
  const double factor = 1.0 / std::sqrt(mean + epsilon);
  for (int64_t index = 0; index < width; ++index) {
    out[index] = static_cast<float>(static_cast<double>(weight[index]) * static_cast<double>(in[index]) * factor);
  }
}

inline void rotate_head(float* head, const float* cosines, const float* sines, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  float* upper = head + half;
  for (int64_t index = 0; index < half; ++index) {
    const auto low = static_cast<double>(head[index]);
    const auto high = static_cast<double>(upper[index]);
    const auto cosine = static_cast<double>(cosines[index]);
    const auto sine = static_cast<double>(sines[index]);
    head[index] = static_cast<float>(low * cosine - high * sine);
    upper[index] = static_cast<float>(high * cosine + low * sine);
  }
}

inline void write_bf16(uint16_t* out, const float* in, int64_t count) {
  for (int64_t index = 0; index < count; ++index) out[index] = bf16_from_float(in[index]);
}

inline void round_row_to_bf16(float* values, int64_t count) {
  for (int64_t index = 0; index < count; ++index) values[index] = round_to_bf16(values[index]);
}

inline void add_weighted(double* sums, const float* values, double weight, int64_t count) {
  for (int64_t index = 0; index < count; ++index) sums[index] += weight * static_cast<double>(values[index]);
}

inline void write_sums(float* out, const double* sums, const float* values, int64_t count) {
  for (int64_t index = 0; index < count; ++index) {
    out[index] = static_cast<float>(sums[index] + static_cast<double>(values[index]));
  }
}

constexpr RowKernels kRowKernels{.norm = norm_row,
                                 .rotate_head = rotate_head,
                                 .write_bf16 = write_bf16,
                                 .round_to_bf16 = round_row_to_bf16,
                                 .add_weighted = add_weighted,
                                 .write_sums = write_sums};

}

}
