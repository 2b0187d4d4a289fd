#include "cpu/x86_avx512.h"
#include "cpu/x86_fp8_tiles.h"

namespace glint {

namespace {

constexpr int64_t kBlockTokens = 2 * kTileEdge;
constexpr int64_t kBlockRows = 2 * kTileEdge;
constexpr int64_t kStepBytes = 2 * kTileBytes;
constexpr int64_t kReusedSlots = 4;
constexpr int64_t kPrefetchBytes = 256;
constexpr int64_t kFewTokens = 4;
constexpr float kHalfUnit = 1.0F / Avx512Isa::kFp8Factor;

struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  std::array<uint8_t, 14> reserved{};
  std::array<uint16_t, 16> row_bytes{};
  std::array<uint8_t, 16> rows{};
};
static_assert(sizeof(TileShapes) == 64);

constexpr std::array<TileShapes, kBlockTokens> make_tile_shapes() {
  std::array<TileShapes, kBlockTokens> all{};
  for (int64_t tokens = 1; tokens <= kBlockTokens; ++tokens) {
    TileShapes& shapes = all[static_cast<size_t>(tokens - 1)];
    const auto set = [&shapes](size_t tile, int64_t rows) {
      shapes.rows[tile] = static_cast<uint8_t>(rows);
      shapes.row_bytes[tile] = rows == 0 ? uint16_t{0} : static_cast<uint16_t>(kTileRowBytes);
    };
    const int64_t first_group = tokens < kTileEdge ? tokens : kTileEdge;
    for (const size_t tile : {0U, 1U, 4U}) set(tile, first_group);
    for (const size_t tile : {2U, 3U, 5U}) set(tile, tokens - first_group);
    for (const size_t tile : {6U, 7U}) set(tile, kTileEdge);
  }
  return all;
}

constexpr std::array<TileShapes, kBlockTokens> kTileShapes = make_tile_shapes();

inline __attribute__((always_inline)) void keep_memory_order() { asm volatile("" ::: "memory"); }

struct TokenRows {
  const std::byte* data;
  int64_t stride;
};

struct Sums {
  alignas(64) float values[2][kBlockTokens][kTileEdge];
};

struct Step {
  int64_t split_first;
  int64_t split_last;
  int64_t col;
};

class Fp8Gemm {
 public:
  Fp8Gemm(const GemmTile& tile, int64_t row, int64_t rows, std::byte* scratch)
      : tile_(tile),
        weight_(*tile.weight),
        row_(row),
        rows_(rows),
        cols_(tile.weight->cols),
        gathered_(scratch),
        panel_(scratch + kBlockTokens * gathered_stride()),
        reuses_slots_(tile.count <= kBlockTokens) {
    const bool has_row_scale = weight_.scale_kind == GLINT_SCALE_CHANNEL || weight_.scale_kind == GLINT_SCALE_TENSOR;
    for (int64_t index = 0; index < rows; ++index) {
      factors_[index] = has_row_scale ? weight_.scale_at(row + index, 0) : 1.0F;
      biases_[index] = tile.bias_at(row + index);
    }
  }

  template <int kTokens = 1>
  void run_few() {
    if constexpr (kTokens < kFewTokens) {
      if (tile_.count > kTokens) return run_few<kTokens + 1>();
    }
    multiply_few<kTokens>();
  }

  void run() {
    for (int64_t token = 0; token < tile_.count; token += kBlockTokens) {
      const int64_t tokens = std::min(kBlockTokens, tile_.count - token);
      if (token == 0 || tokens < kBlockTokens) _tile_loadconfig(&kTileShapes[static_cast<size_t>(tokens - 1)]);
      const bool has_two_groups = tokens > kTileEdge;
      const bool has_two_halves = rows_ > kTileEdge;
      if (has_two_groups && has_two_halves) multiply_block<2, 2>(token, tokens);
      if (has_two_groups && !has_two_halves) multiply_block<2, 1>(token, tokens);
      if (!has_two_groups && has_two_halves) multiply_block<1, 2>(token, tokens);
      if (!has_two_groups && !has_two_halves) multiply_block<1, 1>(token, tokens);
    }
  }

