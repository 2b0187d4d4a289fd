#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace glint::cuda {

struct GatheredRows {
  void* first = nullptr;
  int64_t row_bytes = 0;
  void* second = nullptr;
  int64_t second_row_bytes = 0;
};

struct ConcatColumnsCall {
  float* out;
  const float* in;
  int64_t num_parts;
  int64_t rows;
  int64_t cols;
};

void launch_concat_columns(const ConcatColumnsCall& call, cudaStream_t stream);
void launch_repeat_rows(const GatheredRows& rows, int64_t rows_per_rank, int32_t num_ranks, cudaStream_t stream);

}
