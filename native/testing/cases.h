#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "include/glint.h"
#include "model/ops.h"

namespace glint::testing {

struct TestOperand {
  float* out;
  float* scales;
  const float* in;
  int64_t count;
  int64_t width;
  int32_t row_slices;
  int32_t has_fp8;
  int64_t group_size = 0;
};

struct TestGemm {
  float* out;
  const float* in;
  const std::byte* weight;
  const float* scales;
  const float* bias;
  const int32_t* input_rows;
  int64_t out_stride;
  int64_t input_count;
  int64_t count;
  int64_t weight_rows;
  int64_t weight_cols;
  int64_t row_first;
  int64_t row_count;
  int64_t col_first;
  int64_t col_count;
  int32_t dtype;
  int32_t scale_kind;
  int64_t group_size = 0;
};

enum class TestRounding : int32_t { kNone, kFp8, kRounded };

struct TestPages {
  std::byte* data;
  int64_t num_pages;
  int64_t page_tokens;
  int64_t layer;
  int32_t dtype;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  TestRounding rounding;
  int32_t request_count;
  const BatchRequest* requests;

  std::span<const BatchRequest> request_span() const { return {requests, static_cast<size_t>(request_count)}; }
};

struct TestRotation {
  float* query;
  float* key;
  float* value;
  const float* query_norm;
  const float* key_norm;
  const float* cosines;
  const float* sines;
  double norm_epsilon;
};

struct TestRow {
  const float* logits;
  const glint_sampling* sampling;
  const int32_t* history;
  const uint32_t* allowed_words;
  int32_t vocab_size;
  int32_t history_count;
  int32_t prompt_count;
  int32_t position;
};

}
