#pragma once

#include <span>

#include "cuda/kernels/gemm/gemm_portable.h"
#include "cuda/step_state.h"

namespace glint::cuda {

PortableWeight portable_weight(const PlacedWeight& weight);
void run_gemm(Backend& backend, StepState& step, const PlacedWeight& weight, const float* bias, const Operand& operand,
              float* out, int64_t out_stride, int64_t count);
void run_sections(Backend& backend, StepState& step, const std::vector<PlacedSection>& sections, const Operand& operand,
                  float* out, int64_t out_stride);
void round_rows(Backend& backend, const float* rows, const Operand& operand, int64_t count, int64_t width);
void prepare_rows(Backend& backend, const float* rows, int64_t width, const Operand& operand, int64_t count);
void select_rows(Backend& backend, float* out, const float* in, std::span<const int32_t> g_rows, const float* residual);
void norm_chosen_rows(Backend& backend, StepState& step, const float* weight, std::span<const int32_t> g_rows,
                      float* out);
void norm_logit_rows(Backend& backend, StepState& step, const float* weight, std::span<const int32_t> rows);
void run_head(Backend& backend, StepState& step, const PlacedWeight& head);

}
