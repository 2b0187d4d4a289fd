#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace modelled {

struct Tile {
  int rows;
  int row_bytes;
  alignas(64) uint8_t bytes[16][64];
};

struct Tiles {
  bool is_configured;
  Tile tile[8];
};

inline thread_local Tiles tiles;

inline void require(bool is_met, const char* rule) {
  if (is_met) return;
  std::fprintf(stderr, "modelled tiles: %s\n", rule);
  std::abort();
}

inline Tile& tile_at(int number) {
  require(tiles.is_configured, "an instruction without a configuration");
  require(number >= 0 && number < 8 && tiles.tile[number].rows > 0, "a tile that is not configured");
  return tiles.tile[number];
}

inline void configure_tiles(const void* source) {
  uint8_t bytes[64];
  std::memcpy(bytes, source, sizeof(bytes));
  require(bytes[0] == 1 && bytes[1] == 0, "a palette other than 1 or a start row");
  for (int index = 2; index < 16; ++index) require(bytes[index] == 0, "a reserved byte is set");
  for (int number = 0; number < 16; ++number) {
    const int rows = bytes[48 + number];
    const int row_bytes = bytes[16 + 2 * number] + 256 * bytes[17 + 2 * number];
    require(rows <= 16 && row_bytes <= 64, "a tile that is too large");
    require((rows == 0) == (row_bytes == 0), "a tile with rows and no columns, or the reverse");
    if (number >= 8) require(rows == 0, "a tile beyond the eighth");
    if (number < 8) tiles.tile[number] = Tile{.rows = rows, .row_bytes = row_bytes, .bytes = {}};
  }
  tiles.is_configured = true;
}

inline void release_tiles() { tiles = Tiles{}; }

inline void zero_tile(int number) { std::memset(tile_at(number).bytes, 0, sizeof(Tile::bytes)); }

inline void load_tile(int number, const void* source, int64_t stride) {
  Tile& tile = tile_at(number);
  std::memset(tile.bytes, 0, sizeof(tile.bytes));
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(tile.bytes[row], static_cast<const uint8_t*>(source) + row * stride,
                static_cast<size_t>(tile.row_bytes));
  }
}

inline void store_tile(int number, void* target, int64_t stride) {
  const Tile& tile = tile_at(number);
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(static_cast<uint8_t*>(target) + row * stride, tile.bytes[row], static_cast<size_t>(tile.row_bytes));
  }
}

inline float without_subnormals(float value) {
  return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0F, value) : value;
}

inline float bf16_at(const Tile& tile, int row, int col) {
  uint16_t word = 0;
  std::memcpy(&word, tile.bytes[row] + 2 * col, sizeof(word));
  const uint32_t bits = uint32_t{word} << 16U;
  float value = 0.0F;
  std::memcpy(&value, &bits, sizeof(value));
  return without_subnormals(value);
}

inline void add_products_of_bf16(int sums_number, int left_number, int right_number) {
  Tile& sums = tile_at(sums_number);
  const Tile& left = tile_at(left_number);
  const Tile& right = tile_at(right_number);
  require(sums.rows == left.rows && sums.row_bytes == right.row_bytes && left.row_bytes == 4 * right.rows,
          "a product of tiles whose shapes do not fit");
  for (int row = 0; row < sums.rows; ++row) {
    for (int col = 0; col < sums.row_bytes / 4; ++col) {
      float even = 0.0F;
      float odd = 0.0F;
      for (int step = 0; step < right.rows; ++step) {
        even = without_subnormals(std::fma(bf16_at(left, row, 2 * step), bf16_at(right, step, 2 * col), even));
        odd = without_subnormals(std::fma(bf16_at(left, row, 2 * step + 1), bf16_at(right, step, 2 * col + 1), odd));
      }
      float sum = 0.0F;
      std::memcpy(&sum, sums.bytes[row] + 4 * col, sizeof(sum));
      sum = without_subnormals(without_subnormals(sum) + without_subnormals(even + odd));
      std::memcpy(sums.bytes[row] + 4 * col, &sum, sizeof(sum));
    }
  }
}

}

#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_release
#undef _tile_stored
#undef _tile_zero
#define _tile_dpbf16ps modelled::add_products_of_bf16
#define _tile_loadconfig modelled::configure_tiles
#define _tile_loadd modelled::load_tile
#define _tile_release modelled::release_tiles
#define _tile_stored modelled::store_tile
#define _tile_zero modelled::zero_tile
