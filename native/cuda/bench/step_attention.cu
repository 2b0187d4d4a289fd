#include "cuda/bench/step_pages.h"

namespace glint::cuda::bench {

namespace {

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

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
  check_attention_shapes(report);
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
