#pragma once

#include "cpu/x86_avx512.h"
#include "cpu/x86_pairs.h"

namespace glint {

namespace {

inline constexpr int64_t kBlockRows = 2 * kTileEdge;
inline constexpr int64_t kPrefetchBytes = 256;

class BlockRows {
 public:
  BlockRows(const GemmTile& tile, int64_t row, int64_t rows)
      : tile_(tile),
        row_(row),
        rows_(rows),
        row_bytes_(tile.weight->stride * tile.weight->element_bytes()),
        sources_{tile.weight->row(row), tile.weight->row(row) + kTileEdge * row_bytes_} {
    const Weight& weight = *tile.weight;
    const bool has_row_scale = weight.scale_kind == GLINT_SCALE_CHANNEL || weight.scale_kind == GLINT_SCALE_TENSOR;
    for (int64_t index = 0; index < rows; ++index) {
      factors_[index] = has_row_scale ? weight.scale_at(row + index, 0) : 1.0F;
      biases_[index] = tile.bias_at(row + index);
    }
  }

  bool scales_splits() const { return tile_.weight->scale_kind == GLINT_SCALE_TILE; }
  int64_t num_halves() const { return (rows_ + kTileEdge - 1) / kTileEdge; }

  template <int64_t kElementBytes>
  inline __attribute__((always_inline)) Window window(const ColumnStep& step, int half) const {
    constexpr int64_t kStepsPerLine = kTileRowBytes / (kStepCols * kElementBytes);
    constexpr int64_t kRows = kTileEdge / kStepsPerLine;
    const Window window = window_of<kElementBytes>(step, half);
    const std::byte* line = window.source + step.col / kStepCols % kStepsPerLine * kRows * row_bytes_;
    const std::byte* later = line + kBlockRows * row_bytes_;
#pragma GCC unroll 16
    for (int64_t row = 0; row < kRows; ++row, line += row_bytes_, later += row_bytes_) {
      _mm_prefetch(reinterpret_cast<const char*>(line + kPrefetchBytes), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(later), _MM_HINT_T1);
    }
    return window;
  }

  template <int64_t kElementBytes>
  inline __attribute__((always_inline)) Window window_of(const ColumnStep& step, int half) const {
    return {.source = sources_[half] + step.col * kElementBytes,
            .stride = row_bytes_,
            .rows = std::min(kTileEdge, rows_ - half * kTileEdge),
            .first = std::max<int64_t>(0, step.split_first - step.col),
            .last = std::min(kStepCols, step.split_last - step.col)};
  }

  __m512 split_scales(int half, int64_t col) const {
    const Weight& weight = *tile_.weight;
    if (!scales_splits()) return _mm512_set1_ps(1.0F);
    const int64_t row = half * kTileEdge;
    alignas(64) float scales[kTileEdge] = {};
    const int64_t rows = std::min(kTileEdge, rows_ - row);
    for (int64_t index = 0; index < rows; ++index) scales[index] = weight.scale_at(row_ + row + index, col);
    return _mm512_load_ps(scales);
  }

  class Writer {
   public:
    Writer(const BlockRows& rows, int half)
        : tile_(rows.tile_),
          out_(tile_.out + rows.row_ + half * kTileEdge),
          mask_(static_cast<__mmask16>((1U << std::min(kTileEdge, rows.rows_ - half * kTileEdge)) - 1U)),
          factors_(_mm512_load_ps(rows.factors_ + half * kTileEdge)),
          biases_(_mm512_load_ps(rows.biases_ + half * kTileEdge)) {}

    inline __attribute__((always_inline)) void write(int64_t token, __m512 total) const {
      const __m512 scales = _mm512_mul_ps(_mm512_set1_ps(tile_.input_scale(token, 0)), factors_);
      const __m512 values = _mm512_add_ps(_mm512_mul_ps(total, scales), biases_);
      _mm512_mask_storeu_ps(out_ + token * tile_.out_stride, mask_, values);
    }

   private:
    const GemmTile& tile_;
    float* out_;
    __mmask16 mask_;
    __m512 factors_;
    __m512 biases_;
  };

