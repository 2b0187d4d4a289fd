#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/memory.h"
#include "include/glint.h"

namespace glint {

inline constexpr int64_t kScaleTile = 128;

struct Weight {
  const std::byte* data = nullptr;
  const float* scales = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  int64_t row_first = 0;
  int64_t col_first = 0;
  int64_t scale_stride = 0;
  int32_t dtype = 0;
  int32_t scale_kind = GLINT_SCALE_NONE;

  int64_t element_bytes() const { return dtype == GLINT_DTYPE_BF16 ? 2 : dtype == GLINT_DTYPE_F32 ? 4 : 1; }
  Weight row_slice(int64_t first, int64_t count) const;
  Weight col_slice(int64_t first, int64_t count) const;
  const std::byte* row(int64_t index) const { return data + index * stride * element_bytes(); }
  float scale_at(int64_t row_index, int64_t col_index) const {
    if (scale_kind == GLINT_SCALE_NONE) return 1.0F;
    if (scale_kind == GLINT_SCALE_TENSOR) return scales[0];
    if (scale_kind == GLINT_SCALE_CHANNEL) return scales[row_first + row_index];
    return scales[(row_first + row_index) / kScaleTile * scale_stride + (col_first + col_index) / kScaleTile];
  }
};

struct FeedForwardWeights {
  Weight gate;
  Weight up;
  Weight down;
};

struct LayerWeights {
  const float* input_norm = nullptr;
  const float* post_attention_norm = nullptr;
  const float* query_norm = nullptr;
  const float* key_norm = nullptr;
  const float* query_bias = nullptr;
  const float* key_bias = nullptr;
  const float* value_bias = nullptr;
  const float* router_bias = nullptr;
  Weight query;
  Weight key;
  Weight value;
  Weight output;
  Weight router;
  FeedForwardWeights dense;
  FeedForwardWeights shared;
  std::vector<FeedForwardWeights> experts;
};

struct MtpWeights {
  const float* embedding_norm = nullptr;
  const float* hidden_norm = nullptr;
  const float* head_norm = nullptr;
  Weight eh_proj;
  Weight embedding;
  Weight head;
};

struct ModelWeights {
  Weight embedding;
  Weight lm_head;
  const float* final_norm = nullptr;
  std::vector<LayerWeights> layers;
  MtpWeights mtp;
};

class WeightStore {
 public:
  WeightStore(const glint_model& model, std::span<const glint_file> files, std::span<const glint_tensor> tensors,
              bool has_mtp, bool checks_fp8_values);

  const ModelWeights& weights() const { return weights_; }
  uint64_t bytes_mapped() const { return bytes_mapped_; }
  uint64_t bytes_copied() const { return bytes_copied_; }

 private:
  class Table;
  void place_layer(const Table& table, const glint_model& model, int32_t layer);
  void place_mtp(const Table& table, const glint_model& model);

  std::vector<MappedFile> files_;
  std::vector<ZeroedMemory> copies_;
  ModelWeights weights_;
  uint64_t bytes_mapped_ = 0;
  uint64_t bytes_copied_ = 0;
};

void check_model(const glint_model& model);
bool has_fp8_nan(const std::byte* values, uint64_t count);

}
