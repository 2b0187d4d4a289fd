#include <algorithm>
#include <cmath>

#include "base/contract.h"
#include "base/fp8.h"
#include "cuda/check.h"
#include "cuda/kernels/gemm/quantise.h"
#include "testing/cuda/operand.h"
#include "testing/cuda/pages.h"

namespace {

using glint::BatchRequest;
using glint::cuda::DecodeTask;
using glint::cuda::PrefillTask;
using glint::testing::DeviceArray;
using glint::testing::DevicePages;
using glint::testing::guarded;
using glint::testing::key_width;
using glint::testing::num_rows;
using glint::testing::padded_dim;
using glint::testing::query_width;
using glint::testing::Runner;
using glint::testing::TestOperand;
using glint::testing::TestPages;
using glint::testing::TestRotation;

std::vector<int32_t> slots_of(const TestPages& pages) {
  std::vector<int32_t> slots(static_cast<size_t>(num_rows(pages)));
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
  std::vector<float> rows(static_cast<size_t>(num_rows(pages) * stride), NAN);
  for (int64_t row = 0; row < num_rows(pages); ++row) {
    float* target = rows.data() + row * stride;
    target = std::copy_n(test.query + row * query_width(pages), query_width(pages), target);
    target = std::copy_n(test.key + row * key_width(pages), key_width(pages), target);
    std::copy_n(test.value + row * key_width(pages), key_width(pages), target);
  }
  return rows;
}

void store_query(float* out, const DeviceArray<uint16_t>& query, const TestPages& pages) {
  const std::vector<uint16_t> bits = query.to_host();
  const int64_t padded = padded_dim(pages);
  for (int64_t head = 0; head < num_rows(pages) * pages.num_heads; ++head) {
    for (int64_t dim = 0; dim < padded; ++dim) {
      const uint16_t value = bits[static_cast<size_t>(head * padded + dim)];
      if (dim < pages.head_dim) out[head * pages.head_dim + dim] = glint::float_from_bf16(value);
      glint::require(dim < pages.head_dim || value == 0, GLINT_STATUS_INTERNAL, "the padded dimension ", dim,
                     " of a query holds bits ", value, "; it must be 0");
    }
  }
}

constexpr int64_t kVectorPadding = 4;

int64_t padding_floats(const TestPages& pages) { return num_rows(pages) % 2 == 0 ? kVectorPadding : 2; }

class Rotation {
 public:
  Rotation(const TestRotation& test, const TestPages& pages, int64_t padding)
      : pages_(pages),
        stride_(query_width(pages) + 2 * key_width(pages) + padding),
        epsilon_(static_cast<float>(test.norm_epsilon)),
        joined_(joined_rows(test, pages, stride_)),
        query_norm_(test.query_norm, pages.head_dim),
        key_norm_(test.key_norm, pages.head_dim),
        cosines_(test.cosines, num_rows(pages) * pages.rotary_dim / 2),
        sines_(test.sines, num_rows(pages) * pages.rotary_dim / 2),
        slots_(slots_of(pages)) {}

  glint::cuda::RopeCall call(uint16_t* query_out, const glint::cuda::KvPages& pool) const {
    return {.query_out = query_out,
            .pages = pool,
            .query = joined_.data(),
            .key = joined_.data() + query_width(pages_),
            .value = joined_.data() + query_width(pages_) + key_width(pages_),
            .query_stride = stride_,
            .key_stride = stride_,
            .query_norm = query_norm_.data(),
            .key_norm = key_norm_.data(),
            .cosines = cosines_.data(),
            .sines = sines_.data(),
            .slots = slots_.data(),
            .count = num_rows(pages_),
            .num_heads = pages_.num_heads,
            .num_kv_heads = pages_.num_kv_heads,
            .head_dim = pages_.head_dim,
            .rotary_dim = pages_.rotary_dim,
            .epsilon = epsilon_};
  }

 private:
  const TestPages& pages_;
  int64_t stride_;
  float epsilon_;
  DeviceArray<float> joined_;
  DeviceArray<float> query_norm_;
  DeviceArray<float> key_norm_;
  DeviceArray<float> cosines_;
  DeviceArray<float> sines_;
  DeviceArray<int32_t> slots_;
};

void rope_and_cache(Runner& runner, const TestRotation& test, const TestPages& pages) {
  const DevicePages device_pages(pages);
  const DeviceArray<uint16_t> query(num_rows(pages) * pages.num_heads * padded_dim(pages));
  const Rotation rotation(test, pages, padding_floats(pages));
  runner.run([&] { glint::cuda::launch_rope_and_cache(rotation.call(query.data(), device_pages.pool()), nullptr); },
             {&query, &device_pages.keys(), &device_pages.values()});
  store_query(test.query, query, pages);
  device_pages.download();
}

struct AttentionTasks {
  std::vector<DecodeTask> decode;
  std::vector<PrefillTask> prefill;
  std::vector<int32_t> page_table;
  int32_t num_partials = 0;
  bool hides_earlier = false;

