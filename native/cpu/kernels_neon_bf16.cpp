#include "cpu/arm64_neon.h"
#include "cpu/split_columns.h"

namespace glint {

namespace {

constexpr int kRowPairs = 4;
constexpr int64_t kBlockRows = 2 * kRowPairs;
constexpr int kTokenPairs = 4;
constexpr int64_t kColsAtOnce = 8;
constexpr int64_t kPrefetchBytes = 256;
constexpr int64_t kStepValues = kBlockRows * kStepCols;

struct MatrixIsa {
  static constexpr int kLanes = NeonIsa::kLanes;

  static float32x4_t multiply_add(float32x4_t left, float32x4_t right, float32x4_t sum) {
    return vbfmmlaq_f32(sum, vreinterpretq_bf16_f32(left), vreinterpretq_bf16_f32(right));
  }
};

uint8x16x2_t bf16_from_fp8(uint8x16_t values) {
  const uint8x16_t least_low = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60,
                                0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
  const uint8x16_t least_high = {0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c,
                                 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
  constexpr uint8_t kExponentShift = 120 / 2;
  const uint8x16_t magnitude = vandq_u8(values, vdupq_n_u8(0x7f));
  const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(values, 4), least_low, magnitude);
  const uint8x16_t normal_high = vaddq_u8(vshrq_n_u8(magnitude, 4), vdupq_n_u8(kExponentShift));
  const uint8x16_t high = vbslq_u8(vdupq_n_u8(0x80), values, vqtbx1q_u8(normal_high, least_high, magnitude));
  return {vzip1q_u8(low, high), vzip2q_u8(low, high)};
}

class MatrixGemm {
 public:
  MatrixGemm(const GemmTile& tile, int64_t row, int64_t rows, uint16_t* panel)
      : tile_(tile), columns_(*tile.weight), row_(row), rows_(rows), panel_(panel) {}

  void run() const {
    constexpr int64_t kTokens = 2 * kTokenPairs;
    for (int64_t token = 0; token < tile_.count; token += kTokens) {
      multiply_tokens(token, std::min(kTokens, tile_.count - token));
    }
  }

 private:
  template <int kPairs>
  using Sums = float32x4_t[kRowPairs][kPairs];

  template <int kPairs = kTokenPairs>
  void multiply_tokens(int64_t token, int64_t tokens) const {
    if (tokens > 2 * (kPairs - 1)) {
      multiply_group<kPairs>(token, tokens);
    } else if constexpr (kPairs > 1) {
      multiply_tokens<kPairs - 1>(token, tokens);
    }
  }

  template <int kPairs>
  void multiply_group(int64_t token, int64_t tokens) const {
    const uint16_t* inputs[2 * kPairs];
    for (int64_t t = 0; t < 2 * kPairs; ++t) {
      const int64_t row = tile_.input_row(token + std::min(t, tokens - 1));
      inputs[t] = reinterpret_cast<const uint16_t*>(tile_.operand) + row * tile_.operand_stride;
    }
    Sums<kPairs> totals = {};
    Sums<kPairs> sums = {};
    uint16_t* weights = panel_;
    const int64_t slot_values = tile_.count > 2 * kTokenPairs ? kStepValues : 0;
    for (ColumnStep step = columns_.first(); columns_.contains(step); weights += slot_values) {
      if (token == 0) convert(weights, step);
      add_step<kPairs>(sums, inputs, step.col, weights);
      const ColumnStep next = columns_.after(step);
      if (next.split_first != step.split_first) add_split<kPairs>(totals, sums, step.split_first);
      step = next;
    }
    for (int64_t t = 0; t < tokens; ++t) write<kPairs>(totals, token, t);
  }

  void convert(uint16_t* target, const ColumnStep& step) const {
    const int64_t first = std::max<int64_t>(0, step.split_first - step.col);
    const int64_t last = std::min(kStepCols, step.split_last - step.col);
    for (int pair = 0; pair < kRowPairs; ++pair) {
      uint8x16_t bytes[2][2];
      for (int row = 0; row < 2; ++row) {
        const std::byte* source = tile_.weight->row(row_ + std::min<int64_t>(2 * pair + row, rows_ - 1)) + step.col;
        __builtin_prefetch(source + kPrefetchBytes);
        std::byte window[kStepCols] = {};
        if (last - first < kStepCols) {
          std::memcpy(window + first, source + first, static_cast<size_t>(last - first));
          source = window;
        }
        for (int half = 0; half < 2; ++half) {
          bytes[row][half] = vld1q_u8(reinterpret_cast<const uint8_t*>(source) + half * 16);
        }
      }
      for (int half = 0; half < 2; ++half) {
        const uint8x16x2_t upper = bf16_from_fp8(bytes[0][half]);
        const uint8x16x2_t lower = bf16_from_fp8(bytes[1][half]);
        for (int part = 0; part < 2; ++part) {
          const uint64x2_t rows[2] = {vreinterpretq_u64_u8(upper.val[part]), vreinterpretq_u64_u8(lower.val[part])};
          uint16_t* quads = target + ((2 * half + part) * kRowPairs + pair) * 2 * kColsAtOnce;
          vst1q_u16(quads, vreinterpretq_u16_u64(vzip1q_u64(rows[0], rows[1])));
          vst1q_u16(quads + kColsAtOnce, vreinterpretq_u16_u64(vzip2q_u64(rows[0], rows[1])));
        }
      }
    }
  }

