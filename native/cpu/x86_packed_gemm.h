#pragma once

#include "cpu/x86_broadcast_gemm.h"

namespace glint {

namespace {

inline constexpr int64_t kBlockTokens = 2 * kTileEdge;

struct TileRows {
  const std::byte* data;
  int64_t stride;
};

struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  std::array<uint8_t, 14> reserved{};
  std::array<uint16_t, 16> row_bytes{};
  std::array<uint8_t, 16> rows{};

  constexpr void set(size_t tile, int64_t count) {
    rows[tile] = static_cast<uint8_t>(count);
    row_bytes[tile] = count == 0 ? uint16_t{0} : static_cast<uint16_t>(kTileRowBytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

constexpr TileShapes make_whole_tiles() {
  TileShapes shapes;
  for (size_t tile = 0; tile < 8; ++tile) shapes.set(tile, kTileEdge);
  return shapes;
}

constexpr TileShapes kWholeTiles = make_whole_tiles();

constexpr int64_t bit_matrix(std::array<uint8_t, 8> source_of_each_bit) {
  uint64_t matrix = 0;
  for (const uint8_t source : source_of_each_bit) matrix = (matrix << 8U) | source;
  return static_cast<int64_t>(matrix);
}

constexpr int64_t kHighByteOfBf16 = bit_matrix({0x10, 0x20, 0x40, 0x40, 0x40, 0x40, 0x40, 0x80});
constexpr int kInvertedHighBits = 0x3c;
constexpr int64_t kLowByteOfBf16 = bit_matrix({0, 0, 0, 0, 0x01, 0x02, 0x04, 0x08});

alignas(16) constexpr std::array<std::array<uint8_t, 16>, 2> kSubnormalBytes = [] {
  std::array<std::array<uint8_t, 16>, 2> bytes{};
  for (size_t mantissa = 0; mantissa < 8; ++mantissa) {
    const uint32_t value = std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-9F);
    bytes[0][mantissa] = static_cast<uint8_t>(value >> 16U);
    bytes[1][mantissa] = static_cast<uint8_t>(value >> 24U);
  }
  return bytes;
}();

inline __m512i same_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

struct Bf16Bytes {
  __m512i low;
  __m512i high;

  explicit Bf16Bytes(__m512i fp8)
      : low(_mm512_gf2p8affine_epi64_epi8(fp8, _mm512_set1_epi64(kLowByteOfBf16), 0)),
        high(_mm512_gf2p8affine_epi64_epi8(fp8, _mm512_set1_epi64(kHighByteOfBf16), kInvertedHighBits)) {
    const __mmask64 is_subnormal = _mm512_testn_epi8_mask(fp8, same_bytes(0x78));
    if (is_subnormal != 0) [[unlikely]] {
      const __m512i mantissas = _mm512_and_si512(fp8, same_bytes(0x07));
      const __m512i signs = _mm512_and_si512(fp8, same_bytes(0x80));
      low = _mm512_mask_shuffle_epi8(low, is_subnormal, bytes_of_subnormals(0), mantissas);
      high = _mm512_mask_shuffle_epi8(high, is_subnormal, bytes_of_subnormals(1), mantissas);
      high = _mm512_or_si512(high, signs);
    }
  }

 private:
  static __m512i bytes_of_subnormals(size_t place) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kSubnormalBytes[place].data())));
  }
};

inline void write_two_fp8_rows(std::byte* target, const std::byte* first, const std::byte* second) {
  const auto load = [](const std::byte* row) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)); };
  const __m512i rows = _mm512_inserti64x4(_mm512_castsi256_si512(load(first)), load(second), 1);
  const __m512i one_of_each_in_a_lane = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  const Bf16Bytes bytes(_mm512_permutexvar_epi64(one_of_each_in_a_lane, rows));
  _mm512_store_si512(target, _mm512_unpacklo_epi8(bytes.low, bytes.high));
  _mm512_store_si512(target + kTileRowBytes, _mm512_unpackhi_epi8(bytes.low, bytes.high));
}

