#pragma once

#include "cuda/backend.h"
#include "cuda/kernels/gemm/gemm_portable.h"

namespace glint::cuda {

PortableWeight portable_weight(const PlacedWeight& weight);
void run_product(Backend& backend, const PlacedWeight& weight, const float* bias, const Operand& operand, float* out,
                 int64_t out_stride, int64_t count);
void run_sections(Backend& backend, const std::vector<PlacedSection>& sections, const Operand& operand, float* out,
                  int64_t out_stride);
void prepare_rows(Backend& backend, const float* rows, int64_t width, const Operand& operand);
Operand prepare_gated(Backend& backend, int64_t width);
void add_update(Backend& backend);
void compute_all_logits(Backend& backend);
void compute_row_logits(Backend& backend, int64_t count);

}
