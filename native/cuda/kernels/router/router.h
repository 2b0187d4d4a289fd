#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/moe/experts.h"

namespace glint::cuda {

inline constexpr int kRouterSplitCols = 128;
inline constexpr int kMaxRouterExperts = 512;
inline constexpr int kMaxRouterChoices = 32;

struct RouterCall {
  int32_t* experts;
  float* weights;
  float* splits;
  const float* in;
  const uint16_t* weight;
  const float* bias;
  int64_t count;
  int32_t width;
  int32_t num_experts;
  int32_t experts_per_token;
  float routed_scaling;
  bool normalises;
};

constexpr int64_t router_splits(int64_t width) { return (width + kRouterSplitCols - 1) / kRouterSplitCols; }

inline constexpr int64_t kRouterFewRows = 512;

constexpr bool takes_few_rows(int64_t rows, int64_t width) { return rows <= kRouterFewRows || width % 8 != 0; }

constexpr int64_t router_split_floats(int64_t max_rows, int64_t width, int64_t num_experts) {
  const int64_t few_rows = takes_few_rows(max_rows, width) ? max_rows : kRouterFewRows;
  const int64_t few = few_rows * router_splits(width);
  return (few > max_rows ? few : max_rows) * num_experts;
}

inline constexpr int kChoiceBlocks = 8;
inline constexpr int kChoiceSlots = 4;
inline constexpr int64_t kMostGroupedRows = kChoiceBlocks * kChoiceSlots;

constexpr bool groups_in_choice(int64_t rows, int64_t num_experts) {
  return rows == 1 || (rows > 1 && rows <= kMostGroupedRows && num_experts * kChoiceSlots <= kMaxRouterExperts);
}

void launch_router(const RouterCall& call, cudaStream_t stream);
void launch_router_and_grouping(const RouterCall& call, const GroupCall& group, cudaStream_t stream);

}
