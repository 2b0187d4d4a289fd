#include <algorithm>

#include "cuda/kernels/gemm/quantise.h"
#include "cuda/kernels/norm/rows.h"
#include "testing/cuda/operand.h"

namespace {

using glint::testing::DeviceArray;
using glint::testing::fp8_values;
using glint::testing::guarded;
using glint::testing::Runner;

struct TestEmbed {
  float* out;
  const uint16_t* table;
  const int32_t* tokens;
  const int32_t* sampled_rows;
  const int32_t* sampled;
  int64_t count;
  int64_t width;
  int64_t vocab_size;
  int64_t sampled_count;
};

struct TestNorm {
  float* hidden;
  float* normed;
  float* fp8;
  float* scales;
  const float* parts;
  const float* weight;
  int64_t count;
  int64_t width;
  int64_t part_stride;
  int64_t fp8_stride;
  double epsilon;
  int32_t num_parts;
};

struct TestSwiglu {
  float* out;
  float* fp8;
  float* scales;
  const float* gate_up;
  int64_t count;
  int64_t width;
  int64_t in_stride;
  int64_t slice_stride;
  int32_t row_slices;
};

struct TestGather {
  float* out;
  const float* in;
  const float* update;
  const int32_t* rows;
  int64_t in_count;
  int64_t count;
  int64_t width;
};

void embed(Runner& runner, const TestEmbed& test) {
  std::vector<glint::cuda::SampleResult> results(static_cast<size_t>(test.sampled_count));
  for (size_t index = 0; index < results.size(); ++index) results[index].token = test.sampled[index];
  const DeviceArray<float> out(test.count * test.width);
  const DeviceArray<uint16_t> table(test.table, test.vocab_size * test.width);
  const DeviceArray<int32_t> tokens(test.tokens, test.count);
  const DeviceArray<int32_t> sampled_rows(test.sampled_rows, test.count);
  const DeviceArray<glint::cuda::SampleResult> sampled(results);
  runner.run(
      [&] {
        glint::cuda::launch_embed({.hidden = out.data(),
                                   .table = table.data(),
                                   .tokens = tokens.data(),
                                   .sampled_rows = sampled_rows.data(),
                                   .count = test.count,
                                   .width = test.width,
                                   .sampled = sampled.data(),
                                   .vocab_size = static_cast<int32_t>(test.vocab_size)},
                                  nullptr);
      },
      {&out});
  out.download(test.out);
}

void norm(Runner& runner, const TestNorm& test) {
  const int64_t floats = test.count * test.width;
  const DeviceArray<float> hidden(test.hidden, floats);
  const DeviceArray<float> normed(floats);
  const DeviceArray<uint8_t> fp8(test.count * test.fp8_stride);
  const DeviceArray<float> scales(test.count);
  const DeviceArray<float> parts(test.parts, test.num_parts * test.part_stride);
  const DeviceArray<float> weight(test.weight, test.width);
  runner.run(
      [&] {
        glint::cuda::launch_norm({.hidden = hidden.data(),
                                  .normed = test.normed == nullptr ? nullptr : normed.data(),
                                  .fp8 = test.fp8 == nullptr ? nullptr : fp8.data(),
                                  .scales = scales.data(),
                                  .fp8_stride = test.fp8_stride,
                                  .parts = parts.data(),
                                  .part_stride = test.part_stride,
                                  .num_parts = test.num_parts,
                                  .weight = weight.data(),
                                  .count = test.count,
                                  .width = test.width,
                                  .epsilon = static_cast<float>(test.epsilon)},
                                 nullptr);
      },
      {&hidden, &normed, &fp8, &scales});
  hidden.download(test.hidden);
  normed.download(test.normed);
  if (test.fp8 == nullptr) return;
  std::ranges::copy(fp8_values(fp8), test.fp8);
  scales.download(test.scales);
}

void swiglu(Runner& runner, const TestSwiglu& test) {
  const DeviceArray<float> out(test.count * test.width);
  const DeviceArray<uint8_t> fp8(test.count * test.row_slices * test.slice_stride);
  const DeviceArray<float> scales(test.count * test.row_slices);
  const DeviceArray<float> gate_up(test.gate_up, test.count * test.in_stride);
  runner.run(
      [&] {
        glint::cuda::launch_swiglu({.out = out.data(),
                                    .fp8 = fp8.data(),
                                    .scales = scales.data(),
                                    .gate = gate_up.data(),
                                    .up = gate_up.data() + test.width,
                                    .in_stride = test.in_stride,
                                    .count = test.count,
                                    .width = test.width,
                                    .row_slices = test.row_slices,
                                    .slice_stride = test.slice_stride},
                                   nullptr);
      },
      {&out, &fp8, &scales});
  out.download(test.out);
  std::ranges::copy(fp8_values(fp8), test.fp8);
  scales.download(test.scales);
}

void add_rows(Runner& runner, float* hidden, const float* update, int64_t count) {
  const DeviceArray<float> sums(hidden, count);
  const DeviceArray<float> changes(update, count);
  runner.run([&] { glint::cuda::launch_add_rows(sums.data(), changes.data(), count, nullptr); }, {&sums});
  sums.download(hidden);
}

void gather_rows(Runner& runner, const TestGather& test) {
  const DeviceArray<float> out(test.count * test.width);
  const DeviceArray<float> in(test.in, test.in_count * test.width);
  const DeviceArray<float> update(test.update, test.in_count * test.width);
  const DeviceArray<int32_t> rows(test.rows, test.count);
  runner.run(
      [&] {
        glint::cuda::launch_gather_rows({.out = out.data(),
                                         .in = in.data(),
                                         .rows = rows.data(),
                                         .count = test.count,
                                         .width = test.width,
                                         .update = update.data()},
                                        nullptr);
      },
      {&out});
  out.download(test.out);
}

}

extern "C" {

GLINT_API int32_t glint_testing_embed(Runner* runner, const TestEmbed* test) {
  return guarded([&] { embed(*runner, *test); });
}

GLINT_API int32_t glint_testing_norm(Runner* runner, const TestNorm* test) {
  return guarded([&] { norm(*runner, *test); });
}

GLINT_API int32_t glint_testing_swiglu(Runner* runner, const TestSwiglu* test) {
  return guarded([&] { swiglu(*runner, *test); });
}

GLINT_API int32_t glint_testing_add_rows(Runner* runner, float* hidden, const float* update, int64_t count) {
  return guarded([&] { add_rows(*runner, hidden, update, count); });
}

GLINT_API int32_t glint_testing_gather_rows(Runner* runner, const TestGather* test) {
  return guarded([&] { gather_rows(*runner, *test); });
}
}