inline void write_fp8_rows(std::byte* target, const Window& window) {
  alignas(64) std::byte values[kTileEdge * kStepCols];
  const std::byte* source = window.source;
  int64_t stride = window.stride;
  if (!window.is_whole()) {
    std::memset(values, 0, sizeof(values));
    copy_window(values, window, 1);
    source = values;
    stride = kStepCols;
  }
  for (int64_t row = 0; row < kTileEdge; row += 2, source += 2 * stride) {
    write_two_fp8_rows(target + row * kTileRowBytes, source, source + stride);
  }
}

struct Bf16Inputs {
  static constexpr int64_t kPlanes = 1;
  static constexpr int64_t kElementBytes = 2;

  static void split(__m512i (&planes)[kPlanes], const std::byte* source) { planes[0] = _mm512_loadu_si512(source); }
};

struct FloatInputs {
  static constexpr int64_t kPlanes = 3;
  static constexpr int64_t kElementBytes = 4;

  static void split(__m512i (&planes)[kPlanes], const std::byte* source) {
    __m512 first = _mm512_loadu_ps(source);
    __m512 second = _mm512_loadu_ps(source + kTileRowBytes);
    for (__m512i& plane : planes) {
      plane = high_words(first, second);
      first = without_high_word(first);
      second = without_high_word(second);
    }
  }

 private:
  static __m512i high_words(__m512 first, __m512 second) {
    alignas(64) static constexpr std::array<uint16_t, 32> kOddWords = [] {
      std::array<uint16_t, 32> words{};
      for (uint16_t index = 0; index < 32; ++index) words[index] = static_cast<uint16_t>(2 * index + 1);
      return words;
    }();
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first), _mm512_load_si512(kOddWords.data()),
                                     _mm512_castps_si512(second));
  }

  static __m512 without_high_word(__m512 values) {
    const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    return _mm512_sub_ps(values, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(values), high)));
  }
};

struct Fp8Weights {
  using Inputs = Bf16Inputs;
  static constexpr int64_t kElementBytes = 1;

  static TileRows tile(std::byte* slot, const Window& window) {
    write_fp8_rows(slot, window);
    return {slot, kTileRowBytes};
  }
};

struct Bf16Weights {
  using Inputs = FloatInputs;
  static constexpr int64_t kElementBytes = 2;

  static TileRows tile(std::byte* slot, const Window& window) {
    if (window.is_whole()) return {window.source, window.stride};
    std::memset(slot, 0, static_cast<size_t>(kTileBytes));
    copy_window(slot, window, 2);
    return {slot, kTileRowBytes};
  }
};

template <typename Weights>
class PackedGemm {
 public:
  static void multiply(const GemmTile& tile, std::byte* scratch) {
    const int64_t row_last = tile.row_first + tile.row_count;
    _tile_loadconfig(&kWholeTiles);
    for (int64_t token = 0; token < tile.count; token += kBlockTokens) {
      const int64_t tokens = std::min(kBlockTokens, tile.count - token);
      const bool is_packed = tile.has_packed_inputs && tile.count <= kBlockTokens;
      for (int64_t row = tile.row_first; row < row_last; row += kBlockRows) {
        const BlockRows rows(tile, row, std::min(kBlockRows, row_last - row));
        PackedGemm gemm(tile, rows, scratch);
        if (!is_packed && row == tile.row_first) gemm.pack(token, tokens);
        gemm.multiply_block(token, tokens);
      }
    }
    _tile_release();
  }

 private:
  using Inputs = typename Weights::Inputs;
  static constexpr int64_t kPlanes = Inputs::kPlanes;
  static constexpr int64_t kStepBytes = 2 * kPlanes * kTileBytes;
  static constexpr int64_t kSlots = 4;
  static constexpr int64_t kFewTokens = 4;
  static_assert(kStepBytes <= kStepCols * kScratchBytesPerColumn);
  static_assert(kSlots * 2 * kTileBytes + kStepBytes <= 2 * kOperandAlignment * kScratchBytesPerColumn);

  struct Sums {
    alignas(64) float values[2][2][kTileEdge][kTileEdge];
  };

  PackedGemm(const GemmTile& tile, const BlockRows& rows, std::byte* scratch)
      : tile_(tile), rows_(rows), columns_(*tile.weight), slots_(scratch), packed_(scratch + kSlots * 2 * kTileBytes) {}

