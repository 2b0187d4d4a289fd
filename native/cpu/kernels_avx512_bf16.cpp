#include "cpu/x86_broadcast_gemm.h"
#include "cpu/x86_upper_halves.h"

namespace glint {

namespace {

constexpr int kGroupTokens = 6;
constexpr int64_t kStepBytes = 2 * kTileBytes;

struct DotIsa {
  static constexpr int kLanes = Avx512Isa::kLanes;

  static __m512 multiply_add(__m512 left, __m512 right, __m512 sum) {
    return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(left), std::bit_cast<__m512bh>(right));
  }
};

class DotGemm {
 public:
  DotGemm(const GemmTile& tile, const BlockRows& rows, std::byte* panel)
      : tile_(tile), rows_(rows), columns_(*tile.weight), panel_(panel) {}

  void run() const {
    for (int64_t token = 0; token < tile_.count; token += kGroupTokens) {
      multiply_tokens(token, std::min<int64_t>(kGroupTokens, tile_.count - token));
    }
  }

 private:
  template <int kTokens = kGroupTokens>
  void multiply_tokens(int64_t token, int64_t tokens) const {
    if (tokens == kTokens) {
      if (rows_.num_halves() == 2) return multiply_group<2, kTokens>(token);
      return multiply_group<1, kTokens>(token);
    }
    if constexpr (kTokens > 1) multiply_tokens<kTokens - 1>(token, tokens);
  }

  template <int kHalves, int kTokens>
  void multiply_group(int64_t token) const {
    const std::byte* inputs[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      inputs[t] = tile_.operand + 2 * tile_.input_row(token + t) * tile_.operand_stride;
    }
    __m512 totals[kHalves][kTokens] = {};
    __m512 sums[kHalves][kTokens] = {};
    std::byte* weights = panel_;
    const int64_t slot_bytes = tile_.count > kGroupTokens ? kStepBytes : 0;
    for (ColumnStep step = columns_.first(); columns_.contains(step); weights += slot_bytes) {
      if (token == 0) {
        for (int half = 0; half < kHalves; ++half)
          write_fp8_tile(weights + half * kTileBytes, rows_.window<1>(step, half));
      }
      add_step<kHalves, kTokens>(sums, inputs, step.col, weights);
      const ColumnStep next = columns_.after(step);
      if (next.split_first != step.split_first) add_split<kHalves, kTokens>(totals, sums, step.split_first);
      step = next;
    }
    for (int half = 0; half < kHalves; ++half) {
      const BlockRows::Writer out = rows_.writer(half);
      for (int t = 0; t < kTokens; ++t) out.write(token + t, totals[half][t]);
    }
  }

  template <int kHalves, int kTokens>
  static inline __attribute__((always_inline)) void add_step(__m512 (&sums)[kHalves][kTokens],
                                                             const std::byte* const (&inputs)[kTokens], int64_t col,
                                                             const std::byte* weights) {
    __m512 parts[kHalves][kTokens] = {};
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < kStepCols / 2; ++pair) {
      __m512 rows[kHalves];
      for (int half = 0; half < kHalves; ++half) {
        rows[half] = _mm512_load_ps(weights + half * kTileBytes + pair * kTileRowBytes);
      }
      for (int t = 0; t < kTokens; ++t) {
        float input;
        std::memcpy(&input, inputs[t] + 2 * (col + 2 * pair), sizeof(input));
        for (int half = 0; half < kHalves; ++half) {
          parts[half][t] = DotIsa::multiply_add(rows[half], _mm512_set1_ps(input), parts[half][t]);
        }
      }
    }
    for (int half = 0; half < kHalves; ++half) {
      for (int t = 0; t < kTokens; ++t) sums[half][t] = _mm512_add_ps(sums[half][t], parts[half][t]);
    }
  }

  template <int kHalves, int kTokens>
  void add_split(__m512 (&totals)[kHalves][kTokens], __m512 (&sums)[kHalves][kTokens], int64_t col) const {
    for (int half = 0; half < kHalves; ++half) {
      const __m512 scales = rows_.split_scales(half, col);
      for (int t = 0; t < kTokens; ++t) {
        totals[half][t] = _mm512_fmadd_ps(sums[half][t], scales, totals[half][t]);
        sums[half][t] = _mm512_setzero_ps();
      }
    }
  }

  const GemmTile& tile_;
  const BlockRows& rows_;
  SplitColumns columns_;
  std::byte* panel_;
};

void multiply_fp8(const GemmTile& tile, std::byte* scratch) {
  const int64_t row_last = tile.row_first + tile.row_count;
  for (int64_t row = tile.row_first; row < row_last; row += kBlockRows) {
    const BlockRows rows(tile, row, std::min(kBlockRows, row_last - row));
    DotGemm(tile, rows, scratch).run();
  }
}

int64_t dot_multiply_adds(float* values, int64_t rounds) { return 2 * lane_multiply_adds<DotIsa>(values, rounds); }

}

const KernelSet& avx512_bf16_kernels() {
  static constexpr KernelSet kernels{.name = "avx512_bf16",
                                     .id = GLINT_KERNELS_AVX512_BF16,
                                     .fp8_form = OperandForm::kBf16,
                                     .gemm_fp8 = kClearingUpperHalves<multiply_fp8>,
                                     .gemm_floats = kClearingUpperHalves<BroadcastGemm<Bf16Pairs>::multiply>,
                                     .attend = kClearingUpperHalves<LaneAttention<Avx512Isa>::attend>,
                                     .swiglu = kClearingUpperHalves<lane_swiglu<Avx512Isa>>,
                                     .quantise = kClearingUpperHalves<LaneQuantise<Avx512Isa>::to_bf16>,
                                     .rows = kRowKernels,
                                     .multiply_adds = dot_multiply_adds};
  return kernels;
}

}
