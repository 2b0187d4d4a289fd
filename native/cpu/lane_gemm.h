#pragma once

#include <array>

#include "cpu/lanes.h"

namespace glint {

namespace {

template <typename Isa>
class LaneGemm {
 public:
  static void fp8(const GemmTile& tile, std::byte* scratch) { multiply<Fp8Reader>(tile, scratch); }
  static void floats(const GemmTile& tile, std::byte* scratch) { multiply<Bf16Reader>(tile, scratch); }

 private:
  using Lane = Lanes<Isa::kLanes>;
  using Floats = typename Lane::Floats;
  using Quad = Vectors<4>::Floats;
  static constexpr int kRows = 4;
  static constexpr int kRegisterTokens = 6;
  static constexpr int64_t kPrefetchBytes = 2048;
  static constexpr float kFp8Unit = 1.0F / Isa::kFp8Factor;

  static constexpr int most_direct_tokens() {
    if constexpr (requires { Isa::kWideTokens; }) {
      return Isa::kWideTokens;
    } else {
      return kRegisterTokens;
    }
  }

  static constexpr int kMaxTokens = most_direct_tokens();

  template <int kTokens>
  using Sums = Floats[kRows][kTokens];

  struct Bf16Reader {
    static constexpr int kVectors = Isa::kBf16Vectors;
    static constexpr int64_t kElementBytes = 2;
    static auto read(const std::byte* source) { return Isa::decode_bf16(source); }
    template <typename Wide>
    static void add_wide(Wide& wide) {
      Isa::add_bf16(wide);
    }
  };

  struct Fp8Reader {
    static constexpr int kVectors = Isa::kFp8Vectors;
    static constexpr int64_t kElementBytes = 1;
    static auto read(const std::byte* source) { return Isa::decode_fp8(source); }
    template <typename Wide>
    static void add_wide(Wide& wide) {
      Isa::add_fp8(wide);
    }
  };

  template <typename Reader>
  static constexpr int64_t kStep = int64_t{Isa::kLanes} * Reader::kVectors;

  struct Block {
    int64_t first;
    int64_t last;
    int64_t index;
  };

  struct Place {
    int64_t row;
    int64_t rows;
    int64_t token;
  };

  template <typename Reader>
  struct DirectRows {
    const std::byte* rows[kRows];
    const std::byte* next_rows;

    DirectRows(const GemmTile& tile, const Place& place) {
      for (int r = 0; r < kRows; ++r) {
        rows[r] = tile.weight->row(place.row + std::min<int64_t>(r, place.rows - 1));
      }
      next_rows = rows[0] + std::max(kRows * tile.weight->stride * Reader::kElementBytes, kPrefetchBytes);
    }

    template <int kTokens>
    void add(Sums<kTokens>& sums, const float* const* inputs, const Block& block) const {
      constexpr int64_t kCols = kStep<Reader>;
      const int64_t whole_first = round_up(block.first, kCols);
      const int64_t whole_last = block.last / kCols * kCols;
      if (whole_first != block.first) {
        add_part<kTokens>(sums, inputs, {block.first, std::min(whole_first, block.last), block.index});
      }
      if (whole_first < whole_last) add_whole<kTokens>(sums, inputs, whole_first, whole_last);
      if (whole_last < block.last && whole_first <= whole_last) {
        add_part<kTokens>(sums, inputs, {whole_last, block.last, block.index});
      }
    }

    template <int kTokens>
      requires(kTokens > kRegisterTokens)
    void add_whole(Sums<kTokens>& sums, const float* const* inputs, int64_t first, int64_t last) const {
      typename Isa::WideStep step{.cols = last - first};
      for (int r = 0; r < kRows; r += Isa::kWideRows) {
        for (int t = 0; t < Isa::kWideTokens; ++t) step.tokens[t] = inputs[std::min(t, kTokens - 1)] + first;
        for (int wide = 0; wide < Isa::kWideRows; ++wide) {
          step.rows[wide] = rows[r + wide] + first * Reader::kElementBytes;
          std::copy(sums[r + wide], sums[r + wide] + kTokens, step.sums[wide]);
        }
        step.next_rows = next_rows + r * last * Reader::kElementBytes;
        Reader::add_wide(step);
        for (int wide = 0; wide < Isa::kWideRows; ++wide) {
          std::copy(step.sums[wide], step.sums[wide] + kTokens, sums[r + wide]);
        }
      }
    }