  void pack(int64_t token, int64_t tokens) {
    for (int64_t group = 0; group * kTileEdge < tokens; ++group) {
      const int64_t first = token + group * kTileEdge;
      const int64_t count = std::min(kTileEdge, tokens - group * kTileEdge);
      const std::byte* sources[kTileEdge];
      for (int64_t t = 0; t < count; ++t) {
        sources[t] = tile_.operand + tile_.input_row(first + t) * tile_.operand_stride * Inputs::kElementBytes;
      }
      alignas(64) std::byte rows[kPlanes][kTileBytes] = {};
      for (int64_t col = 0; col < tile_.weight->cols; col += kStepCols) {
        for (int64_t t = 0; t < count; ++t) {
          __m512i planes[kPlanes];
          Inputs::split(planes, sources[t] + col * Inputs::kElementBytes);
          for (int64_t plane = 0; plane < kPlanes; ++plane) {
            _mm512_store_si512(rows[plane] + t * kTileRowBytes, planes[plane]);
          }
        }
        for (int64_t plane = 0; plane < kPlanes; ++plane) {
          pack_pairs(packed_ + col / kStepCols * kStepBytes + (2 * plane + group) * kTileBytes, rows[plane], count);
        }
      }
    }
  }

  static void pack_pairs(std::byte* target, const std::byte* rows, int64_t count) {
    if (count <= kFewTokens) return pack_few(target, rows);
    transpose_dwords(rows, kTileRowBytes, [target](int64_t pair, __m512i values) {
      _mm512_store_si512(target + pair * kTileRowBytes, values);
    });
  }

  static void pack_few(std::byte* target, const std::byte* rows) {
    static_assert(kFewTokens == 4);
    const auto load = [rows](int64_t token) { return _mm512_load_si512(rows + token * kTileRowBytes); };
    const __m512i low01 = _mm512_unpacklo_epi32(load(0), load(1));
    const __m512i high01 = _mm512_unpackhi_epi32(load(0), load(1));
    const __m512i low23 = _mm512_unpacklo_epi32(load(2), load(3));
    const __m512i high23 = _mm512_unpackhi_epi32(load(2), load(3));
    store_lanes(target, _mm512_unpacklo_epi64(low01, low23));
    store_lanes(target + kTileRowBytes, _mm512_unpackhi_epi64(low01, low23));
    store_lanes(target + 2 * kTileRowBytes, _mm512_unpacklo_epi64(high01, high23));
    store_lanes(target + 3 * kTileRowBytes, _mm512_unpackhi_epi64(high01, high23));
  }

  static void store_lanes(std::byte* target, __m512i values) {
    constexpr int64_t kLaneStride = 4 * kTileRowBytes;
    const auto store = [target](int64_t lane, __m128i part) {
      _mm_store_si128(reinterpret_cast<__m128i*>(target + lane * kLaneStride), part);
    };
    store(0, _mm512_castsi512_si128(values));
    store(1, _mm512_extracti32x4_epi32(values, 1));
    store(2, _mm512_extracti32x4_epi32(values, 2));
    store(3, _mm512_extracti32x4_epi32(values, 3));
  }

  void multiply_block(int64_t token, int64_t tokens) {
    const bool has_two_groups = tokens > kTileEdge;
    const bool has_two_halves = rows_.num_halves() == 2;
    if (has_two_groups && has_two_halves) multiply_block<2, 2>(token, tokens);
    if (has_two_groups && !has_two_halves) multiply_block<2, 1>(token, tokens);
    if (!has_two_groups && has_two_halves) multiply_block<1, 2>(token, tokens);
    if (!has_two_groups && !has_two_halves) multiply_block<1, 1>(token, tokens);
  }

