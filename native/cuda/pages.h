#pragma once

#include <cstddef>
#include <cstdint>

namespace glint::cuda {

inline constexpr int kPageTokens = 64;
inline constexpr int kSlabDims = 64;
inline constexpr int kSlabRowBytes = 2 * kSlabDims;
inline constexpr int kSlabBytes = kPageTokens * kSlabRowBytes;
inline constexpr int kChunkDims = 8;
inline constexpr int kChunkBytes = 2 * kChunkDims;
inline constexpr int kMaxHeadDim = 2 * kSlabDims;

constexpr int64_t padded_head_dim(int64_t head_dim) { return head_dim <= kSlabDims ? kSlabDims : kMaxHeadDim; }

struct PagePool {
  std::byte* keys;
  std::byte* values;
  int64_t page_bytes;
  int64_t head_bytes;
};

constexpr int swizzled_offset(int row, int dim) {
  const int chunk = (dim % kSlabDims / kChunkDims) ^ (row % kChunkDims);
  return dim / kSlabDims * kSlabBytes + row * kSlabRowBytes + chunk * kChunkBytes + dim % kChunkDims * 2;
}

}