  Writer writer(int half) const { return {*this, half}; }

 private:
  const GemmTile& tile_;
  int64_t row_;
  int64_t rows_;
  int64_t row_bytes_;
  const std::byte* sources_[2];
  alignas(64) float factors_[kBlockRows] = {};
  alignas(64) float biases_[kBlockRows] = {};
};

template <typename Pairs>
class BroadcastGemm {
 public:
  static constexpr int64_t kFewTokens = 8;
  static constexpr int64_t kTwiceFewTokens = 2 * kFewTokens;

  static void multiply(const GemmTile& tile, std::byte* scratch) {
    const int64_t row_last = tile.row_first + tile.row_count;
    for (int64_t row = tile.row_first; row < row_last; row += kBlockRows) {
      const BlockRows rows(tile, row, std::min(kBlockRows, row_last - row));
      const BroadcastGemm gemm(tile, rows, scratch);
      if (tile.count <= kTwiceFewTokens) {
        gemm.multiply_halves();
      } else {
        for (int64_t token = 0; token < tile.count; token += kChunkTokens) {
          gemm.multiply_chunk(token, std::min(kChunkTokens, tile.count - token));
        }
      }
    }
  }

 private:
  static constexpr int64_t kChunkTokens = 256;
  static constexpr int64_t kGroupTokens = 4;
  static constexpr int64_t kPanelSteps = 6;

  struct FloatPairs {
    alignas(64) float even[kStepCols / 2][kTileEdge];
    alignas(64) float odd[kStepCols / 2][kTileEdge];

    __m512 even_at(int64_t pair) const { return _mm512_load_ps(even[pair]); }
    __m512 odd_at(int64_t pair) const { return _mm512_load_ps(odd[pair]); }
  };

  struct NoRows {
    void prefetch(int64_t) const {}
  };

  class LaterRows {
   public:
    LaterRows(const Window& window, const ColumnStep& step, int64_t cols) : stride_(window.stride) {
      const int64_t place = step.col * Pairs::kElementBytes;
      const int64_t row_bytes = cols * Pairs::kElementBytes;
      const bool is_second_half = place % kTileRowBytes != 0;
      const bool is_in_row = place + kPrefetchBytes < row_bytes;
      source_ = window.source + (is_second_half ? kTileEdge / 2 * stride_ : 0) + kPrefetchBytes +
                (is_in_row ? 0 : kTileEdge * stride_ - row_bytes);
    }

    inline __attribute__((always_inline)) void prefetch(int64_t pair) const {
      constexpr int64_t kPairsPerRow = 2 / Pairs::kElementBytes;
      if (pair % kPairsPerRow != 0) return;
      _mm_prefetch(reinterpret_cast<const char*>(source_ + pair / kPairsPerRow * stride_), _MM_HINT_T0);
    }

   private:
    int64_t stride_;
    const std::byte* source_;
  };

  using Panel = FloatPairs[kPanelSteps][2];
  using ChunkSums = float[kChunkTokens][2][kTileEdge];
  static_assert(sizeof(Panel) + 2 * sizeof(ChunkSums) <= kLeastGemmScratch);

  struct Block {
    int64_t first_col;
    int64_t num_steps;
    bool is_first;
    bool is_last;
    int64_t split_first;
    __m512 scales[2];
  };

  BroadcastGemm(const GemmTile& tile, const BlockRows& rows, std::byte* scratch)
      : tile_(tile),
        rows_(rows),
        panel_(reinterpret_cast<FloatPairs (*)[2]>(scratch)),
        sums_(reinterpret_cast<float (*)[2][kTileEdge]>(scratch + sizeof(Panel))),
        totals_(sums_ + kChunkTokens) {}

  void multiply_halves() const {
    for (int half = 0; half < rows_.num_halves(); ++half) {
      if (tile_.count <= kFewTokens) {
        multiply_few(half);
      } else {
        multiply_twice_few(half);
      }
    }
  }