  template <int kGroups, int kHalves>
  void multiply_block(int64_t token, int64_t tokens) {
    Sums sums;
    TileRows weights[kSlots][2];
    ColumnStep step = columns_.first();
    read_weights<kHalves>(weights[0], step, 0);
    for (int64_t index = 0; columns_.contains(step); ++index) {
      const ColumnStep next = columns_.after(step);
      const int64_t next_slot = (index + 1) % kSlots;
      if (columns_.contains(next)) read_weights<kHalves>(weights[next_slot], next, next_slot);
      if (step.col <= step.split_first) zero_tiles<kGroups, kHalves>();
      add_step<kGroups, kHalves>(weights[index % kSlots], packed_ + step.col / kStepCols * kStepBytes);
      if (next.split_first != step.split_first) end_split<kGroups, kHalves>(sums, step.split_first);
      step = next;
    }
    for (int half = 0; half < kHalves; ++half) {
      for (int group = 0; group < kGroups; ++group) write(sums, half, group, token, tokens);
    }
  }

  template <int kHalves>
  void read_weights(TileRows (&weights)[2], const ColumnStep& step, int64_t slot) const {
    for (int half = 0; half < kHalves; ++half) {
      weights[half] = Weights::tile(slots_ + (2 * slot + half) * kTileBytes, rows_.template window<Weights::kElementBytes>(step, half));
    }
  }

  template <int kGroups, int kHalves>
  static void zero_tiles() {
    _tile_zero(0);
    if constexpr (kGroups == 2) _tile_zero(1);
    if constexpr (kHalves == 2) _tile_zero(2);
    if constexpr (kGroups == 2 && kHalves == 2) _tile_zero(3);
  }

  template <int kGroups, int kHalves>
  static void add_step(const TileRows (&weights)[2], const std::byte* inputs) {
    keep_memory_order();
    _tile_loadd(4, weights[0].data, weights[0].stride);
    if constexpr (kHalves == 2) _tile_loadd(5, weights[1].data, weights[1].stride);
    for (int64_t plane = 0; plane < kPlanes; ++plane, inputs += 2 * kTileBytes) {
      _tile_loadd(6, inputs, kTileRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kHalves == 2) _tile_dpbf16ps(2, 5, 6);
      if constexpr (kGroups == 2) {
        _tile_loadd(7, inputs + kTileBytes, kTileRowBytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kHalves == 2) _tile_dpbf16ps(3, 5, 7);
      }
    }
    keep_memory_order();
  }

  template <int kGroups, int kHalves>
  void end_split(Sums& sums, int64_t split_first) const {
    if (!rows_.scales_splits()) return read_tiles<kGroups, kHalves>(sums);
    Sums split;
    read_tiles<kGroups, kHalves>(split);
    for (int half = 0; half < kHalves; ++half) {
      alignas(64) float scales[kTileEdge];
      _mm512_store_ps(scales, rows_.split_scales(half, split_first));
      for (int group = 0; group < kGroups; ++group) {
        for (int64_t row = 0; row < kTileEdge; ++row) {
          float* total = sums.values[half][group][row];
          const __m512 before = split_first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(total);
          const __m512 part = _mm512_load_ps(split.values[half][group][row]);
          _mm512_store_ps(total, _mm512_fmadd_ps(part, _mm512_set1_ps(scales[row]), before));
        }
      }
    }
  }

  template <int kGroups, int kHalves>
  static void read_tiles(Sums& sums) {
    _tile_stored(0, sums.values[0][0], kTileRowBytes);
    if constexpr (kGroups == 2) _tile_stored(1, sums.values[0][1], kTileRowBytes);
    if constexpr (kHalves == 2) _tile_stored(2, sums.values[1][0], kTileRowBytes);
    if constexpr (kGroups == 2 && kHalves == 2) _tile_stored(3, sums.values[1][1], kTileRowBytes);
  }

  void write(const Sums& sums, int half, int group, int64_t token, int64_t tokens) const {
    const auto* source = reinterpret_cast<const std::byte*>(sums.values[half][group]);
    const BlockRows::Writer out = rows_.writer(half);
    const auto write_token = [&](int64_t index, __m512i values) {
      const int64_t t = group * kTileEdge + index;
      if (t < tokens) out.write(token + t, _mm512_castsi512_ps(values));
    };
    transpose_dwords(source, kTileRowBytes, write_token, std::min(kTileEdge, tokens - group * kTileEdge));
  }

  const GemmTile& tile_;
  const BlockRows& rows_;
  SplitColumns columns_;
  std::byte* slots_;
  std::byte* packed_;
};

}

}
