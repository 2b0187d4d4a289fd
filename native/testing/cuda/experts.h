#pragma once

#include "testing/cuda/grouping.h"
#include "testing/cuda/operand.h"

namespace glint::testing {

struct TestExperts {
  float* hidden;
  float* gate;
  float* up;
  float* fp8;
  float* fp8_scales;
  float* routed;
  float* out;
  const float* in;
  const std::byte* gate_weights;
  const std::byte* up_weights;
  const std::byte* down_weights;
  const float* gate_scales;
  const float* up_scales;
  const float* down_scales;
  const float* shared;
  const TestGrouping* grouping;
  int64_t hidden_size;
  int64_t width;
  int32_t dtype;
  int32_t scale_kind;

  int64_t num_matrices() const { return grouping->num_local() + (grouping->has_shared != 0 ? 1 : 0); }
  int64_t num_tokens() const { return grouping->num_tokens; }
  int64_t num_pairs() const { return grouping->num_tokens * grouping->experts_per_token; }
  bool has_fp8() const { return dtype == GLINT_DTYPE_F8_E4M3; }
  int64_t element_bytes() const { return has_fp8() ? 1 : 2; }
  int64_t matrix_bytes() const { return hidden_size * width * element_bytes(); }
};

}
