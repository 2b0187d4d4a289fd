#include "cpu/x86_packed_gemm.h"
#include "cpu/x86_upper_halves.h"

namespace glint {

namespace {

constexpr int64_t kStepBytes = 2 * kTileBytes;

constexpr std::array<TileShapes, kBlockTokens> make_tile_shapes() {
  std::array<TileShapes, kBlockTokens> all{};
  for (int64_t tokens = 1; tokens <= kBlockTokens; ++tokens) {
    TileShapes& shapes = all[static_cast<size_t>(tokens - 1)];
    const int64_t first_group = tokens < kTileEdge ? tokens : kTileEdge;
    for (const size_t tile : {0U, 1U, 4U}) shapes.set(tile, first_group);
    for (const size_t tile : {2U, 3U, 5U}) shapes.set(tile, tokens - first_group);
    for (const size_t tile : {6U, 7U}) shapes.set(tile, kTileEdge);
  }
  return all;
}

constexpr std::array<TileShapes, kBlockTokens> kTileShapes = make_tile_shapes();

struct Sums {
  alignas(64) float values[2][kBlockTokens][kTileEdge];
};

class TileGemm {
 public:
  TileGemm(const GemmTile& tile, const BlockRows& rows, std::byte* scratch)
      : tile_(tile),
        rows_(rows),
        columns_(*tile.weight),
        cols_(tile.weight->cols),
        gathered_(scratch),
        panel_(scratch + kBlockTokens * gathered_stride()) {}

  void run() {
    for (int64_t token = 0; token < tile_.count; token += kBlockTokens) {
      const int64_t tokens = std::min(kBlockTokens, tile_.count - token);
      if (token == 0 || tokens < kBlockTokens) _tile_loadconfig(&kTileShapes[static_cast<size_t>(tokens - 1)]);
      const bool has_two_groups = tokens > kTileEdge;
      const bool has_two_halves = rows_.num_halves() == 2;
      if (has_two_groups && has_two_halves) multiply_block<2, 2>(token, tokens);
      if (has_two_groups && !has_two_halves) multiply_block<2, 1>(token, tokens);
      if (!has_two_groups && has_two_halves) multiply_block<1, 2>(token, tokens);
      if (!has_two_groups && !has_two_halves) multiply_block<1, 1>(token, tokens);
    }
  }

 private:
  template <int kGroups, int kHalves>
  void multiply_block(int64_t token, int64_t tokens) {
    const TileRows inputs[2] = {token_rows(token, 0, std::min(tokens, kTileEdge)),
                                token_rows(token, kTileEdge, tokens - kTileEdge)};
    const bool converts = token == 0;
    Sums sums;
    ColumnStep step = columns_.first();
    if (converts) convert<kHalves>(step, slot(0));
    for (int64_t index = 0; columns_.contains(step); ++index) {
      const ColumnStep next = columns_.after(step);
      if (converts && columns_.contains(next)) convert<kHalves>(next, slot(index + 1));
      if (step.col <= step.split_first) zero_tiles<kGroups, kHalves>();
      add_step<kGroups, kHalves>(inputs, step.col, slot(index));
      if (next.split_first != step.split_first) {
        if (!rows_.scales_splits()) {
          read_tiles<kGroups, kHalves>(sums);
        } else {
          Sums split;
          read_tiles<kGroups, kHalves>(split);
          for (int half = 0; half < kHalves; ++half) add_split(sums, split, half, step.split_first, tokens);
        }
      }
      step = next;
    }
    for (int half = 0; half < kHalves; ++half) {
      const BlockRows::Writer out = rows_.writer(half);
      for (int64_t t = 0; t < tokens; ++t) out.write(token + t, _mm512_load_ps(sums.values[half][t]));
    }
  }

  int64_t gathered_stride() const { return 2 * round_up(cols_, kStepCols); }

  std::byte* slot(int64_t index) const { return panel_ + index * kStepBytes; }

  TileRows token_rows(int64_t block_first, int64_t group_first, int64_t count) const {
    const int64_t first = block_first + group_first;
    const int64_t row_bytes = 2 * tile_.operand_stride;
    if (count <= 0) return {nullptr, 0};
    const auto row_at = [this, first](int64_t index) { return tile_.input_row(first + index); };
    const std::byte* data = tile_.operand + row_at(0) * row_bytes;
    if (count == 1) return {data, row_bytes};
    const int64_t distance = row_at(1) - row_at(0);
    bool is_even = true;
    for (int64_t index = 2; index < count; ++index) is_even &= row_at(index) - row_at(index - 1) == distance;
    if (is_even) return {data, distance * row_bytes};
    std::byte* target = gathered_ + group_first * gathered_stride();
    for (int64_t index = 0; index < count; ++index) {
      std::memcpy(target + index * gathered_stride(), tile_.operand + row_at(index) * row_bytes,
                  static_cast<size_t>(gathered_stride()));
    }
    return {target, gathered_stride()};
  }

