#include <algorithm>
#include <cmath>
#include <limits>

#include "base/fp8.h"
#include "cpu/operations.h"

namespace glint::cpu {

namespace {

template <typename Value>
void scatter(std::byte* target, const Value* values, int64_t count, int64_t stride) {
  auto* out = reinterpret_cast<Value*>(target);
  for (int64_t index = 0; index < count; ++index) out[index * stride] = values[index];
}

void store_head(const RowKernels& kernels, std::byte* target, const float* head, int64_t head_dim, int64_t stride,
                int32_t dtype) {
  if (dtype == GLINT_DTYPE_F32) return scatter(target, head, head_dim, stride);
  if (stride == 1) return kernels.write_bf16(reinterpret_cast<uint16_t*>(target), head, head_dim);
  constexpr int64_t kPart = 64;
  uint16_t rounded[kPart];
  for (int64_t first = 0; first < head_dim; first += kPart) {
    const int64_t count = std::min(kPart, head_dim - first);
    kernels.write_bf16(rounded, head + first, count);
    scatter(target + first * stride * static_cast<int64_t>(sizeof(uint16_t)), rounded, count, stride);
  }
}

void round_to_e4m3(std::span<float> values) {
  for (float& value : values) {
    const bool is_finite = std::isfinite(round_to_bf16(value));
    value = is_finite ? float_from_e4m3(e4m3_from_float(value)) : std::numeric_limits<float>::quiet_NaN();
  }
}

void rotate_row(const RowKernels& kernels, const RotateCall& call, int64_t row) {
  const HeadShape& heads = call.heads;
  const float* cosines = call.cosines + row * heads.rotary_dim / 2;
  const float* sines = call.sines + row * heads.rotary_dim / 2;
  const auto rotate_heads = [&](float* first, int64_t count, const float* norm) {
    for (int64_t head = 0; head < count; ++head) {
      float* values = first + head * heads.head_dim;
      if (norm != nullptr) kernels.norm(values, values, norm, heads.head_dim, call.norm_epsilon);
      kernels.rotate_head(values, cosines, sines, heads.rotary_dim);
    }
  };
  rotate_heads(call.query + row * heads.num_heads * heads.head_dim, heads.num_heads, call.query_norm);
  rotate_heads(call.key + row * heads.num_kv_heads * heads.head_dim, heads.num_kv_heads, call.key_norm);
}

void store_row(const RowKernels& kernels, const RotateCall& call, const PageLayout& pages, int64_t layer, int64_t row,
               int64_t page, int64_t offset) {
  const HeadShape& heads = call.heads;
  for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
    const int64_t source = (row * heads.num_kv_heads + head) * heads.head_dim;
    const int64_t slab = page * pages.page_bytes() + head * pages.head_bytes();
    std::byte* key = pages.keys(layer) + slab + offset * pages.element_bytes();
    std::byte* value = pages.values(layer) + slab + offset * heads.head_dim * pages.element_bytes();
    store_head(kernels, key, call.key + source, heads.head_dim, pages.page_tokens, pages.dtype);
    store_head(kernels, value, call.value + source, heads.head_dim, 1, pages.dtype);
  }
}

}

void fill_rotary(Workers& workers, float* cosines, float* sines, std::span<const int32_t> positions, int64_t rotary_dim,
                 double theta) {
  const int64_t half = rotary_dim / 2;
  workers.team().run(static_cast<int64_t>(positions.size()), [&](int64_t row, int) {
    for (int64_t index = 0; index < half; ++index) {
      const double exponent = -2.0 * static_cast<double>(index) / static_cast<double>(rotary_dim);
      const double angle = static_cast<double>(positions[static_cast<size_t>(row)]) * std::pow(theta, exponent);
      cosines[row * half + index] = static_cast<float>(std::cos(angle));
      sines[row * half + index] = static_cast<float>(std::sin(angle));
    }
  });
}

void rope_and_cache(Workers& workers, const RotateCall& call, const PageLayout& pages, int64_t layer,
                    std::span<const BatchRequest> requests) {
  const int64_t query_width = call.heads.num_heads * call.heads.head_dim;
  const int64_t kv_width = call.heads.num_kv_heads * call.heads.head_dim;
  std::vector<int64_t>& ends = workers.task_ends();
  ends.clear();
  int64_t num_rows = 0;
  for (const BatchRequest& request : requests) ends.push_back(num_rows += request.row_count);
  const RowKernels& kernels = workers.kernels().rows;
  workers.team().run(num_rows, [&](int64_t row, int) {
    const auto index = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), row) - ends.begin());
    const BatchRequest& request = requests[index];
    rotate_row(kernels, call, row);
    if (pages.rounds_to_e4m3) {
      round_to_e4m3({call.key + row * kv_width, static_cast<size_t>(kv_width)});
      round_to_e4m3({call.value + row * kv_width, static_cast<size_t>(kv_width)});
    }
    const int64_t position = request.first_position + row - request.row_first;
    const int64_t page = request.pages[position / pages.page_tokens];
    store_row(kernels, call, pages, layer, row, page, position % pages.page_tokens);
    if (pages.dtype != GLINT_DTYPE_BF16) return;
    kernels.round_to_bf16(call.query + row * query_width, query_width);
  });
}

void attention(Workers& workers, float* out, const float* query, const PageLayout& pages, int64_t layer,
               std::span<const BatchRequest> requests, const HeadShape& heads) {
  const int64_t group_heads = heads.num_heads / heads.num_kv_heads;
  const int64_t tile_rows = query_rows_per_tile(group_heads);
  const int64_t row_stride = heads.num_heads * heads.head_dim;
  std::vector<int64_t>& ends = workers.task_ends();
  ends.clear();
  int64_t num_tasks = 0;
  for (const BatchRequest& request : requests) {
    ends.push_back(num_tasks += (request.row_count + tile_rows - 1) / tile_rows * heads.num_kv_heads);
  }
  workers.team().run(num_tasks, [&](int64_t task, int thread) {
    const auto index = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    const BatchRequest& request = requests[index];
    const int64_t local = task - (index == 0 ? 0 : ends[index - 1]);
    const int64_t kv_head = local % heads.num_kv_heads;
    const int64_t row = local / heads.num_kv_heads * tile_rows;
    const int64_t offset = (request.row_first + row) * row_stride + kv_head * group_heads * heads.head_dim;
    workers.kernels().attend({.out = out + offset,
                              .query = query + offset,
                              .row_stride = row_stride,
                              .group_heads = group_heads,
                              .head_dim = heads.head_dim,
                              .row_count = std::min(tile_rows, request.row_count - row),
                              .first_position = request.first_position + row,
                              .context_first = request.context_first,
                              .pages = request.pages,
                              .keys = pages.keys(layer) + kv_head * pages.head_bytes(),
                              .values = pages.values(layer) + kv_head * pages.head_bytes(),
                              .page_bytes = pages.page_bytes(),
                              .page_tokens = pages.page_tokens,
                              .dtype = pages.dtype},
                             workers.scratch(thread));
  });
}

}
