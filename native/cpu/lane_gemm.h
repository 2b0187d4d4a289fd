#pragma once

#include <array>

#include "cpu/lanes.h"

namespace glint {

namespace {

template <typename Isa>
class LaneGemm {
 public:
  using Lane = Lanes<Isa::kLanes>;
  using Floats = typename Lane::Floats;
  static constexpr int64_t kPanelRows = 16;
  static constexpr float kFp8Unit = 1.0F / Isa::kFp8Factor;

  static void fp8(const GemmTile& tile, std::byte* scratch) { multiply<Fp8Reader>(tile, scratch); }
  static void floats(const GemmTile& tile, std::byte* scratch) { multiply<Bf16Reader>(tile, scratch); }

 private:
  struct PanelReader {
    static constexpr int kVectors = 4;
    const float* panel;
    int64_t stride;
    std::array<Floats, kVectors> read(int64_t row, int64_t col) const {
      const float* source = panel + row * stride + col;
      return {Lane::load(source), Lane::load(source + Isa::kLanes), Lane::load(source + 2 * Isa::kLanes),
              Lane::load(source + 3 * Isa::kLanes)};
    }
  };

  struct Bf16Reader {
    static constexpr int kVectors = 4;
    const std::byte* data;
    int64_t stride;
    std::array<Floats, kVectors> read(int64_t row, int64_t col) const {
      const std::byte* source = data + 2 * (row * stride + col);
      return {Isa::load_bf16(source), Isa::load_bf16(source + 2 * Isa::kLanes),
              Isa::load_bf16(source + 4 * Isa::kLanes), Isa::load_bf16(source + 6 * Isa::kLanes)};
    }
    void prefetch(int64_t row, int64_t col) const { __builtin_prefetch(data + 2 * (row * stride + col)); }
    static void decode(float* out, const std::byte* source, int64_t count) {
      int64_t index = 0;
      for (; index + Isa::kLanes <= count; index += Isa::kLanes) {
        Lane::store(out + index, Isa::load_bf16(source + 2 * index));
      }
      for (; index < count; ++index) {
        uint16_t bits = 0;
        std::memcpy(&bits, source + 2 * index, sizeof(bits));
        out[index] = float_from_bf16(bits);
      }
    }
  };

  struct Fp8Reader {
    static constexpr int kVectors = Isa::kFp8Vectors;
    const std::byte* data;
    int64_t stride;
    std::array<Floats, kVectors> read(int64_t row, int64_t col) const {
      return Isa::decode_fp8(data + row * stride + col);
    }
    void prefetch(int64_t row, int64_t col) const { __builtin_prefetch(data + row * stride + col); }
    static void decode(float* out, const std::byte* source, int64_t count) {
      constexpr int64_t kStep = Isa::kLanes * kVectors;
      int64_t index = 0;
      for (; index + kStep <= count; index += kStep) {
        const std::array<Floats, kVectors> values = Isa::decode_fp8(source + index);
        for (int part = 0; part < kVectors; ++part) Lane::store(out + index + part * Isa::kLanes, values[part]);
      }
      for (; index < count; ++index) {
        out[index] = e4m3_table()[std::to_integer<uint8_t>(source[index])] * Isa::kFp8Factor;
      }
    }
  };

  template <typename Reader>
  static void multiply(const GemmTile& tile, std::byte* scratch) {
    auto* panel = reinterpret_cast<float*>(scratch);
    const bool reads_directly = tile.count == 1 && tile.weight->scale_kind != GLINT_SCALE_TILE;
    const int64_t row_last = tile.row_first + tile.row_count;
    for (int64_t row = tile.row_first; row < row_last; row += kPanelRows) {
      const int64_t rows = std::min(kPanelRows, row_last - row);
      if (reads_directly) {
        multiply_directly<Reader>(tile, row, rows);
      } else {
        multiply_panel<Reader>(tile, row, rows, panel);
      }
    }
  }

  template <typename Reader>
  static void multiply_directly(const GemmTile& tile, int64_t row_first, int64_t rows) {
    const Reader reader{tile.weight->data, tile.weight->stride};
    int64_t row = 0;
    for (; row + Isa::kDirectRows <= rows; row += Isa::kDirectRows) {
      multiply_micro<Isa::kDirectRows, 1, Reader>(tile, reader, row_first + row, row_first + row, 0);
    }
    for (; row < rows; ++row) multiply_micro<1, 1, Reader>(tile, reader, row_first + row, row_first + row, 0);
  }

  template <typename Reader>
  static void multiply_panel(const GemmTile& tile, int64_t row_first, int64_t rows, float* panel) {
    const int64_t stride = round_up(tile.weight->cols, kOperandAlignment);
    for (int64_t row = 0; row < rows; ++row)
      fill_panel_row<Reader>(panel + row * stride, tile, row_first + row, stride);
    const PanelReader reader{panel, stride};
    int64_t token = 0;
    for (; token + Isa::kTokens <= tile.count; token += Isa::kTokens) {
      multiply_rows<Isa::kTokens>(tile, reader, row_first, rows, token);
    }
    for (; token < tile.count; ++token) multiply_rows<1>(tile, reader, row_first, rows, token);
  }

  template <typename Reader>
  static void fill_panel_row(float* out, const GemmTile& tile, int64_t row, int64_t stride) {
    const Weight& weight = *tile.weight;
    Reader::decode(out, weight.row(row), weight.cols);
    std::fill(out + weight.cols, out + stride, 0.0F);
    if (weight.scale_kind != GLINT_SCALE_TILE) return;
    for (int64_t col = 0; col < weight.cols;) {
      const int64_t tile_end = ((weight.col_first + col) / kScaleTile + 1) * kScaleTile - weight.col_first;
      const int64_t end = std::min(tile_end, weight.cols);
      const float scale = weight.scale_at(row, col);
      for (; col < end; ++col) out[col] = out[col] * kFp8Unit * scale;
    }
  }

