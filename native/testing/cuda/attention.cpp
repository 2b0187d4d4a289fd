#include <algorithm>
#include <cmath>

#include "base/contract.h"
#include "base/fp8.h"
#include "cuda/check.h"
#include "testing/cuda/pages.h"

namespace {

using glint::BatchRequest;
using glint::cuda::DecodeTask;
using glint::cuda::PrefillTask;
using glint::testing::DeviceArray;
using glint::testing::DevicePages;
using glint::testing::guarded;
using glint::testing::Runner;
using glint::testing::TestPages;

struct TestRotation {
  float* query;
  float* key;
  float* value;
  const float* query_norm;
  const float* key_norm;
  const float* cosines;
  const float* sines;
  double norm_epsilon;
};

std::vector<int32_t> slots_of(const TestPages& pages) {
  std::vector<int32_t> slots(static_cast<size_t>(pages.num_rows()));
  for (const BatchRequest& request : pages.request_span()) {
    for (int32_t row = 0; row < request.row_count; ++row) {
      const int32_t position = request.first_position + row;
      slots[static_cast<size_t>(request.row_first + row)] =
          request.pages[position / glint::cuda::kPageTokens] * glint::cuda::kPageTokens +
          position % glint::cuda::kPageTokens;
    }
  }
  return slots;
}

std::vector<float> joined_rows(const TestRotation& test, const TestPages& pages, int64_t stride) {
  std::vector<float> rows(static_cast<size_t>(pages.num_rows() * stride), NAN);
  for (int64_t row = 0; row < pages.num_rows(); ++row) {
    float* target = rows.data() + row * stride;
    target = std::copy_n(test.query + row * pages.query_width(), pages.query_width(), target);
    target = std::copy_n(test.key + row * pages.key_width(), pages.key_width(), target);
    std::copy_n(test.value + row * pages.key_width(), pages.key_width(), target);
  }
  return rows;
}

void store_query(float* out, const DeviceArray<uint16_t>& query, const TestPages& pages) {
  const std::vector<uint16_t> bits = query.to_host();
  const int64_t padded = pages.padded_dim();
  for (int64_t head = 0; head < pages.num_rows() * pages.num_heads; ++head) {
    for (int64_t dim = 0; dim < padded; ++dim) {
      const uint16_t value = bits[static_cast<size_t>(head * padded + dim)];
      if (dim < pages.head_dim) out[head * pages.head_dim + dim] = glint::float_from_bf16(value);
      glint::require(dim < pages.head_dim || value == 0, GLINT_STATUS_INTERNAL, "the padded dimension ", dim,
                     " of a query holds bits ", value, "; it must be 0");
    }
  }
}

void rotate_and_store(Runner& runner, const TestRotation& test, const TestPages& pages) {
  constexpr int64_t kPaddingFloats = 2;
  const int64_t rows = pages.num_rows();
  const int64_t stride = pages.query_width() + 2 * pages.key_width() + kPaddingFloats;
  const int64_t table_floats = rows * pages.rotary_dim / 2;
  const DevicePages device_pages(pages);
  const DeviceArray<uint16_t> query(rows * pages.num_heads * pages.padded_dim());
  const DeviceArray<float> joined(joined_rows(test, pages, stride));
  const DeviceArray<float> query_norm(test.query_norm, pages.head_dim);
  const DeviceArray<float> key_norm(test.key_norm, pages.head_dim);
  const DeviceArray<float> cosines(test.cosines, table_floats);
  const DeviceArray<float> sines(test.sines, table_floats);
  const DeviceArray<int32_t> slots(slots_of(pages));
  runner.run(
      [&] {
        glint::cuda::launch_rotate_and_store({.query_out = query.data(),
                                              .pages = device_pages.pool(),
                                              .query = joined.data(),
                                              .key = joined.data() + pages.query_width(),
                                              .value = joined.data() + pages.query_width() + pages.key_width(),
                                              .query_stride = stride,
                                              .key_stride = stride,
                                              .query_norm = query_norm.data(),
                                              .key_norm = key_norm.data(),
                                              .cosines = cosines.data(),
                                              .sines = sines.data(),
                                              .slots = slots.data(),
                                              .count = rows,
                                              .num_heads = pages.num_heads,
                                              .num_kv_heads = pages.num_kv_heads,
                                              .head_dim = pages.head_dim,
                                              .rotary_dim = pages.rotary_dim,
                                              .epsilon = static_cast<float>(test.norm_epsilon)},
                                             nullptr);
      },
      {&query, &device_pages.keys(), &device_pages.values()});
  store_query(test.query, query, pages);
  device_pages.download();
}

struct AttentionTasks {
  std::vector<DecodeTask> decode;
  std::vector<PrefillTask> prefill;
  std::vector<int32_t> page_table;

  explicit AttentionTasks(const TestPages& pages) {
    for (const BatchRequest& request : pages.request_span()) {
      request.row_count == 1 ? add_decode(request) : add_prefill(request, pages.num_heads / pages.num_kv_heads);
    }
  }

