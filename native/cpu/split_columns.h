#pragma once

#include <algorithm>

#include "cpu/kernels.h"

namespace glint {

namespace {

inline constexpr int64_t kStepCols = 32;

struct ColumnStep {
  int64_t split_first;
  int64_t split_last;
  int64_t col;
};

class SplitColumns {
 public:
  explicit SplitColumns(const Weight& weight) : weight_(weight) {}

  ColumnStep first() const { return from(0); }
  bool contains(const ColumnStep& step) const { return step.split_first < weight_.cols; }

  ColumnStep after(const ColumnStep& step) const {
    const int64_t col = step.col + kStepCols;
    return col < step.split_last ? ColumnStep{step.split_first, step.split_last, col} : from(step.split_last);
  }

 private:
  ColumnStep from(int64_t first) const {
    const int64_t tile_end = ((weight_.col_first + first) / kScaleTile + 1) * kScaleTile - weight_.col_first;
    const int64_t last = weight_.scale_kind == GLINT_SCALE_TILE ? std::min(tile_end, weight_.cols) : weight_.cols;
    return {first, last, first / kStepCols * kStepCols};
  }

  const Weight& weight_;
};

}

}