 private:
  template <int kGroups, int kHalves>
  void multiply_block(int64_t token, int64_t tokens) {
    const TokenRows inputs[2] = {token_rows(token, 0, std::min(tokens, kTileEdge)),
                                 token_rows(token, kTileEdge, tokens - kTileEdge)};
    const bool converts = token == 0;
    Sums sums = {};
    Step step = step_from(0);
    if (converts) convert<kHalves>(step, slot(0));
    for (int64_t index = 0; step.split_first < cols_; ++index) {
      const Step next = step_after(step);
      if (converts && next.split_first < cols_) convert<kHalves>(next, slot(index + 1));
      if (step.col <= step.split_first) zero_tiles<kGroups, kHalves>();
      add_step<kGroups, kHalves>(inputs, step.col, slot(index));
      if (next.split_first != step.split_first) {
        Sums split;
        read_tiles<kGroups, kHalves>(split);
        for (int half = 0; half < kHalves; ++half) add_split(sums, split, half, step.split_first, tokens);
      }
      step = next;
    }
    for (int half = 0; half < kHalves; ++half) write(sums, half, token, tokens);
  }

  template <int kTokens>
  void multiply_few() {
    const int64_t stride = round_up(cols_, kStepCols);
    auto* inputs = reinterpret_cast<float*>(gathered_);
    for (int64_t token = 0; token < kTokens; ++token) {
      const std::byte* source = tile_.operand + 2 * tile_.input_row(token) * tile_.operand_stride;
      for (int64_t col = 0; col < stride; col += kTileEdge) {
        const __m512 values = _mm512_mul_ps(Avx512Isa::load_bf16(source + 2 * col), _mm512_set1_ps(kHalfUnit));
        _mm512_store_ps(inputs + token * stride + col, values);
      }
    }
    Sums sums = {};
    for (int half = 0; half * kTileEdge < rows_; ++half) {
      for (Step step = step_from(0); step.split_first < cols_; step = step_from(step.split_last)) {
        Sums split;
        sum_few<kTokens>(split.values[half], inputs, stride, half, step);
        add_split(sums, split, half, step.split_first, kTokens);
      }
      write(sums, half, 0, kTokens);
    }
  }

  template <int kTokens>
  void sum_few(float (&out)[kBlockTokens][kTileEdge], const float* inputs, int64_t stride, int half, Step step) const {
    __m512 sums[kTokens] = {};
    for (; step.col < step.split_last; step.col += kStepCols) {
      HalfPairs weights;
      write_half_pairs(weights, window_at(step, half));
      keep_memory_order();
      __m512 even[kTokens] = {};
      __m512 odd[kTokens] = {};
#pragma GCC unroll 16
      for (int64_t pair = 0; pair < kStepCols / 2; ++pair) {
        const __m512 even_weights = floats_of(weights.even[pair]);
        const __m512 odd_weights = floats_of(weights.odd[pair]);
#pragma GCC unroll 4
        for (int token = 0; token < kTokens; ++token) {
          const float* input = inputs + token * stride + step.col + 2 * pair;
          even[token] = _mm512_fmadd_ps(even_weights, _mm512_set1_ps(input[0]), even[token]);
          odd[token] = _mm512_fmadd_ps(odd_weights, _mm512_set1_ps(input[1]), odd[token]);
        }
      }
      for (int token = 0; token < kTokens; ++token) {
        sums[token] = _mm512_add_ps(sums[token], _mm512_add_ps(even[token], odd[token]));
      }
    }
    for (int token = 0; token < kTokens; ++token) _mm512_store_ps(out[token], sums[token]);
  }

  static __m512 floats_of(const uint16_t (&halves)[kTileEdge]) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
  }

  int64_t gathered_stride() const { return 2 * round_up(cols_, kStepCols); }

  std::byte* slot(int64_t index) const { return panel_ + (reuses_slots_ ? index % kReusedSlots : index) * kStepBytes; }

  Step step_from(int64_t first) const {
    const int64_t tile_end = ((weight_.col_first + first) / kScaleTile + 1) * kScaleTile - weight_.col_first;
    const int64_t last = weight_.scale_kind == GLINT_SCALE_TILE ? std::min(tile_end, cols_) : cols_;
    return {first, last, first / kStepCols * kStepCols};
  }

  Step step_after(const Step& step) const {
    const int64_t col = step.col + kStepCols;
    return col < step.split_last ? Step{step.split_first, step.split_last, col} : step_from(step.split_last);
  }