  template <int kHalves>
  void convert(const ColumnStep& step, std::byte* target) const {
    for (int half = 0; half < kHalves; ++half) write_fp8_tile(target + half * kTileBytes, rows_.window<1>(step, half));
  }

  template <int kGroups, int kHalves>
  static void zero_tiles() {
    _tile_zero(0);
    if constexpr (kHalves == 2) _tile_zero(1);
    if constexpr (kGroups == 2) _tile_zero(2);
    if constexpr (kGroups == 2 && kHalves == 2) _tile_zero(3);
  }

  template <int kGroups, int kHalves>
  static void read_tiles(Sums& split) {
    _tile_stored(0, split.values[0][0], kTileRowBytes);
    if constexpr (kHalves == 2) _tile_stored(1, split.values[1][0], kTileRowBytes);
    if constexpr (kGroups == 2) _tile_stored(2, split.values[0][kTileEdge], kTileRowBytes);
    if constexpr (kGroups == 2 && kHalves == 2) _tile_stored(3, split.values[1][kTileEdge], kTileRowBytes);
  }

  template <int kGroups, int kHalves>
  static void add_step(const TileRows (&inputs)[2], int64_t col, const std::byte* weights) {
    keep_memory_order();
    _tile_loadd(6, weights, kTileRowBytes);
    if constexpr (kHalves == 2) _tile_loadd(7, weights + kTileBytes, kTileRowBytes);
    _tile_loadd(4, inputs[0].data + 2 * col, inputs[0].stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kHalves == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kGroups == 2) {
      _tile_loadd(5, inputs[1].data + 2 * col, inputs[1].stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kHalves == 2) _tile_dpbf16ps(3, 5, 7);
    }
    keep_memory_order();
  }

  void add_split(Sums& sums, const Sums& split, int half, int64_t col, int64_t tokens) const {
    const __m512 scales = rows_.split_scales(half, col);
    for (int64_t token = 0; token < tokens; ++token) {
      float* total = sums.values[half][token];
      const __m512 part = _mm512_load_ps(split.values[half][token]);
      const __m512 before = col == 0 ? _mm512_setzero_ps() : _mm512_load_ps(total);
      _mm512_store_ps(total, _mm512_fmadd_ps(part, scales, before));
    }
  }

  const GemmTile& tile_;
  const BlockRows& rows_;
  SplitColumns columns_;
  int64_t cols_;
  std::byte* gathered_;
  std::byte* panel_;
};

void multiply_fp8(const GemmTile& tile, std::byte* scratch) {
  if (tile.count <= kBlockTokens) return PackedGemm<Fp8Weights>::multiply(tile, scratch);
  const int64_t row_last = tile.row_first + tile.row_count;
  for (int64_t row = tile.row_first; row < row_last; row += kBlockRows) {
    const BlockRows rows(tile, row, std::min(kBlockRows, row_last - row));
    TileGemm(tile, rows, scratch).run();
  }
  _tile_release();
}

int64_t tile_multiply_adds(float* values, int64_t rounds) {
  static_assert(kPeakValues * sizeof(float) == kTileBytes);
  constexpr int64_t kTiles = 4;
  _tile_loadconfig(&kWholeTiles);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values, kTileRowBytes);
  _tile_loadd(5, values, kTileRowBytes);
  _tile_loadd(6, values, kTileRowBytes);
  _tile_loadd(7, values, kTileRowBytes);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, values, kTileRowBytes);
  _tile_release();
  return rounds * kTiles * kTileEdge * kTileEdge * kStepCols;
}

}

const KernelSet& amx_kernels() {
  static constexpr KernelSet kernels{.name = "amx",
                                     .id = GLINT_KERNELS_AMX,
                                     .fp8_form = OperandForm::kBf16,
                                     .gemm_fp8 = kClearingUpperHalves<multiply_fp8>,
                                     .gemm_floats = kClearingUpperHalves<PackedGemm<Bf16Weights>::multiply>,
                                     .attend = kClearingUpperHalves<LaneAttention<Avx512Isa>::attend>,
                                     .swiglu = kClearingUpperHalves<lane_swiglu<Avx512Isa>>,
                                     .quantise = kClearingUpperHalves<LaneQuantise<Avx512Isa>::to_bf16>,
                                     .rows = kRowKernels,
                                     .multiply_adds = tile_multiply_adds};
  return kernels;
}

}
