#pragma once

#include "cpu/step_state.h"

namespace glint::cpu {

struct SlicedGemm {
  float* out;
  int64_t part_stride;
  GemmInput input;
  int64_t input_count;
  int64_t input_first;
  int64_t count;
  Weight weight;
  int32_t slices;
};

int64_t max_gemm_calls(const glint_model& model, int32_t row_slices);
GemmInput prepare(Backend& backend, const OperandBuffer& buffer, const float* in, int64_t count, int64_t width,
                  int32_t slices);
GemmInput prepare_normed(Backend& backend, int64_t count);
GemmInput prepare_normed_floats(Backend& backend, int64_t count);
void add_gemm(Backend& backend, float* out, const GemmInput& input, int64_t count, const Weight& weight,
              const float* bias);
void add_sliced_gemm(Backend& backend, const SlicedGemm& gemm);
void run_calls(Backend& backend);
void project_to_parts(Backend& backend, const float* in, int64_t count, int64_t width, const Weight& weight);

Shard choose_shard(const Backend& backend, int64_t count);
void all_gather_rows(Backend& backend, const StepState& step, float* rows);

}
