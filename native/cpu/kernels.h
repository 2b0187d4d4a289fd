#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "include/glint.h"
#include "model/backend.h"
#include "model/weights.h"

namespace glint {

inline constexpr int64_t kOperandAlignment = 64;
inline constexpr int64_t kTileRows = 32;
inline constexpr int64_t kInputGroup = kScaleTile;
inline constexpr int64_t kMaxQueriesPerTile = 16;
inline constexpr int64_t kPeakValues = 256;
inline constexpr int64_t kLeastGemmScratch = 96 << 10;
inline constexpr int64_t kScratchBytesPerColumn = 192;

struct ColumnRange {
  int64_t first;
  int64_t count;
};

struct GemmTile {
  float* out;
  int64_t out_stride;
  const std::byte* operand;
  int64_t operand_stride;
  const float* input_scales;
  int64_t input_groups;
  const int32_t* input_rows;
  int64_t count;
  const Weight* weight;
  const float* bias;
  int64_t row_first;
  int64_t row_count;
  bool has_packed_inputs = false;

  int64_t input_row(int64_t index) const { return input_rows == nullptr ? index : input_rows[index]; }
  float input_scale(int64_t index, int64_t group) const {
    return input_scales == nullptr ? 1.0F : input_scales[input_row(index) * input_groups + group];
  }
  ColumnRange group_cols(int64_t group) const {
    if (input_groups == 1) return {0, weight->cols};
    const int64_t first = group * kInputGroup;
    return {first, std::min(kInputGroup, weight->cols - first)};
  }
  float bias_at(int64_t row) const { return bias == nullptr ? 0.0F : bias[row]; }
};

struct AttentionTile {
  float* out;
  const float* query;
  int64_t row_stride;
  int64_t group_heads;
  int64_t head_dim;
  int64_t row_count;
  int64_t first_position;
  int64_t context_first;
  const int32_t* pages;
  const std::byte* keys;
  const std::byte* values;
  int64_t page_bytes;
  int64_t page_tokens;
  int32_t dtype;

  int64_t first_split() const { return context_first / kSplitPositions * kSplitPositions; }
  int64_t num_masked(int64_t first) const { return std::max<int64_t>(0, context_first - first); }
};

enum class OperandForm { kFloat, kBf16 };

struct RowKernels {
  void (*norm)(float* out, const float* in, const float* weight, int64_t width, double epsilon);
  void (*rotate_head)(float* head, const float* cosines, const float* sines, int64_t rotary_dim);
  void (*write_bf16)(uint16_t* out, const float* in, int64_t count);
  void (*round_to_bf16)(float* values, int64_t count);
  void (*add_weighted)(double* sums, const float* values, double weight, int64_t count);
  void (*write_sums)(float* out, const double* sums, const float* values, int64_t count);
};

struct KernelSet {
  const char* name;
  int32_t id;
  OperandForm fp8_form;
  void (*gemm_fp8)(const GemmTile& tile, std::byte* scratch);
  void (*gemm_floats)(const GemmTile& tile, std::byte* scratch);
  void (*attend)(const AttentionTile& tile, std::byte* scratch);
  void (*swiglu)(float* out, const float* gate, const float* up, int64_t count);
  float (*quantise)(std::byte* out, const float* in, int64_t count);
  RowKernels rows;
  int64_t (*multiply_adds)(float* values, int64_t rounds);
  bool sums_groups = false;
};

int64_t attention_scratch_bytes(int64_t queries, int64_t head_dim, int64_t page_tokens);
int64_t gemm_scratch_bytes(int64_t max_cols);

const KernelSet& exact_kernels();
const KernelSet& plain_kernels();
#if defined(GLINT_ARM64)
const KernelSet& neon_kernels();
const KernelSet& neon_bf16_kernels();
#endif
#if defined(GLINT_X86)
const KernelSet& avx2_kernels();
const KernelSet& avx512_kernels();
const KernelSet& avx512_bf16_kernels();
const KernelSet& amx_kernels();
#endif

const KernelSet& choose_kernels(int32_t requested);

}