  TokenRows token_rows(int64_t block_first, int64_t group_first, int64_t count) const {
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
  void convert(const Step& step, std::byte* target) const {
    for (int half = 0; half < kHalves; ++half) write_fp8_tile(target + half * kTileBytes, window_at(step, half));
  }

  Fp8Window window_at(const Step& step, int half) const {
    const int64_t row = half * kTileEdge;
    const int64_t rows = std::min(kTileEdge, rows_ - row);
    const std::byte* source = weight_.row(row_ + row) + step.col;
    if (step.col % (2 * kStepCols) == 0) {
      for (int64_t index = 0; index < rows; ++index) {
        const std::byte* line = source + index * weight_.stride;
        _mm_prefetch(reinterpret_cast<const char*>(line + kPrefetchBytes), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(line + kBlockRows * weight_.stride), _MM_HINT_T1);
      }
    }
    return {.source = source,
            .stride = weight_.stride,
            .rows = rows,
            .first = std::max<int64_t>(0, step.split_first - step.col),
            .last = std::min(kStepCols, step.split_last - step.col)};
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
  static void add_step(const TokenRows (&inputs)[2], int64_t col, const std::byte* weights) {
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
    const __m512 scales = split_scales(half * kTileEdge, col);
    for (int64_t token = 0; token < tokens; ++token) {
      float* total = sums.values[half][token];
      const __m512 part = _mm512_load_ps(split.values[half][token]);
      _mm512_store_ps(total, _mm512_fmadd_ps(part, scales, _mm512_load_ps(total)));
    }
  }

  __m512 split_scales(int64_t row, int64_t col) const {
    if (weight_.scale_kind != GLINT_SCALE_TILE) return _mm512_set1_ps(1.0F);
    alignas(64) float scales[kTileEdge] = {};
    const int64_t rows = std::min(kTileEdge, rows_ - row);
    for (int64_t index = 0; index < rows; ++index) scales[index] = weight_.scale_at(row_ + row + index, col);
    return _mm512_load_ps(scales);
  }

  void write(const Sums& sums, int half, int64_t token_first, int64_t tokens) const {
    const int64_t row = half * kTileEdge;
    const auto mask = static_cast<__mmask16>((1U << std::min(kTileEdge, rows_ - row)) - 1U);
    const __m512 factors = _mm512_load_ps(factors_ + row);
    const __m512 biases = _mm512_load_ps(biases_ + row);
    for (int64_t token = 0; token < tokens; ++token) {
      const __m512 total = _mm512_load_ps(sums.values[half][token]);
      const __m512 scales = _mm512_mul_ps(_mm512_set1_ps(tile_.input_scale(token_first + token, 0)), factors);
      float* out = tile_.out + (token_first + token) * tile_.out_stride + row_ + row;
      _mm512_mask_storeu_ps(out, mask, _mm512_add_ps(_mm512_mul_ps(total, scales), biases));
    }
  }

  const GemmTile& tile_;
  const Weight& weight_;
  int64_t row_;
  int64_t rows_;
  int64_t cols_;
  std::byte* gathered_;
  std::byte* panel_;
  bool reuses_slots_;
  alignas(64) float factors_[kBlockRows] = {};
  alignas(64) float biases_[kBlockRows] = {};
};

void multiply_fp8(const GemmTile& tile, std::byte* scratch) {
  const bool has_few_tokens = tile.count <= kFewTokens;
  const int64_t row_last = tile.row_first + tile.row_count;
  for (int64_t row = tile.row_first; row < row_last; row += kBlockRows) {
    Fp8Gemm gemm(tile, row, std::min(kBlockRows, row_last - row), scratch);
    if (has_few_tokens) {
      gemm.run_few();
    } else {
      gemm.run();
    }
  }
  if (!has_few_tokens) _tile_release();
}

int64_t tile_multiply_adds(float* values, int64_t rounds) {
  static_assert(kPeakValues * sizeof(float) == kTileBytes);
  constexpr int64_t kTiles = 4;
  _tile_loadconfig(&kTileShapes[kBlockTokens - 1]);
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
                                     .gemm_fp8 = multiply_fp8,
                                     .gemm_floats = LaneGemm<Avx512Isa>::floats,
                                     .attend = LaneAttention<Avx512Isa>::attend,
                                     .swiglu = lane_swiglu<Avx512Isa>,
                                     .quantise = LaneQuantise<Avx512Isa>::to_bf16,
                                     .multiply_adds = tile_multiply_adds};
  return kernels;
}

}