  explicit AttentionTasks(const TestPages& pages) {
    for (const BatchRequest& request : pages.request_span()) {
      hides_earlier = hides_earlier || request.context_first > 0;
      request.row_count == 1 ? add_decode(request) : add_prefill(request, pages.num_heads / pages.num_kv_heads);
    }
  }

  void add_decode(const BatchRequest& request) {
    const int32_t num_positions = request.first_position + 1;
    const int32_t num_splits = glint::cuda::num_context_splits(num_positions);
    const int32_t num_tails = glint::cuda::num_context_tails(num_positions);
    const int32_t num_pages = (num_positions + glint::cuda::kPageTokens - 1) / glint::cuda::kPageTokens;
    for (int32_t split = 0; split < num_splits - num_tails; ++split) {
      DecodeTask& task = decode.emplace_back();
      task.row = request.row_first;
      task.num_positions = num_positions;
      task.split = split;
      task.num_splits = num_splits;
      task.partial_first = num_partials;
      task.num_tails = split + 1 + num_tails == num_splits ? num_tails : 0;
      task.context_first = request.context_first;
      const int32_t page_first = split * glint::cuda::kSplitPages;
      std::fill(std::begin(task.pages), std::end(task.pages), -1);
      const int32_t most_pages = glint::cuda::kSplitPages + task.num_tails * glint::cuda::kTailPages;
      std::copy_n(request.pages + page_first, std::min(most_pages, num_pages - page_first), task.pages);
    }
    num_partials += num_splits;
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
                         .query_first = query,
                         .context_first = request.context_first});
    }
  }
};

std::vector<uint16_t> padded_query(const float* query, const TestPages& pages) {
  const int64_t padded = padded_dim(pages);
  const int64_t heads = num_rows(pages) * pages.num_heads;
  std::vector<uint16_t> bits(static_cast<size_t>(heads * padded), 0);
  for (int64_t head = 0; head < heads; ++head) {
    std::transform(query + head * pages.head_dim, query + (head + 1) * pages.head_dim, bits.begin() + head * padded,
                   glint::bf16_from_float);
  }
  return bits;
}

class Decode {
 public:
  Decode(const std::vector<DecodeTask>& tasks, const TestPages& pages)
      : num_tasks_(static_cast<int32_t>(tasks.size())),
        tasks_(tasks),
        count_(std::vector{num_tasks_}),
        partials_(2 * num_tasks_ * pages.num_kv_heads * glint::cuda::partial_floats(pages.head_dim)),
        arrivals_(std::vector<int32_t>(static_cast<size_t>(num_rows(pages) * pages.num_kv_heads))) {}

  glint::cuda::DecodeCall call(const glint::cuda::AttendCall& attend) const {
    return {.attend = attend,
            .tasks = tasks_.data(),
            .num_tasks = count_.data(),
            .max_tasks = num_tasks_,
            .partials = partials_.data(),
            .arrivals = arrivals_.data()};
  }

 private:
  int32_t num_tasks_;
  DeviceArray<DecodeTask> tasks_;
  DeviceArray<int32_t> count_;
  DeviceArray<float> partials_;
  DeviceArray<int32_t> arrivals_;
};

glint::cuda::AttendCall attend_call(const TestPages& pages, const DevicePages& device_pages) {
  return {.out = nullptr,
          .query = nullptr,
          .pages = device_pages.pool(),
          .page_table = nullptr,
          .num_heads = pages.num_heads,
          .num_kv_heads = pages.num_kv_heads,
          .head_dim = pages.head_dim};
}

class WidenedPages {
 public:
  WidenedPages(const TestPages& pages, const DevicePages& device_pages, const DeviceArray<int32_t>& page_table)
      : pages_(pages),
        pool_(device_pages.pool()),
        page_table_(page_table),
        slab_bytes_(glint::cuda::page_head_bytes(pages.head_dim, glint::cuda::PageElement::kBf16)),
        keys_(byte_count()),
        values_(byte_count()) {}

  glint::cuda::KvPages widen() const {
    if (!holds_fp8()) return pool_;
    const glint::cuda::KvPages widened{.keys = keys_.bytes(),
                                       .values = values_.bytes(),
                                       .page_bytes = pages_.num_kv_heads * slab_bytes_,
                                       .head_bytes = slab_bytes_};
    glint::cuda::launch_dequantise_kv({.fp8 = pool_,
                                       .bf16 = widened,
                                       .page_table = page_table_.data(),
                                       .num_pages = page_table_.count(),
                                       .num_kv_heads = pages_.num_kv_heads,
                                       .head_dim = pages_.head_dim},
                                      nullptr);
    return widened;
  }

