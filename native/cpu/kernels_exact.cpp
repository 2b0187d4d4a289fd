#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "base/fp8.h"
#include "cpu/kernels.h"

namespace glint {

namespace {

constexpr int64_t kSumLanes = 8;

double weight_value(const Weight& weight, int64_t row, int64_t col) {
  const std::byte* data = weight.row(row);
  if (weight.dtype == GLINT_DTYPE_F8_E4M3) {
    const double value = e4m3_table()[std::to_integer<uint8_t>(data[col])];
    return value * static_cast<double>(weight.scale_at(row, col));
  }
  uint16_t bits = 0;
  std::memcpy(&bits, data + 2 * col, sizeof(bits));
  return static_cast<double>(float_from_bf16(bits));
}

double dot(const float* left, const double* right, int64_t count) {
  double lanes[kSumLanes] = {};
  int64_t index = 0;
  for (; index + kSumLanes <= count; index += kSumLanes) {
    for (int64_t lane = 0; lane < kSumLanes; ++lane) {
      lanes[lane] += static_cast<double>(left[index + lane]) * right[index + lane];
    }
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (; index < count; ++index) sum += static_cast<double>(left[index]) * right[index];
  return sum;
}

void gemm_exact(const GemmTile& tile, std::byte* scratch) {
  const Weight& weight = *tile.weight;
  auto* row_values = reinterpret_cast<double*>(scratch);
  const auto* operand = reinterpret_cast<const float*>(tile.operand);
  for (int64_t row = tile.row_first; row < tile.row_first + tile.row_count; ++row) {
    for (int64_t col = 0; col < weight.cols; ++col) row_values[col] = weight_value(weight, row, col);
    for (int64_t index = 0; index < tile.count; ++index) {
      const float* input = operand + tile.input_row(index) * tile.operand_stride;
      double sum = 0;
      for (int64_t group = 0; group < tile.input_groups; ++group) {
        const ColumnRange cols = tile.group_cols(group);
        sum += static_cast<double>(tile.input_scale(index, group)) *
               dot(input + cols.first, row_values + cols.first, cols.count);
      }
      tile.out[index * tile.out_stride + row] = static_cast<float>(sum + static_cast<double>(tile.bias_at(row)));
    }
  }
}

double stored_value(const std::byte* data, int64_t index, int32_t dtype) {
  if (dtype == GLINT_DTYPE_F32) return static_cast<double>(reinterpret_cast<const float*>(data)[index]);
  return static_cast<double>(float_from_bf16(reinterpret_cast<const uint16_t*>(data)[index]));
}

struct SplitSum {
  double exponent;
  double weight_sum;
};

SplitSum weigh_split(float* scores, int64_t count, bool rounds_weights) {
  const auto highest = static_cast<double>(*std::max_element(scores, scores + count));
  const double exponent = std::ceil(highest * std::numbers::log2e);
  double weight_sum = 0;
  for (int64_t index = 0; index < count; ++index) {
    const auto weight = static_cast<float>(std::exp(static_cast<double>(scores[index]) - exponent * std::numbers::ln2));
    weight_sum += static_cast<double>(weight);
    scores[index] = rounds_weights ? round_to_bf16(weight) : weight;
  }
  return {exponent, weight_sum};
}

struct QueryRow {
  float* out;
  const float* query;
  int64_t positions;
};

void attend_query(const AttentionTile& tile, const QueryRow& row, float* scores, double* sums, double* split_sums) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(tile.head_dim));
  const auto page_of = [&](const std::byte* base, int64_t position) {
    return base + tile.pages[position / tile.page_tokens] * tile.page_bytes;
  };
  std::fill(sums, sums + tile.head_dim, 0.0);
  SplitSum total{-std::numeric_limits<double>::infinity(), 0.0};
  for (int64_t start = tile.first_split(); start < row.positions; start += kSplitPositions) {
    const int64_t first = std::max(start, tile.context_first);
    const int64_t count = std::min(start + kSplitPositions, row.positions) - first;
    for (int64_t index = 0; index < count; ++index) {
      const std::byte* keys = page_of(tile.keys, first + index);
      const int64_t offset = (first + index) % tile.page_tokens;
      double sum = 0;
      for (int64_t dim = 0; dim < tile.head_dim; ++dim) {
        sum += static_cast<double>(row.query[dim]) * stored_value(keys, dim * tile.page_tokens + offset, tile.dtype);
      }
      scores[index] = static_cast<float>(sum * scale);
    }
    const SplitSum split = weigh_split(scores, count, tile.dtype == GLINT_DTYPE_BF16);
    std::fill(split_sums, split_sums + tile.head_dim, 0.0);
    for (int64_t index = 0; index < count; ++index) {
      const std::byte* values = page_of(tile.values, first + index);
      const int64_t offset = (first + index) % tile.page_tokens * tile.head_dim;
      for (int64_t dim = 0; dim < tile.head_dim; ++dim) {
        split_sums[dim] += static_cast<double>(scores[index]) * stored_value(values, offset + dim, tile.dtype);
      }
    }
    const double exponent = std::max(total.exponent, split.exponent);
    const double keep = std::exp2(total.exponent - exponent);
    const double take = std::exp2(split.exponent - exponent);
    for (int64_t dim = 0; dim < tile.head_dim; ++dim) sums[dim] = sums[dim] * keep + split_sums[dim] * take;
    total = {exponent, total.weight_sum * keep + split.weight_sum * take};
  }
  for (int64_t dim = 0; dim < tile.head_dim; ++dim) row.out[dim] = static_cast<float>(sums[dim] / total.weight_sum);
}

void attend_exact(const AttentionTile& tile, std::byte* scratch) {
  auto* sums = reinterpret_cast<double*>(scratch);
  double* split_sums = sums + tile.head_dim;
  auto* scores = reinterpret_cast<float*>(split_sums + tile.head_dim);
  for (int64_t index = 0; index < tile.row_count; ++index) {
    for (int64_t head = 0; head < tile.group_heads; ++head) {
      const int64_t offset = index * tile.row_stride + head * tile.head_dim;
      attend_query(tile, {tile.out + offset, tile.query + offset, tile.first_position + index + 1}, scores, sums,
                   split_sums);
    }
  }
}

void swiglu_exact(float* out, const float* gate, const float* up, int64_t count) {
  for (int64_t index = 0; index < count; ++index) {
    const auto value = static_cast<double>(gate[index]);
    out[index] = static_cast<float>(value / (1.0 + std::exp(-value)) * static_cast<double>(up[index]));
  }
}

float quantise_exact(std::byte* out, const float* in, int64_t count) {
  float highest = 0.0F;
  for (int64_t index = 0; index < count; ++index)
    highest = std::fabs(in[index]) > highest ? std::fabs(in[index]) : highest;
  const float scale = highest / kE4m3Max == 0.0F ? 1.0F : highest / kE4m3Max;
  auto* values = reinterpret_cast<float*>(out);
  for (int64_t index = 0; index < count; ++index) values[index] = float_from_e4m3(e4m3_from_float(in[index] / scale));
  return scale;
}

}

const KernelSet& exact_kernels() {
  static const KernelSet kernels{.name = "exact",
                                 .id = GLINT_KERNELS_EXACT,
                                 .fp8_form = OperandForm::kFloat,
                                 .gemm_fp8 = gemm_exact,
                                 .gemm_floats = gemm_exact,
                                 .attend = attend_exact,
                                 .swiglu = swiglu_exact,
                                 .quantise = quantise_exact,
                                 .rows = plain_kernels().rows,
                                 .multiply_adds = plain_kernels().multiply_adds,
                                 .sums_groups = true};
  return kernels;
}

}