  template <int kTokens = 1>
  void multiply_few(int half) const {
    if constexpr (kTokens < kFewTokens) {
      if (tile_.count > kTokens) return multiply_few<kTokens + 1>(half);
    }
    multiply_groups<kTokens, 0>(half);
  }

  template <int kTokens = kFewTokens / 2 + 1>
  void multiply_twice_few(int half) const {
    if constexpr (kTokens < kFewTokens) {
      if (tile_.count > 2 * kTokens) return multiply_twice_few<kTokens + 1>(half);
    }
    if (tile_.count == 2 * kTokens) {
      multiply_groups<kTokens, kTokens>(half);
    } else {
      multiply_groups<kTokens, kTokens - 1>(half);
    }
  }

  template <int kFirst, int kSecond>
  void multiply_groups(int half) const {
    const float* inputs[kFirst + kSecond];
    read_inputs<kFirst + kSecond>(inputs, 0);
    const SplitColumns columns(*tile_.weight);
    __m512 totals[kFirst + kSecond] = {};
    for (ColumnStep step = columns.first(); columns.contains(step);) {
      const int64_t split_first = step.split_first;
      __m512 first[1][kFirst] = {};
      __m512 second[1][std::max(kSecond, 1)] = {};
      for (; step.split_first == split_first; step = columns.after(step)) {
        Pairs weights[1];
        const Window window = rows_.template window_of<Pairs::kElementBytes>(step, half);
        weights[0].write(window);
        keep_memory_order();
        add_step<1, kFirst>(first, weights, inputs, step.col, LaterRows(window, step, tile_.weight->cols));
        if constexpr (kSecond > 0) add_step<1, kSecond>(second, weights, inputs + kFirst, step.col, NoRows());
      }
      const __m512 scales = rows_.split_scales(half, split_first);
      for (int t = 0; t < kFirst; ++t) totals[t] = add_split(totals[t], first[0][t], scales);
      for (int t = 0; t < kSecond; ++t) totals[kFirst + t] = add_split(totals[kFirst + t], second[0][t], scales);
    }
    const BlockRows::Writer out = rows_.writer(half);
    for (int t = 0; t < kFirst + kSecond; ++t) out.write(t, totals[t]);
  }

  void multiply_chunk(int64_t token, int64_t tokens) const {
    const SplitColumns columns(*tile_.weight);
    for (ColumnStep step = columns.first(); columns.contains(step);) {
      Block block{.first_col = step.col,
                  .num_steps = 0,
                  .is_first = step.col <= step.split_first,
                  .is_last = false,
                  .split_first = step.split_first,
                  .scales = {}};
      while (block.num_steps < kPanelSteps && step.split_first == block.split_first) {
        for (int half = 0; half < 2; ++half) fill(panel_[block.num_steps][half], step, half);
        ++block.num_steps;
        step = columns.after(step);
      }
      block.is_last = step.split_first != block.split_first;
      if (block.is_last) {
        for (int half = 0; half < 2; ++half) block.scales[half] = rows_.split_scales(half, block.split_first);
      }
      for_each_group(tokens, [&](int64_t first, int64_t count) { add_group(block, token, first, count); });
    }
    for (int half = 0; half < rows_.num_halves(); ++half) {
      const BlockRows::Writer out = rows_.writer(half);
      for (int64_t t = 0; t < tokens; ++t) out.write(token + t, _mm512_load_ps(totals_[t][half]));
    }
  }

  template <typename Visit>
  static void for_each_group(int64_t tokens, const Visit& visit) {
    int64_t groups = (tokens + kGroupTokens - 1) / kGroupTokens;
    for (int64_t first = 0; first < tokens; --groups) {
      const int64_t count = (tokens - first + groups - 1) / groups;
      visit(first, count);
      first += count;
    }
  }

  void fill(FloatPairs& target, const ColumnStep& step, int half) const {
    if (half >= rows_.num_halves()) {
      target = {};
      return;
    }
    Pairs::for_each(rows_.template window<Pairs::kElementBytes>(step, half), [&target](int64_t pair, __m512 even, __m512 odd) {
      _mm512_store_ps(target.even[pair], even);
      _mm512_store_ps(target.odd[pair], odd);
    });
  }