 private:
  bool holds_fp8() const { return glint::cuda::holds_fp8(pool_.element); }
  int64_t byte_count() const { return holds_fp8() ? pages_.num_pages * pages_.num_kv_heads * slab_bytes_ : 0; }

  const TestPages& pages_;
  glint::cuda::KvPages pool_;
  const DeviceArray<int32_t>& page_table_;
  int64_t slab_bytes_;
  glint::testing::DeviceBytes keys_;
  glint::testing::DeviceBytes values_;
};

void attend(Runner& runner, float* result, const float* query_rows, const TestPages& pages) {
  const AttentionTasks tasks(pages);
  const DevicePages device_pages(pages);
  const DeviceArray<uint16_t> query(padded_query(query_rows, pages));
  const DeviceArray<float> out(num_rows(pages) * query_width(pages));
  const DeviceArray<int32_t> page_table(tasks.page_table);
  const Decode decode(tasks.decode, pages);
  const DeviceArray<PrefillTask> prefill_tasks(tasks.prefill);
  const DeviceArray<int32_t> num_prefill(std::vector{static_cast<int32_t>(tasks.prefill.size())});
  glint::cuda::AttendCall call = attend_call(pages, device_pages);
  call.out = out.data();
  call.query = query.data();
  call.page_table = page_table.data();
  const WidenedPages widened(pages, device_pages, page_table);
  runner.run(
      [&] {
        if (!tasks.decode.empty()) glint::cuda::launch_attention_decode(decode.call(call), nullptr);
        if (tasks.prefill.empty()) return;
        glint::cuda::AttendCall prefill = call;
        prefill.pages = widened.widen();
        glint::cuda::launch_attention_prefill(
            {.attend = prefill,
             .tasks = prefill_tasks.data(),
             .num_tasks = num_prefill.data(),
             .kernels = runner.is_hopper() ? GLINT_KERNELS_HOPPER : GLINT_KERNELS_PORTABLE,
             .hides_earlier = tasks.hides_earlier},
            nullptr);
      },
      {&out});
  out.download(result);
}

void attention_step(Runner& runner, const TestOperand& result, const TestRotation& test, const TestPages& pages) {
  const AttentionTasks tasks(pages);
  glint::require_argument(tasks.prefill.empty() && result.width == query_width(pages), "a step of attention has ",
                          tasks.prefill.size(), " tiles of prompts and rows of ", result.width,
                          " FP8 values: give requests of one row each, and ", query_width(pages));
  const DevicePages device_pages(pages);
  const Rotation rotation(test, pages, kVectorPadding);
  const Decode decode(tasks.decode, pages);
  const DeviceArray<float> out(result.count * result.width);
  const DeviceArray<float> magnitudes(result.count * pages.num_kv_heads);
  const DeviceArray<uint8_t> fp8(result.count * result.width);
  const DeviceArray<float> scales(result.count);
  glint::cuda::AttendCall attend = attend_call(pages, device_pages);
  attend.out = out.data();
  runner.run(
      [&] {
        glint::cuda::launch_attention_step({decode.call(attend), rotation.call(nullptr, device_pages.pool()),
                                            fp8.data(), scales.data(), result.width, magnitudes.data()},
                                           nullptr);
        if (glint::cuda::attention_step_quantises(pages.num_kv_heads)) return;
        glint::cuda::launch_quantise_parts({.fp8 = fp8.data(),
                                            .scales = scales.data(),
                                            .in = out.data(),
                                            .magnitudes = magnitudes.data(),
                                            .count = result.count,
                                            .part_width = result.width / pages.num_kv_heads,
                                            .num_parts = pages.num_kv_heads,
                                            .fp8_stride = result.width},
                                           nullptr);
      },
      {&out, &magnitudes, &fp8, &scales, &device_pages.keys(), &device_pages.values()});
  std::ranges::copy(glint::testing::fp8_values(fp8), result.out);
  scales.download(result.scales);
  device_pages.download();
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
  return guarded(
      [&] { fill_rotary(*runner, cosines, sines, {positions, static_cast<size_t>(count)}, rotary_dim, theta); });
}

GLINT_API int32_t glint_testing_rope_and_cache(Runner* runner, const TestRotation* rotation, const TestPages* pages) {
  return guarded([&] { rope_and_cache(*runner, *rotation, *pages); });
}

GLINT_API int32_t glint_testing_attention_step(Runner* runner, const TestOperand* result, const TestRotation* rotation,
                                               const TestPages* pages) {
  return guarded([&] { attention_step(*runner, *result, *rotation, *pages); });
}

GLINT_API int32_t glint_testing_attend(Runner* runner, float* out, const float* query, const TestPages* pages) {
  return guarded([&] { attend(*runner, out, query, *pages); });
}
}
