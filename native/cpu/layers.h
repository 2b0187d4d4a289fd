#pragma once

#include "cpu/step_state.h"

namespace glint::cpu {

struct SlicedProduct {
  float* out;
  int64_t part_stride;
  ProductInput input;
  int64_t input_count;
  int64_t input_first;
  int64_t count;
  Weight weight;
  int32_t slices;
};

int64_t max_product_calls(const glint_model& model, int32_t row_slices);
ProductInput prepare(Backend& backend, const OperandBuffer& buffer, const float* in, int64_t count, int64_t width,
                     int32_t slices);
ProductInput prepare_normed(Backend& backend, int64_t count);
ProductInput prepare_normed_floats(Backend& backend, int64_t count);
void add_product(Backend& backend, float* out, const ProductInput& input, int64_t count, const Weight& weight,
                 const float* bias);
void add_sliced_product(Backend& backend, const SlicedProduct& product);
void run_calls(Backend& backend);
void project_to_parts(Backend& backend, const float* in, int64_t count, int64_t width, const Weight& weight);

Shard choose_shard(const Backend& backend, int64_t count);
void all_gather_rows(Backend& backend, const StepState& step, float* rows);

}
