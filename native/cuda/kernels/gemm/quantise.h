#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace glint::cuda {

struct QuantiseCall {
  uint8_t* fp8;
  float* scales;
  const float* in;
  int64_t in_stride;
  int64_t count;
  int64_t width;
  int32_t row_slices;
  int64_t slice_stride;
};

struct QuantisePartsCall {
  uint8_t* fp8;
  float* scales;
  const float* in;
  const float* magnitudes;
  int64_t count;
  int64_t part_width;
  int32_t num_parts;
  int64_t fp8_stride;
};

struct SwigluCall {
  float* out;
  uint8_t* fp8;
  float* scales;
  const float* gate;
  const float* up;
  int64_t in_stride;
  int64_t count;
  int64_t width;
  int32_t row_slices;
  int64_t slice_stride;
};

void launch_quantise(const QuantiseCall& call, cudaStream_t stream);
void launch_quantise_parts(const QuantisePartsCall& call, cudaStream_t stream);
void launch_swiglu(const SwigluCall& call, cudaStream_t stream);

}