    template <int kTokens>
      requires(kTokens <= kRegisterTokens)
    void add_whole(Sums<kTokens>& sums, const float* const* inputs, int64_t first, int64_t last) const {
      constexpr int kRowsAtOnce = Isa::direct_rows(kTokens);
      for (int r = 0; r < kRows; r += kRowsAtOnce) {
        const std::byte* const* chosen = rows + r;
        add_steps<kRowsAtOnce, kTokens, Reader>(sums + r, inputs, first, last, [&](int row, int64_t col) {
          if (row == 0) __builtin_prefetch(next_rows + (kRowsAtOnce * col + r * last) * Reader::kElementBytes);
          return Reader::read(chosen[row] + col * Reader::kElementBytes);
        });
      }
    }

    template <int kTokens>
    void add_part(Sums<kTokens>& sums, const float* const* inputs, const Block& part) const {
      float values[kRows][kStep<Reader>];
      for (int r = 0; r < kRows; ++r) decode_part<Reader>(values[r], rows[r], part);
      const int64_t first = part.first / kStep<Reader> * kStep<Reader>;
      add_steps<kRows, kTokens, Reader>(sums, inputs, first, first + kStep<Reader>,
                                        [&](int row, int64_t) { return read_floats<Reader>(values[row]); });
    }
  };

  template <typename Reader>
  struct PanelRows {
    const float* rows[kRows];

    PanelRows(const float* panel, int64_t stride, int64_t count) {
      for (int r = 0; r < kRows; ++r) rows[r] = panel + std::min<int64_t>(r, count - 1) * stride;
    }

    template <int kTokens>
    inline __attribute__((always_inline)) void add(Sums<kTokens>& sums, const float* const* inputs,
                                                   const Block& block) const {
      const int64_t first = block.first / kStep<Reader> * kStep<Reader>;
      const int64_t last = round_up(block.last, kStep<Reader>);
      const int64_t shift = block.index * kStep<Reader>;
      if constexpr (kTokens == Isa::kTokens && requires { &Isa::sum_panel; }) {
        const float* weights[kRows];
        const float* operands[kTokens];
        for (int r = 0; r < kRows; ++r) weights[r] = rows[r] + first + shift;
        for (int t = 0; t < kTokens; ++t) operands[t] = inputs[t] + first;
        Isa::sum_panel(sums, weights, operands, last - first);
      } else {
        add_panel<kTokens>(sums, inputs, first, last, shift);
      }
    }

    template <int kTokens>
    inline __attribute__((always_inline)) void add_panel(Sums<kTokens>& sums, const float* const* inputs, int64_t first,
                                                         int64_t last, int64_t shift) const {
      Floats parts[kRows][kTokens];
      copy_sums<kRows, kTokens>(parts, sums);
      for (int64_t col = first; col < last; col += Isa::kLanes) {
        Floats operands[kTokens];
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) operands[t] = in_register(Lane::load(inputs[t] + col));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Floats weights = in_register(Lane::load(rows[r] + col + shift));
#pragma GCC unroll 8
          for (int t = 0; t < kTokens; ++t) parts[r][t] = Isa::multiply_add(weights, operands[t], parts[r][t]);
        }
      }
      copy_sums<kRows, kTokens>(sums, parts);
    }
  };

  static Floats in_register(Floats value) {
    if constexpr (requires { Isa::in_register(value); }) {
      return Isa::in_register(value);
    } else {
      return value;
    }
  }

  template <typename Reader>
  static std::array<Floats, Reader::kVectors> read_floats(const float* source) {
    std::array<Floats, Reader::kVectors> values;
    for (int v = 0; v < Reader::kVectors; ++v) values[v] = Lane::load(source + v * Isa::kLanes);
    return values;
  }

  template <typename Reader>
  static void decode_part(float* out, const std::byte* row, const Block& part) {
    constexpr int64_t kCols = kStep<Reader>;
    const int64_t skipped = part.first % kCols;
    std::byte bytes[kCols * Reader::kElementBytes] = {};
    std::memcpy(bytes + skipped * Reader::kElementBytes, row + part.first * Reader::kElementBytes,
                static_cast<size_t>((part.last - part.first) * Reader::kElementBytes));
    store<Reader>(out, Reader::read(bytes));
  }

  template <typename Reader, typename Values>
  static void store(float* out, const Values& values) {
    for (int v = 0; v < Reader::kVectors; ++v) Lane::store(out + v * Isa::kLanes, values[v]);
  }

