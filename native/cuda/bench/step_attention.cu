#include "cuda/bench/step_pages.h"

namespace glint::cuda::bench {

namespace {

using Lengths = std::vector<std::pair<int32_t, int32_t>>;

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

struct SplitSums {
  double highest;
  double weight_sum;
  std::vector<double> values;
};

double rounded(double value) { return static_cast<double>(round_to_bf16(static_cast<float>(value))); }

SplitSums wanted_split(const PagedBatch& batch, int32_t request, const float* query, int kv_head, int64_t first,
                       int64_t last, bool covers_exponent) {
  const int dims = batch.heads.head_dim;
  std::vector<double> scores;
  for (int64_t position = first; position < last; ++position) {
    double score = 0;
    for (int dim = 0; dim < dims; ++dim) {
      score += static_cast<double>(query[dim]) * static_cast<double>(batch.key(request, position, kv_head, dim));
    }
    scores.push_back(static_cast<double>(static_cast<float>(score / std::sqrt(dims))));
  }
  const double highest = *std::ranges::max_element(scores);
  const double reference = covers_exponent ? std::ceil(highest / std::log(2.0)) * std::log(2.0) : highest;
  SplitSums sums{reference, 0, std::vector<double>(as_size(dims), 0.0)};
  for (int64_t position = first; position < last; ++position) {
    const double weight = std::exp(scores[as_size(position - first)] - reference);
    sums.weight_sum += weight;
    for (int dim = 0; dim < dims; ++dim) {
      sums.values[as_size(dim)] += rounded(weight) * static_cast<double>(batch.value(request, position, kv_head, dim));
    }
  }
  return sums;
}

std::vector<double> wanted_row(const PagedBatch& batch, int32_t row, bool covers_exponent) {
  const int32_t request = batch.request_of(row);
  const PagedRequest& place = batch.requests[as_size(request)];
  const int64_t positions = place.first_position + row - place.row_first + 1;
  const int dims = batch.heads.head_dim;
  std::vector<double> wanted;
  for (int32_t head = 0; head < batch.heads.num_heads; ++head) {
    std::vector<float> query;
    for (int dim = 0; dim < dims; ++dim) {
      const int64_t place = (int64_t{row} * batch.heads.num_heads + head) * dims + dim;
      query.push_back(float_from_bf16(batch.query[as_size(place)]));
    }
    std::vector<SplitSums> splits;
    for (int64_t first = 0; first < positions; first += kSplitTokens) {
      splits.push_back(wanted_split(batch, request, query.data(), head / batch.heads.group_heads(), first,
                                    std::min<int64_t>(first + kSplitTokens, positions), covers_exponent));
    }
    double highest = splits[0].highest;
    for (const SplitSums& split : splits) highest = std::max(highest, split.highest);
    double weight_sum = 0;
    for (const SplitSums& split : splits) weight_sum += split.weight_sum * std::exp(split.highest - highest);
    for (int dim = 0; dim < dims; ++dim) {
      double sum = 0;
      for (const SplitSums& split : splits) sum += split.values[as_size(dim)] * std::exp(split.highest - highest);
      wanted.push_back(sum / weight_sum);
    }
  }
  return wanted;
}

std::vector<int32_t> all_rows(const PagedBatch& batch) {
  std::vector<int32_t> rows;
  for (int32_t row = 0; row < batch.num_rows; ++row) rows.push_back(row);
  return rows;
}

double worst_error(const PagedBatch& batch, const std::vector<float>& out, const std::vector<int32_t>& rows,
                   bool covers_exponent) {
  const int64_t width = int64_t{batch.heads.num_heads} * batch.heads.head_dim;
  double worst = 0;
  for (const int32_t row : rows) {
    const std::vector<float> part(out.begin() + row * width, out.begin() + (row + 1) * width);
    worst = std::max(worst, relative_error(part, wanted_row(batch, row, covers_exponent)));
  }
  return worst;
}

void check_batch(Report& report, const std::string& name, const Heads& heads, const Lengths& lengths,
                 const std::vector<int32_t>& reference_rows) {
  const PagedBatch batch(heads, lengths, 77 + lengths.size());
  const std::vector<int32_t> rows = all_rows(batch);
  DeviceArray<float> decoded(batch.out_floats());
  DeviceArray<float> prefilled(batch.out_floats());
  const DecodeRun decode(batch, rows);
  const PrefillRun prefill(batch);
  launch_attention_decode(decode.call(decoded.data()), nullptr);
  launch_attention_prefill(prefill.call(prefilled.data()), nullptr);
  DeviceArray<float> portable(batch.out_floats());
  launch_attention_prefill_portable(prefill.call(portable.data()), nullptr);
  const std::vector<float> out = decoded.download();
  const std::vector<float> other = prefilled.download();
  const double error = worst_error(batch, out, reference_rows, false);
  const double close_error = worst_error(batch, out, reference_rows, true);
  const double other_error = worst_error(batch, other, reference_rows, true);
  report.check(error < 3e-3 && close_error < 3e-4 && decoded.guard_is_whole(), text("attention decode ", name),
               text("error ", error, ", against the same weight rounding ", close_error));
  report.check(other_error < 3e-4 && prefilled.guard_is_whole(), text("attention prefill ", name),
               text("error ", other_error));
  report.check(same_bits(out, other), text("attention ", name, ": decode = prefill, bit by bit"),
               text(count_differences(decoded.data(), prefilled.data(), decoded.bytes()), " bytes differ"));
  report.check(same_bits(out, portable.download()),
               text("attention ", name, ": decode = portable prefill, bit by bit"));
  const std::vector<int32_t> one = {reference_rows.back()};
  const DecodeRun alone(batch, one);
  DeviceArray<float> alone_out(batch.out_floats());
  launch_attention_decode(alone.call(alone_out.data()), nullptr);
  const std::vector<float> row_out = alone_out.download();
  const size_t width = as_size(heads.num_heads * heads.head_dim);
  const size_t first = as_size(one[0]) * width;
  report.check(std::memcmp(row_out.data() + first, out.data() + first, width * sizeof(float)) == 0,
               text("attention ", name, ": a row alone = in a batch"));
}

void check_repeats(Report& report) {
  const PagedBatch batch({}, {{3000, 1}, {100, 1}, {5119, 1}, {1023, 40}, {0, 33}}, 5);
  DeviceArray<float> out(batch.out_floats());
  const DecodeRun decode(batch, all_rows(batch));
  const PrefillRun prefill(batch);
  report.check(is_repeatable([&](cudaStream_t stream) { launch_attention_decode(decode.call(out.data()), stream); },
                             out.data(), out.bytes(), 1000),
               "attention decode: 1,000 runs give the same bits");
  report.check(is_repeatable([&](cudaStream_t stream) { launch_attention_prefill(prefill.call(out.data()), stream); },
                             out.data(), out.bytes(), 1000),
               "attention prefill: 1,000 runs give the same bits");
}

void time_decode(const Ceiling& ceiling, int32_t requests, int32_t context) {
  constexpr double kSetBytes = 3e8;
  const double bytes = static_cast<double>(requests) * context * 512;
  const int sets = std::clamp(static_cast<int>(kSetBytes / bytes) + 1, 1, 40);
  Lengths lengths(as_size(requests), {context - 1, 1});
  std::vector<std::unique_ptr<PagedBatch>> batches;
  for (int set = 0; set < sets; ++set) {
    batches.push_back(std::make_unique<PagedBatch>(Heads{}, lengths, as_size(set) + 1, true));
  }
  const DecodeRun run(*batches[0], all_rows(*batches[0]));
  DeviceArray<float> out(batches[0]->out_floats());
  const double seconds = median_seconds(
      [&](int set, cudaStream_t stream) {
        DecodeCall call = run.call(out.data());
        call.attend.pages = batches[as_size(set)]->pool();
        launch_attention_decode(call, stream);
      },
      sets);
  print_time(text("attention decode ", requests, " requests of ", context), seconds, {.bytes = bytes}, ceiling);
}

void time_prefill(const Ceiling& ceiling, int32_t cached, int32_t fresh) {
  const PagedBatch batch({}, {{cached, fresh}}, 3, true);
  const PrefillRun run(batch);
  DeviceArray<float> out(batch.out_floats());
  const double seconds = median_seconds(
      [&](int, cudaStream_t stream) { launch_attention_prefill(run.call(out.data()), stream); }, 1);
  const double pairs = static_cast<double>(fresh) * cached + static_cast<double>(fresh) * (fresh + 1) / 2;
  const double portable_seconds = median_seconds(
      [&](int, cudaStream_t stream) { launch_attention_prefill_portable(run.call(out.data()), stream); }, 1);
  const Work work{.operations = pairs * 12 * 128 * 4};
  print_time(text("attention prefill ", fresh, " over ", cached), seconds, work, ceiling);
  print_time(text("attention prefill portable ", fresh, " over ", cached), portable_seconds, work, ceiling);
}

}

void run_rotate(Report& report, const Ceiling& ceiling);

void run_attention(Report& report, const Ceiling& ceiling) {
  run_rotate(report, ceiling);
  check_batch(report, "short", {}, {{0, 1}, {16, 1}, {63, 1}, {64, 2}, {511, 1}, {1000, 30}}, {0, 1, 2, 4, 5, 6, 35});
  check_batch(report, "long", {}, {{1023, 1}, {1024, 1}, {2500, 60}, {5000, 3}}, {0, 1, 2, 61, 64});
  check_batch(report, "8 heads over 2 of 64", {8, 2, 64}, {{77, 5}, {1500, 2}}, {0, 4, 6});
  check_batch(report, "16 heads over 1", {16, 1, 128}, {{300, 20}}, {0, 19});
  check_repeats(report);
  time_decode(ceiling, 1, 128);
  time_decode(ceiling, 1, 512);
  time_decode(ceiling, 1, 1024);
  time_decode(ceiling, 1, 8192);
  time_decode(ceiling, 64, 512);
  time_decode(ceiling, 1, 32768);
  time_decode(ceiling, 64, 4096);
  time_decode(ceiling, 8, 32768);
  time_decode(ceiling, 256, 4096);
  time_prefill(ceiling, 0, 4096);
  time_prefill(ceiling, 28672, 4096);
}

}