  template <int kTokens = 1>
  void add_group(const Block& block, int64_t token, int64_t first, int64_t count) const {
    if constexpr (kTokens < kGroupTokens) {
      if (count > kTokens) return add_group<kTokens + 1>(block, token, first, count);
    }
    const float* inputs[kTokens];
    read_inputs<kTokens>(inputs, token + first);
    __m512 sums[2][kTokens] = {};
    if (!block.is_first) {
      for (int half = 0; half < 2; ++half) {
        for (int t = 0; t < kTokens; ++t) sums[half][t] = _mm512_load_ps(sums_[first + t][half]);
      }
    }
    for (int64_t step = 0; step < block.num_steps; ++step) {
      add_step<2, kTokens>(sums, panel_[step], inputs, block.first_col + step * kStepCols, NoRows());
    }
    for (int half = 0; half < 2; ++half) {
      for (int t = 0; t < kTokens; ++t) {
        if (block.is_last) {
          float* total = totals_[first + t][half];
          const __m512 before = block.split_first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(total);
          _mm512_store_ps(total, add_split(before, sums[half][t], block.scales[half]));
        } else {
          _mm512_store_ps(sums_[first + t][half], sums[half][t]);
        }
      }
    }
  }

  static __m512 add_split(__m512 total, __m512 sum, __m512 scales) {
    return _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(Pairs::kUnit)), scales, total);
  }

  template <int kTokens>
  void read_inputs(const float* (&inputs)[kTokens], int64_t token) const {
    const auto* operand = reinterpret_cast<const float*>(tile_.operand);
    for (int t = 0; t < kTokens; ++t) inputs[t] = operand + tile_.input_row(token + t) * tile_.operand_stride;
  }

  template <int kHalves, int kTokens>
  static inline __attribute__((always_inline)) void keep_in_memory(__m512 (&sums)[kHalves][kTokens]) {
    asm volatile("" : "+m"(sums));
  }

  static inline __attribute__((always_inline)) const float* in_register(const float* values) {
    asm("" : "+r"(values));
    return values;
  }

  template <int kHalves, int kTokens, typename Weights, typename Later>
  static inline __attribute__((always_inline)) void add_step(__m512 (&sums)[kHalves][kTokens], const Weights* weights,
                                                             const float* const* inputs, int64_t col,
                                                             const Later& later) {
    if constexpr (kHalves == 2) keep_in_memory(sums);
    __m512 even[kHalves][kTokens] = {};
    __m512 odd[kHalves][kTokens] = {};
    const float* values[kTokens];
    for (int t = 0; t < kTokens; ++t) values[t] = in_register(inputs[t] + col);
#pragma GCC unroll 16
    for (int64_t pair = 0; pair < kStepCols / 2; ++pair) {
      later.prefetch(pair);
      __m512 even_weights[kHalves];
      __m512 odd_weights[kHalves];
      for (int half = 0; half < kHalves; ++half) {
        even_weights[half] = weights[half].even_at(pair);
        odd_weights[half] = weights[half].odd_at(pair);
      }
      if constexpr (kHalves == 2) keep_memory_order();
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const __m512 even_input = _mm512_set1_ps(values[t][2 * pair]);
        const __m512 odd_input = _mm512_set1_ps(values[t][2 * pair + 1]);
        for (int half = 0; half < kHalves; ++half) {
          even[half][t] = _mm512_fmadd_ps(even_weights[half], even_input, even[half][t]);
          odd[half][t] = _mm512_fmadd_ps(odd_weights[half], odd_input, odd[half][t]);
        }
      }
    }
    for (int half = 0; half < kHalves; ++half) {
      for (int t = 0; t < kTokens; ++t) {
        sums[half][t] = _mm512_add_ps(sums[half][t], _mm512_add_ps(even[half][t], odd[half][t]));
      }
    }
  }

  const GemmTile& tile_;
  const BlockRows& rows_;
  FloatPairs (*panel_)[2];
  float (*sums_)[2][kTileEdge];
  float (*totals_)[2][kTileEdge];
};

}

}