  template <int kSomeRows, int kTokens>
  static inline __attribute__((always_inline)) void copy_sums(Floats (*out)[kTokens], const Floats (*in)[kTokens]) {
#pragma GCC unroll 8
    for (int r = 0; r < kSomeRows; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) out[r][t] = in[r][t];
    }
  }

  template <int kSomeRows, int kTokens, typename Reader, typename Read>
  static inline __attribute__((always_inline)) void add_steps(Floats (*sums)[kTokens], const float* const* inputs,
                                                              int64_t first, int64_t last, const Read& read) {
    constexpr int kTogether = kTokens == 1 ? 1 : kSomeRows;
    Floats parts[kSomeRows][kTokens];
    copy_sums<kSomeRows, kTokens>(parts, sums);
    for (int64_t col = first; col < last; col += kStep<Reader>) {
#pragma GCC unroll 8
      for (int group = 0; group < kSomeRows; group += kTogether) {
        decltype(read(0, 0)) weights[kTogether];
#pragma GCC unroll 8
        for (int r = 0; r < kTogether; ++r) weights[r] = read(group + r, col);
#pragma GCC unroll 8
        for (int v = 0; v < Reader::kVectors; ++v) {
          Floats values[kTogether];
#pragma GCC unroll 8
          for (int r = 0; r < kTogether; ++r) values[r] = in_register(weights[r][v]);
#pragma GCC unroll 8
          for (int t = 0; t < kTokens; ++t) {
            const Floats input = Lane::load(inputs[t] + col + v * Isa::kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < kTogether; ++r) {
              parts[group + r][t] = Isa::multiply_add(values[r], input, parts[group + r][t]);
            }
          }
        }
      }
    }
    copy_sums<kSomeRows, kTokens>(sums, parts);
  }

  static bool has_blocks(const GemmTile& tile) {
    return tile.weight->scale_kind == GLINT_SCALE_TILE || tile.input_groups > 1;
  }

  static Block block_from(const GemmTile& tile, int64_t first, int64_t index) {
    const Weight& weight = *tile.weight;
    int64_t last = weight.cols;
    if (tile.input_groups > 1) last = std::min(last, (first / kInputGroup + 1) * kInputGroup);
    if (weight.scale_kind == GLINT_SCALE_TILE) {
      last = std::min(last, ((weight.col_first + first) / kScaleTile + 1) * kScaleTile - weight.col_first);
    }
    return {first, last, index};
  }

  template <typename Visit>
  static void for_each_block(const GemmTile& tile, const Visit& visit) {
    for (Block block = block_from(tile, 0, 0); block.first < tile.weight->cols;
         block = block_from(tile, block.last, block.index + 1)) {
      visit(block);
    }
  }

  template <typename Reader>
  static void multiply(const GemmTile& tile, std::byte* scratch) {
    if (tile.count <= kMaxTokens) {
      for (int64_t row = 0; row < tile.row_count; row += kRows) {
        const Place place{tile.row_first + row, std::min<int64_t>(kRows, tile.row_count - row), 0};
        multiply_tokens(tile, DirectRows<Reader>(tile, place), place, tile.count);
      }
    } else {
      multiply_panel<Reader>(tile, reinterpret_cast<float*>(scratch));
    }
  }

  template <typename Reader>
  static void multiply_panel(const GemmTile& tile, float* panel) {
    const int64_t blocks = has_blocks(tile) ? tile.weight->cols / kScaleTile + 2 : 0;
    const int64_t stride = round_up(tile.weight->cols, kOperandAlignment) + blocks * kStep<Reader>;
    const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(float));
    const int64_t rows_at_once = std::max<int64_t>(kRows, Isa::kPanelBytes / row_bytes / kRows * kRows);
    for (int64_t first = 0; first < tile.row_count; first += rows_at_once) {
      const Place part{tile.row_first + first, std::min(rows_at_once, tile.row_count - first), 0};
      for (int64_t row = 0; row < part.rows; ++row) {
        fill_panel_row<Reader>(panel + row * stride, tile, tile.weight->row(part.row + row),
                               rows_at_once * tile.weight->stride * Reader::kElementBytes);
      }
      multiply_part<Reader>(tile, panel, stride, part);
    }
  }

  template <typename Reader>
  static void multiply_part(const GemmTile& tile, const float* panel, int64_t stride, const Place& part) {
    for (int64_t token = 0; token < tile.count; token += Isa::kTokens) {
      const int64_t count = std::min<int64_t>(Isa::kTokens, tile.count - token);
      for (int64_t row = 0; row < part.rows; row += kRows) {
        const Place place{part.row + row, std::min<int64_t>(kRows, part.rows - row), token};
        multiply_tokens(tile, PanelRows<Reader>(panel + row * stride, stride, place.rows), place, count);
      }
    }
  }

  template <typename Reader>
  static void fill_panel_row(float* out, const GemmTile& tile, const std::byte* row, int64_t next_rows) {
    constexpr int64_t kCols = kStep<Reader>;
    for_each_block(tile, [&](const Block& block) {
      float* target = out + block.index * kCols;
      const int64_t whole_first = round_up(block.first, kCols);
      const int64_t whole_last = block.last / kCols * kCols;
      if (whole_first != block.first) {
        const Block part{block.first, std::min(whole_first, block.last), block.index};
        decode_part<Reader>(target + whole_first - kCols, row, part);
      }
      for (int64_t col = whole_first; col < whole_last; col += kCols) {
        __builtin_prefetch(row + next_rows + col * Reader::kElementBytes);
        store<Reader>(target + col, Reader::read(row + col * Reader::kElementBytes));
      }
      if (whole_first <= whole_last && whole_last < block.last) {
        decode_part<Reader>(target + whole_last, row, {whole_last, block.last, block.index});
      }
    });
  }

  template <int kTokens = 1, typename Rows>
  static void multiply_tokens(const GemmTile& tile, const Rows& rows, const Place& place, int64_t count) {
    if (count == kTokens) {
      multiply_micro<kTokens>(tile, rows, place);
    } else if constexpr (kTokens < kMaxTokens) {
      multiply_tokens<kTokens + 1>(tile, rows, place, count);
    }
  }

  template <int kTokens, typename Rows>
  static void multiply_micro(const GemmTile& tile, const Rows& rows, const Place& place) {
    const float* inputs[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      inputs[t] = reinterpret_cast<const float*>(tile.operand) + tile.input_row(place.token + t) * tile.operand_stride;
    }
    Sums<kTokens> totals = {};
    if (!has_blocks(tile)) {
      rows.add(totals, inputs, {0, tile.weight->cols, 0});
    } else {
      for_each_block(tile, [&](const Block& block) {
        Sums<kTokens> sums = {};
        rows.add(sums, inputs, block);
        add_block<kTokens>(totals, sums, tile, place, block);
      });
    }
    finish<kTokens>(tile, totals, place);
  }

  template <int kTokens>
  static void add_block(Sums<kTokens>& totals, const Sums<kTokens>& sums, const GemmTile& tile, const Place& place,
                        const Block& block) {
    const bool has_groups = tile.input_groups > 1;
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = place.row + std::min<int64_t>(r, place.rows - 1);
      const float weight_scale =
          tile.weight->scale_kind == GLINT_SCALE_TILE ? tile.weight->scale_at(row, block.first) : 1.0F;
      for (int t = 0; t < kTokens; ++t) {
        const float input_scale = has_groups ? tile.input_scale(place.token + t, block.first / kInputGroup) : 1.0F;
        const Floats factor = Isa::broadcast(input_scale * weight_scale);
        totals[r][t] = Isa::multiply_add(sums[r][t] * unit_of(tile), factor, totals[r][t]);
      }
    }
  }

  static float unit_of(const GemmTile& tile) { return tile.weight->dtype == GLINT_DTYPE_F8_E4M3 ? kFp8Unit : 1.0F; }

  template <int kTokens>
  static inline __attribute__((always_inline)) void finish(const GemmTile& tile, const Sums<kTokens>& sums,
                                                           const Place& place) {
    const Weight& weight = *tile.weight;
    const float unit = has_blocks(tile) ? 1.0F : unit_of(tile);
    const bool has_row_scale = weight.scale_kind == GLINT_SCALE_CHANNEL || weight.scale_kind == GLINT_SCALE_TENSOR;
    Quad row_scales = {};
    Quad biases = {};
    for (int r = 0; r < place.rows; ++r) {
      row_scales[r] = has_row_scale ? weight.scale_at(place.row + r, 0) : 1.0F;
      biases[r] = tile.bias_at(place.row + r);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const float input_scale = tile.input_groups > 1 ? 1.0F : tile.input_scale(place.token + t, 0);
      const Quad sum = Isa::sum_rows(sums[0][t], sums[1][t], sums[2][t], sums[3][t]) * unit;
      const Quad total = sum * (input_scale * row_scales) + biases;
      float* out = tile.out + (place.token + t) * tile.out_stride + place.row;
      if (place.rows == kRows) {
        std::memcpy(out, &total, sizeof(total));
      } else {
        for (int r = 0; r < place.rows; ++r) out[r] = total[r];
      }
    }
  }
};

}

}
