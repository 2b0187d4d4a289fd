#include <algorithm>

#include "cpu/operations.h"

namespace glint::cpu {

namespace {

int64_t num_tiles(const GemmCall& call) { return call.count == 0 ? 0 : (call.weight.rows + kTileRows - 1) / kTileRows; }

GemmTile tile_of(const GemmCall& call, int64_t tile) {
  const int64_t row_first = tile * kTileRows;
  return {.out = call.out,
          .out_stride = call.out_stride,
          .operand = call.input.operand,
          .operand_stride = call.input.stride,
          .input_scales = call.input.scales,
          .input_groups = call.input.groups,
          .input_rows = call.input_rows,
          .count = call.count,
          .weight = &call.weight,
          .bias = call.bias,
          .row_first = row_first,
          .row_count = std::min(kTileRows, call.weight.rows - row_first)};
}

}

void gemm(Workers& workers, std::span<const GemmCall> calls) {
  std::vector<int64_t>& ends = workers.task_ends();
  ends.clear();
  int64_t num_tasks = 0;
  for (const GemmCall& call : calls) ends.push_back(num_tasks += num_tiles(call));
  const KernelSet& kernels = workers.kernels();
  workers.team().run(num_tasks, [&](int64_t task, int thread) {
    const auto index = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    const GemmCall& call = calls[index];
    const int64_t first = index == 0 ? 0 : ends[index - 1];
    const auto multiply = call.weight.dtype == GLINT_DTYPE_F8_E4M3 ? kernels.gemm_fp8 : kernels.gemm_floats;
    multiply(tile_of(call, task - first), workers.scratch(thread));
  });
}

}