  template <int kTokens>
  static void multiply_rows(const GemmTile& tile, const PanelReader& reader, int64_t row_first, int64_t rows,
                            int64_t token) {
    int64_t row = 0;
    for (; row + Isa::kRows <= rows; row += Isa::kRows) {
      multiply_micro<Isa::kRows, kTokens, PanelReader>(tile, reader, row, row_first + row, token);
    }
    for (; row < rows; ++row) multiply_micro<1, kTokens, PanelReader>(tile, reader, row, row_first + row, token);
  }

  template <int kRows, int kTokens, typename Reader>
  static void multiply_micro(const GemmTile& tile, const Reader& reader, int64_t reader_row, int64_t row,
                             int64_t token) {
    constexpr int64_t kStep = int64_t{Isa::kLanes} * Reader::kVectors;
    constexpr bool kIsPanel = std::is_same_v<Reader, PanelReader>;
    const float* inputs[kTokens];
    for (int index = 0; index < kTokens; ++index) {
      inputs[index] =
          reinterpret_cast<const float*>(tile.operand) + tile.input_row(token + index) * tile.operand_stride;
    }
    Floats sums[kRows][kTokens] = {};
    const int64_t cols = kIsPanel ? round_up(tile.weight->cols, kStep) : tile.weight->cols / kStep * kStep;
    constexpr bool kIsWholePanel = kIsPanel && kRows == Isa::kRows && kTokens == Isa::kTokens;
    constexpr bool kIsWholeDirect = std::is_same_v<Reader, Fp8Reader> && kRows == Isa::kDirectRows;
    if constexpr (kIsWholePanel && requires { &Isa::sum_panel; }) {
      Isa::sum_panel(sums, reader.panel + reader_row * reader.stride, reader.stride, inputs, tile.weight->cols);
    } else if constexpr (kIsWholeDirect && requires { &Isa::sum_fp8; }) {
      if (cols > 0) Isa::sum_fp8(sums, tile.weight->row(row), tile.weight->stride, inputs[0], cols / kStep);
    } else {
      for (int64_t col = 0; col < cols; col += kStep) {
        add_step<kRows, kTokens>(sums, reader, reader_row, inputs, col);
      }
    }
    if constexpr (!kIsPanel) {
      if (cols < tile.weight->cols) add_tail<kRows, Reader>(sums, tile, row, inputs[0], cols);
    }
    finish<kRows, kTokens>(tile, sums, row, token);
  }

  template <int kRows, int kTokens, typename Reader>
  static inline __attribute__((always_inline)) void add_step(Floats (&sums)[kRows][kTokens], const Reader& reader,
                                                             int64_t row, const float* const* inputs, int64_t col) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      if constexpr (!std::is_same_v<Reader, PanelReader>) reader.prefetch(row + r + kRows, col);
      const std::array<Floats, Reader::kVectors> weights = reader.read(row + r, col);
#pragma GCC unroll 8
      for (int v = 0; v < Reader::kVectors; ++v) {
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          sums[r][t] = Isa::multiply_add(weights[v], Lane::load(inputs[t] + col + v * Isa::kLanes), sums[r][t]);
        }
      }
    }
  }

  template <int kRows, typename Reader>
  static void add_tail(Floats (&sums)[kRows][1], const GemmTile& tile, int64_t row, const float* input, int64_t first) {
    constexpr int64_t kStep = int64_t{Isa::kLanes} * Reader::kVectors;
    const int64_t rest = tile.weight->cols - first;
    const int64_t element_bytes = tile.weight->element_bytes();
    for (int r = 0; r < kRows; ++r) {
      float values[kStep] = {};
      Reader::decode(values, tile.weight->row(row + r) + first * element_bytes, rest);
      for (int64_t col = 0; col < round_up(rest, Isa::kLanes); col += Isa::kLanes) {
        sums[r][0] = Isa::multiply_add(Lane::load(values + col), Lane::load(input + first + col), sums[r][0]);
      }
    }
  }

  template <int kRows, int kTokens>
  static void finish(const GemmTile& tile, const Floats (&sums)[kRows][kTokens], int64_t row, int64_t token) {
    const Weight& weight = *tile.weight;
    const bool has_unit = weight.dtype == GLINT_DTYPE_F8_E4M3 && weight.scale_kind != GLINT_SCALE_TILE;
    const float unit = has_unit ? kFp8Unit : 1.0F;
    const bool has_row_scale = weight.scale_kind == GLINT_SCALE_CHANNEL || weight.scale_kind == GLINT_SCALE_TENSOR;
    float row_scales[kRows];
    float biases[kRows];
    for (int r = 0; r < kRows; ++r) {
      row_scales[r] = has_row_scale ? weight.scale_at(row + r, 0) : 1.0F;
      biases[r] = tile.bias_at(row + r);
    }
    for (int t = 0; t < kTokens; ++t) {
      const float input_scale = tile.input_scale(token + t, 0);
      float* out = tile.out + (token + t) * tile.out_stride + row;
      for (int r = 0; r < kRows; ++r) {
        const float total = Isa::sum(sums[r][t]) * unit;
        out[r] = total * (input_scale * row_scales[r]) + biases[r];
      }
    }
  }
};

}

}
