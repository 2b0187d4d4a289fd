#include <algorithm>
#include <memory>

#include "cuda/kernels/sampling/sampling.h"
#include "model/sampling.h"
#include "testing/cases.h"
#include "testing/cuda/runner.h"

namespace {

using glint::cuda::SampleResult;
using glint::cuda::SampleSettings;
using glint::testing::DeviceArray;
using glint::testing::guarded;
using glint::testing::Runner;
using glint::testing::TestRow;

class DeviceRow {
 public:
  explicit DeviceRow(const TestRow& row)
      : row_(row),
        settings_(glint::sampling_settings(*row.sampling)),
        logits_(row.logits, row.vocab_size),
        history_(row.history, row.history_count),
        words_(row.allowed_words, (row.vocab_size + 31) / 32),
        bias_tokens_(row.sampling->bias_tokens, row.sampling->bias_count),
        bias_values_(row.sampling->bias_values, row.sampling->bias_count) {}

  bool has_penalties() const {
    return settings_.repetition_penalty != 1.0F || settings_.frequency_penalty != 0.0F ||
           settings_.presence_penalty != 0.0F;
  }

  SampleSettings settings() const {
    return {.logits = logits_.data(),
            .history = has_penalties() ? history_.data() : nullptr,
            .allowed_words = words_.data(),
            .bias_tokens = bias_tokens_.data(),
            .bias_values = bias_values_.data(),
            .seed = settings_.seed,
            .choice_index = settings_.choice_index,
            .position = row_.position,
            .history_count = has_penalties() ? row_.history_count : 0,
            .prompt_count = row_.prompt_count,
            .bias_count = row_.sampling->bias_count,
            .top_k = settings_.top_k,
            .num_logprobs = settings_.num_logprobs,
            .given_token = 0,
            .temperature = settings_.temperature,
            .top_p = settings_.top_p,
            .min_p = settings_.min_p,
            .repetition_penalty = settings_.repetition_penalty,
            .frequency_penalty = settings_.frequency_penalty,
            .presence_penalty = settings_.presence_penalty,
            .has_logprobs = settings_.has_logprobs,
            .has_given_token = false};
  }

 private:
  const TestRow& row_;
  glint::SamplingSettings settings_;
  DeviceArray<float> logits_;
  DeviceArray<int32_t> history_;
  DeviceArray<uint32_t> words_;
  DeviceArray<int32_t> bias_tokens_;
  DeviceArray<float> bias_values_;
};

void sample_rows(Runner& runner, const TestRow* rows, int32_t count, SampleResult* results) {
  std::vector<std::unique_ptr<DeviceRow>> kept;
  std::vector<SampleSettings> settings;
  for (int32_t index = 0; index < count; ++index) {
    kept.push_back(std::make_unique<DeviceRow>(rows[index]));
    settings.push_back(kept.back()->settings());
  }
  const bool has_penalties = std::ranges::any_of(kept, [](const auto& row) { return row->has_penalties(); });
  const DeviceArray<SampleSettings> device_settings(settings);
  const DeviceArray<SampleResult> device_results(std::vector<SampleResult>(static_cast<size_t>(count)));
  runner.run(
      [&] {
        glint::cuda::launch_sample_rows({.results = device_results.data(),
                                         .rows = device_settings.data(),
                                         .count = count,
                                         .vocab_size = rows->vocab_size,
                                         .has_penalties = has_penalties},
                                        nullptr);
      },
      {&device_results});
  device_results.download(results);
}

}

extern "C" {

GLINT_API int32_t glint_testing_sample_rows(Runner* runner, const TestRow* rows, int32_t count, SampleResult* results) {
  return guarded([&] { sample_rows(*runner, rows, count, results); });
}
}
