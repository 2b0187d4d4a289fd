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

constexpr int64_t kGroupTokens = 64;

struct Block {
  int64_t token_first;
  int64_t token_count;
  int64_t row_first;
  int64_t row_count;
};

GemmTile group_tile(const GemmTile& tile, const Block& block, int64_t group, const Weight& weight,
                    int64_t element_bytes) {
  const int64_t skipped = tile.input_rows == nullptr ? block.token_first : 0;
  const int64_t first = skipped * tile.operand_stride + tile.group_cols(group).first;
  GemmTile part = tile;
  part.operand = tile.operand + first * element_bytes;
  part.input_scales = tile.input_scales + skipped * tile.input_groups + group;
  part.input_rows = tile.input_rows == nullptr ? nullptr : tile.input_rows + block.token_first;
  part.count = block.token_count;
  part.weight = &weight;
  part.bias = nullptr;
  part.row_first = 0;
  part.row_count = block.row_count;
  return part;
}

void add_groups(const KernelSet& kernels, const GemmTile& tile, const Block& block, int64_t element_bytes,
                std::byte* scratch) {
  float sums[kGroupTokens * kTileRows];
  for (int64_t group = 0; group < tile.input_groups; ++group) {
    const ColumnRange cols = tile.group_cols(group);
    Weight weight = tile.weight->row_slice(block.row_first, block.row_count).col_slice(cols.first, cols.count);
    const float scale = weight.scale_at(0, 0);
    weight.scale_kind = GLINT_SCALE_TENSOR;
    weight.scales = &scale;
    GemmTile part = group_tile(tile, block, group, weight, element_bytes);
    part.out = sums;
    part.out_stride = kTileRows;
    kernels.gemm_fp8(part, scratch);
    const bool is_last = group + 1 == tile.input_groups;
    for (int64_t token = 0; token < block.token_count; ++token) {
      float* out = tile.out + (block.token_first + token) * tile.out_stride + block.row_first;
      for (int64_t row = 0; row < block.row_count; ++row) {
        const float sum = (group == 0 ? 0.0F : out[row]) + sums[token * kTileRows + row];
        out[row] = is_last ? sum + tile.bias_at(block.row_first + row) : sum;
      }
    }
  }
}

void multiply_by_groups(const Workers& workers, const GemmTile& tile, std::byte* scratch) {
  const int64_t element_bytes = fp8_element_bytes(workers);
  const int64_t row_last = tile.row_first + tile.row_count;
  for (int64_t row = tile.row_first; row < row_last;) {
    const int64_t place = (tile.weight->row_first + row) % kScaleTile;
    const int64_t rows = std::min(row_last - row, kScaleTile - place);
    for (int64_t token = 0; token < tile.count; token += kGroupTokens) {
      add_groups(workers.kernels(), tile, {token, std::min(kGroupTokens, tile.count - token), row, rows}, element_bytes,
                 scratch);
    }
    row += rows;
  }
}

void prefetch(const GemmCall& call) {
  constexpr size_t kLineBytes = 64;
  const auto* bytes = reinterpret_cast<const std::byte*>(&call);
  for (size_t offset = 0; offset < sizeof(call); offset += kLineBytes) __builtin_prefetch(bytes + offset);
}

bool have_same_operand(const GemmCall& left, const GemmCall& right) {
  return left.input.operand == right.input.operand && left.input.stride == right.input.stride &&
         left.input_rows == right.input_rows && left.count == right.count && left.weight.cols == right.weight.cols &&
         left.weight.dtype == right.weight.dtype;
}

}

void gemm(Workers& workers, std::span<const GemmCall> calls) {
  std::vector<int64_t>& ends = workers.task_ends();
  ends.clear();
  int64_t num_tasks = 0;
  for (const GemmCall& call : calls) ends.push_back(num_tasks += num_tiles(call));
  const KernelSet& kernels = workers.kernels();
  std::vector<PackedCall>& packed_calls = workers.packed_calls();
  std::ranges::fill(packed_calls, PackedCall{});
  workers.team().run(num_tasks, [&](int64_t task, int thread) {
    const auto index = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    const GemmCall& call = calls[index];
    const int64_t first = index == 0 ? 0 : ends[index - 1];
    if (task == first && index + 1 < calls.size()) prefetch(calls[index + 1]);
    GemmTile tile = tile_of(call, task - first);
    const GemmCall*& packed = packed_calls[static_cast<size_t>(thread)].call;
    if (call.input.groups > 1 && !kernels.sums_groups) {
      packed = nullptr;
      multiply_by_groups(workers, tile, workers.scratch(thread));
      return;
    }
    tile.has_packed_inputs = packed != nullptr && have_same_operand(*packed, call);
    packed = &call;
    const auto multiply = call.weight.dtype == GLINT_DTYPE_F8_E4M3 ? kernels.gemm_fp8 : kernels.gemm_floats;
    multiply(tile, workers.scratch(thread));
  });
}

}
