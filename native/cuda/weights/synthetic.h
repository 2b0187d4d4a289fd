#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

namespace glint::cuda {

inline constexpr int32_t kCodeTableSize = 256;

struct CodeTable {
  std::array<uint8_t, kCodeTableSize> codes;
};

struct FillCodesCall {
  uint8_t* out;
  int64_t first;
  int64_t count;
  uint64_t key;
  CodeTable table;
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

void launch_fill_codes(const FillCodesCall& call, cudaStream_t stream);
void launch_fill_normal(const FillNormalCall& call, cudaStream_t stream);

}
