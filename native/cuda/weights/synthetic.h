#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

namespace glint::cuda {

inline constexpr int32_t kFp8TableSize = 256;

struct Fp8Table {
  std::array<uint8_t, kFp8TableSize> values;
};

struct FillFp8Call {
  uint8_t* out;
  int64_t first;
  int64_t count;
  uint64_t key;
  Fp8Table table;
};

struct FillNormalCall {
  uint8_t* out;
  int64_t first;
  int64_t count;
  uint64_t key;
  float mean;
  float deviation;
  bool is_bf16;
};

void launch_fill_fp8(const FillFp8Call& call, cudaStream_t stream);
void launch_fill_normal(const FillNormalCall& call, cudaStream_t stream);

}