  template <int kPairs>
  static void add_step(Sums<kPairs>& sums, const uint16_t* const (&inputs)[2 * kPairs], int64_t col,
                       const uint16_t* weights) {
    for (int64_t part = 0; part < kStepCols; part += kColsAtOnce, weights += kRowPairs * 2 * kColsAtOnce) {
      for (int quad = 0; quad < 2; ++quad) {
        bfloat16x8_t rows[kRowPairs];
#pragma GCC unroll 4
        for (int pair = 0; pair < kRowPairs; ++pair) {
          rows[pair] = vreinterpretq_bf16_u16(vld1q_u16(weights + (2 * pair + quad) * kColsAtOnce));
        }
#pragma GCC unroll 4
        for (int pair = 0; pair < kPairs; ++pair) {
          const int64_t place = col + part + quad * kColsAtOnce / 2;
          const bfloat16x8_t tokens = vreinterpretq_bf16_u16(
              vcombine_u16(vld1_u16(inputs[2 * pair] + place), vld1_u16(inputs[2 * pair + 1] + place)));
#pragma GCC unroll 4
          for (int row = 0; row < kRowPairs; ++row) {
            sums[row][pair] = vbfmmlaq_f32(sums[row][pair], rows[row], tokens);
          }
        }
      }
    }
  }

  template <int kPairs>
  void add_split(Sums<kPairs>& totals, Sums<kPairs>& sums, int64_t col) const {
    const bool is_scaled = tile_.weight->scale_kind == GLINT_SCALE_TILE;
    for (int row = 0; row < kRowPairs; ++row) {
      const float upper = is_scaled ? scale_at(2 * row, col) : 1.0F;
      const float lower = is_scaled ? scale_at(2 * row + 1, col) : 1.0F;
      const float32x4_t scales = {upper, upper, lower, lower};
      for (int pair = 0; pair < kPairs; ++pair) {
        totals[row][pair] = vfmaq_f32(totals[row][pair], sums[row][pair], scales);
        sums[row][pair] = vdupq_n_f32(0.0F);
      }
    }
  }

  float scale_at(int64_t row, int64_t col) const {
    return tile_.weight->scale_at(row_ + std::min(row, rows_ - 1), col);
  }

  template <int kPairs>
  void write(const Sums<kPairs>& totals, int64_t token, int64_t t) const {
    const int32_t kind = tile_.weight->scale_kind;
    const bool has_row_scale = kind == GLINT_SCALE_CHANNEL || kind == GLINT_SCALE_TENSOR;
    const float input_scale = tile_.input_scale(token + t, 0);
    float* out = tile_.out + (token + t) * tile_.out_stride + row_;
    for (int64_t row = 0; row < rows_; ++row) {
      const float total = totals[row / 2][t / 2][2 * (row % 2) + t % 2];
      const float scale = has_row_scale ? input_scale * scale_at(row, 0) : input_scale;
      out[row] = total * scale + tile_.bias_at(row_ + row);
    }
  }

  const GemmTile& tile_;
  SplitColumns columns_;
  int64_t row_;
  int64_t rows_;
  uint16_t* panel_;
};

void multiply_fp8(const GemmTile& tile, std::byte* scratch) {
  const int64_t row_last = tile.row_first + tile.row_count;
  for (int64_t row = tile.row_first; row < row_last; row += kBlockRows) {
    MatrixGemm(tile, row, std::min(kBlockRows, row_last - row), reinterpret_cast<uint16_t*>(scratch)).run();
  }
}

int64_t matrix_multiply_adds(float* values, int64_t rounds) {
  return 4 * lane_multiply_adds<MatrixIsa>(values, rounds);
}

}

const KernelSet& neon_bf16_kernels() {
  static const KernelSet kernels{.name = "neon_bf16",
                                 .id = GLINT_KERNELS_NEON_BF16,
                                 .fp8_form = OperandForm::kBf16,
                                 .gemm_fp8 = multiply_fp8,
                                 .gemm_floats = LaneGemm<NeonIsa>::floats,
                                 .attend = LaneAttention<NeonIsa>::attend,
                                 .swiglu = lane_swiglu<NeonIsa>,
                                 .quantise = LaneQuantise<NeonIsa>::to_bf16,
                                 .rows = kRowKernels,
                                 .multiply_adds = matrix_multiply_adds};
  return kernels;
}

}