  void add_decode(const BatchRequest& request) {
    const int32_t num_positions = request.first_position + 1;
    const int32_t num_splits = (num_positions + glint::cuda::kSplitTokens - 1) / glint::cuda::kSplitTokens;
    const int32_t num_pages = (num_positions + glint::cuda::kPageTokens - 1) / glint::cuda::kPageTokens;
    const auto partial_first = static_cast<int32_t>(decode.size());
    for (int32_t split = 0; split < num_splits; ++split) {
      DecodeTask& task = decode.emplace_back();
      task.row = request.row_first;
      task.num_positions = num_positions;
      task.split = split;
      task.num_splits = num_splits;
      task.partial_first = partial_first;
      const int32_t page_first = split * glint::cuda::kSplitPages;
      std::fill(std::begin(task.pages), std::end(task.pages), -1);
      std::copy_n(request.pages + page_first, std::min(glint::cuda::kSplitPages, num_pages - page_first), task.pages);
    }
  }

  void add_prefill(const BatchRequest& request, int32_t group_heads) {
    const int32_t last_position = request.first_position + request.row_count;
    const int32_t num_pages = (last_position + glint::cuda::kPageTokens - 1) / glint::cuda::kPageTokens;
    const auto page_first = static_cast<int32_t>(page_table.size());
    page_table.insert(page_table.end(), request.pages, request.pages + num_pages);
    for (int32_t query = 0; query < request.row_count * group_heads; query += glint::cuda::kPrefillTileQueries) {
      prefill.push_back({.row_first = request.row_first,
                         .row_count = request.row_count,
                         .first_position = request.first_position,
                         .page_first = page_first,
                         .query_first = query});
    }
  }
};

std::vector<uint16_t> padded_query(const float* query, const TestPages& pages) {
  const int64_t padded = pages.padded_dim();
  const int64_t heads = pages.num_rows() * pages.num_heads;
  std::vector<uint16_t> bits(static_cast<size_t>(heads * padded), 0);
  for (int64_t head = 0; head < heads; ++head) {
    std::transform(query + head * pages.head_dim, query + (head + 1) * pages.head_dim, bits.begin() + head * padded,
                   glint::bf16_from_float);
  }
  return bits;
}

void attend(Runner& runner, float* result, const float* query_rows, const TestPages& pages) {
  const AttentionTasks tasks(pages);
  const DevicePages device_pages(pages);
  const DeviceArray<uint16_t> query(padded_query(query_rows, pages));
  const DeviceArray<float> out(pages.num_rows() * pages.query_width());
  const DeviceArray<int32_t> page_table(tasks.page_table);
  const DeviceArray<DecodeTask> decode_tasks(tasks.decode);
  const DeviceArray<PrefillTask> prefill_tasks(tasks.prefill);
  const auto num_decode = static_cast<int32_t>(tasks.decode.size());
  const DeviceArray<int32_t> counts(std::vector{num_decode, static_cast<int32_t>(tasks.prefill.size())});
  const DeviceArray<float> partials(num_decode * pages.num_kv_heads * glint::cuda::partial_floats(pages.head_dim));
  const DeviceArray<int32_t> arrivals(std::vector<int32_t>(static_cast<size_t>(pages.num_rows() * pages.num_kv_heads)));
  const glint::cuda::AttendCall call = {.out = out.data(),
                                        .query = query.data(),
                                        .pages = device_pages.pool(),
                                        .page_table = page_table.data(),
                                        .num_heads = pages.num_heads,
                                        .num_kv_heads = pages.num_kv_heads,
                                        .head_dim = pages.head_dim};
  const auto launch_prefill = runner.is_hopper() ? glint::cuda::launch_attention_prefill
                                                 : glint::cuda::launch_attention_prefill_portable;
  runner.run(
      [&] {
        if (!tasks.decode.empty()) {
          glint::cuda::launch_attention_decode({.attend = call,
                                                .tasks = decode_tasks.data(),
                                                .num_tasks = counts.data(),
                                                .max_tasks = num_decode,
                                                .partials = partials.data(),
                                                .arrivals = arrivals.data()},
                                               nullptr);
        }
        if (tasks.prefill.empty()) return;
        launch_prefill({.attend = call, .tasks = prefill_tasks.data(), .num_tasks = counts.data() + 1}, nullptr);
      },
      {&out});
  out.download(result);
}

void fill_rotary(Runner& runner, float* cosines, float* sines, std::span<const int32_t> positions, int64_t rotary_dim,
                 double theta) {
  const auto count = static_cast<int64_t>(positions.size());
  const DeviceArray<float> device_cosines(count * rotary_dim / 2);
  const DeviceArray<float> device_sines(count * rotary_dim / 2);
  const DeviceArray<int32_t> device_positions(positions.data(), count);
  runner.run(
      [&] {
        glint::cuda::launch_rotary_table({.cosines = device_cosines.data(),
                                          .sines = device_sines.data(),
                                          .positions = device_positions.data(),
                                          .count = count,
                                          .rotary_dim = rotary_dim,
                                          .theta = theta},
                                         nullptr);
      },
      {&device_cosines, &device_sines});
  device_cosines.download(cosines);
  device_sines.download(sines);
}

}

extern "C" {

GLINT_API int32_t glint_testing_fill_rotary(Runner* runner, float* cosines, float* sines, const int32_t* positions,
                                            int64_t count, int64_t rotary_dim, double theta) {
  return guarded([&] {
    fill_rotary(*runner, cosines, sines, {positions, static_cast<size_t>(count)}, rotary_dim, theta);
  });
}

GLINT_API int32_t glint_testing_rotate_and_store(Runner* runner, const TestRotation* rotation, const TestPages* pages) {
  return guarded([&] { rotate_and_store(*runner, *rotation, *pages); });
}

GLINT_API int32_t glint_testing_attend(Runner* runner, float* out, const float* query, const TestPages* pages) {
  return guarded([&] { attend(*runner, out, query, *pages); });
}
}
