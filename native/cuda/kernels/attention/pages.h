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

enum class PageElement : int32_t { kBf16, kE4m3, kBf16OfE4m3 };

constexpr bool holds_fp8(PageElement element) { return element == PageElement::kE4m3; }
constexpr int64_t page_head_bytes(int64_t head_dim, PageElement element) {
  return kPageTokens * padded_head_dim(head_dim) * (holds_fp8(element) ? 1 : 2);
}

struct KvPages {
  std::byte* keys;
  std::byte* values;
  int64_t page_bytes;
  int64_t head_bytes;
  PageElement element = PageElement::kBf16;
};

constexpr int swizzled_offset(int row, int dim) {
  const int chunk = (dim % kSlabDims / kChunkDims) ^ (row % kChunkDims);
  return dim / kSlabDims * kSlabBytes + row * kSlabRowBytes + chunk * kChunkBytes + dim % kChunkDims * 2;
}

inline constexpr int kFp8Group = 16;

constexpr int fp8_group_offset(int padded_dim, int row, int group) {
  const int rows_per_line = kSlabRowBytes / padded_dim;
  const int num_groups = padded_dim / kFp8Group;
  return row * padded_dim + (group ^ (row / rows_per_line % num_groups)) * kFp8Group;
}

constexpr int fp8_dim(int place) { return place / kFp8Group * kFp8Group + place % kFp8Group / 2 + place % 2 * 8; }

constexpr int fp8_offset(int padded_dim, int row, int dim) {
  return fp8_group_offset(padded_dim, row, dim / kFp8Group) + dim % 8 * 2 + dim % kFp8Group / 8;
}

}
