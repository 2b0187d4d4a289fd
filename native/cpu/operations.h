#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/workers.h"
#include "model/ops.h"
#include "model/weights.h"

namespace glint {


namespace cpu {

struct PageLayout {
  std::byte* data = nullptr;
  int64_t num_pages = 0;
  int64_t page_tokens = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int32_t dtype = 0;
  bool rounds_to_e4m3 = false;

  int64_t element_bytes() const { return dtype == GLINT_DTYPE_F32 ? 4 : 2; }
  int64_t head_bytes() const { return page_tokens * head_dim * element_bytes(); }
  int64_t page_bytes() const { return num_kv_heads * head_bytes(); }
  std::byte* keys(int64_t layer) const { return data + 2 * layer * num_pages * page_bytes(); }
  std::byte* values(int64_t layer) const { return data + (2 * layer + 1) * num_pages * page_bytes(); }
};

struct GemmInput {
  const std::byte* operand = nullptr;
  const float* scales = nullptr;
  int64_t stride = 0;
  int64_t groups = 1;
};

struct GemmCall {
  float* out = nullptr;
  int64_t out_stride = 0;
  GemmInput input;
  const int32_t* input_rows = nullptr;
  int64_t count = 0;
  Weight weight;
  const float* bias = nullptr;
};

struct OperandBuffer {
  std::byte* operand = nullptr;
  float* scales = nullptr;
};

struct HeadShape {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;
};

struct RotateCall {
  float* query;
  float* key;
  float* value;
  const float* query_norm;
  const float* key_norm;
  const float* cosines;
  const float* sines;
  HeadShape heads;
  double norm_epsilon;
};

struct RouteCall {
  int32_t* experts;
  float* weights;
  const float* logits;
  const float* bias;
  int64_t count;
  const glint_model* model;
};

struct CombineCall {
  float* out;
  const float* routed;
  const int32_t* routed_rows;
  const float* weights;
  const int32_t* experts;
  const float* shared;
  int64_t count;
  int64_t hidden_size;
  int64_t experts_per_token;
  int32_t expert_first;
  int32_t expert_last;
};

inline constexpr int64_t kOperandElementBytes = sizeof(float);

int64_t operand_stride(int64_t width, int32_t row_slices);
int64_t fp8_element_bytes(const Workers& workers);
int64_t num_input_groups(int64_t width, int64_t group_size);

void embed(Workers& workers, float* hidden, const Weight& table, std::span<const int32_t> tokens);
void rms_norm(Workers& workers, float* out, const float* in, const float* weight, int64_t count, int64_t width,
              double epsilon);
void fill_rotary(Workers& workers, float* cosines, float* sines, std::span<const int32_t> positions, int64_t rotary_dim,
                 double theta);
void prepare_floats(Workers& workers, OperandBuffer out, const float* in, int64_t count, int64_t width,
                    int32_t row_slices);
void prepare_fp8(Workers& workers, OperandBuffer out, const float* in, int64_t count, int64_t width, int32_t row_slices,
                 int64_t group_size);
void gemm(Workers& workers, std::span<const GemmCall> calls);
void rope_and_cache(Workers& workers, const RotateCall& call, const PageLayout& pages, int64_t layer,
                    std::span<const BatchRequest> requests);
void attention(Workers& workers, float* out, const float* query, const PageLayout& pages, int64_t layer,
               std::span<const BatchRequest> requests, const HeadShape& heads);
void swiglu(Workers& workers, float* out, const float* gate, const float* up, int64_t count);
void route(Workers& workers, const RouteCall& call);
void combine(Workers& workers, const CombineCall& call);
void reduce_slices(Workers& workers, float* parts, int64_t part_stride, int32_t num_parts, int64_t count);
void add_rows(Workers& workers, float* hidden, const float* update, int64_t count);
void gather_rows(Workers& workers, float* out, const float* in, std::span<const int32_t> rows, int64_t width);

}

}
