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
  explicit SplitColumns(const Weight& weight)
      : cols_(weight.cols), col_first_(weight.col_first), is_split_(weight.scale_kind == GLINT_SCALE_TILE) {}

  ColumnStep first() const { return from(0); }
  bool contains(const ColumnStep& step) const { return step.split_first < cols_; }

  ColumnStep after(const ColumnStep& step) const {
    const int64_t col = step.col + kStepCols;
    return col < step.split_last ? ColumnStep{step.split_first, step.split_last, col} : from(step.split_last);
  }

 private:
  ColumnStep from(int64_t first) const {
    const int64_t tile_end = ((col_first_ + first) / kScaleTile + 1) * kScaleTile - col_first_;
    return {first, is_split_ ? std::min(tile_end, cols_) : cols_, first / kStepCols * kStepCols};
  }

  int64_t cols_;
  int64_t col_first_;
  bool is_split_;
};

}

}
