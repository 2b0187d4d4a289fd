#pragma once

#include <cstdint>
#include <type_traits>

#include "base/contract.h"
#include "cuda/kernels/norm/row_tile.cuh"
#include "cuda/kernels/norm/rows.h"

namespace glint::cuda {

template <typename Visit>
void with_room_for(int32_t num_parts, Visit visit) {
  require_argument(num_parts >= 0 && num_parts <= kMaxParts, "a sum joins ", num_parts, " parts; it joins 0 to ",
                   kMaxParts);
  if (num_parts == 0) return visit(std::integral_constant<int, 0>());
  if (num_parts == 1) return visit(std::integral_constant<int, 1>());
  if (num_parts == 2) return visit(std::integral_constant<int, 2>());
  if (num_parts <= 4) return visit(std::integral_constant<int, 4>());
  visit(std::integral_constant<int, kMaxParts>());
}

template <typename Visit>
bool with_whole_vectors(int64_t width, Visit visit) {
  constexpr int64_t kTileFloats = kRowThreads * kVectorFloats;
  if (width == 4 * kTileFloats) visit(std::integral_constant<int, 4>());
  if (width == 5 * kTileFloats) visit(std::integral_constant<int, 5>());
  return width == 4 * kTileFloats || width == 5 * kTileFloats;
}

template <typename Visit>
void with_norm_vectors(int64_t width, Visit visit) {
  constexpr int64_t kTileFloats = kRowThreads * kVectorFloats;
  require_argument(width <= 8 * kTileFloats, "a norm is ", width, " wide; at most ", 8 * kTileFloats);
  if (width <= kTileFloats) return visit(std::integral_constant<int, 1>());
  if (width <= 5 * kTileFloats) return visit(std::integral_constant<int, 5>());
  visit(std::integral_constant<int, 8>());
}

}
