#include "cpu/sampling.h"
#include "cuda/bench/step_check.h"
#include "cuda/kernels/sampling/sampling.h"

namespace glint::cuda::bench {

namespace {

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

struct HostRow {
  SamplingSettings settings;
  std::vector<float> logits;
  std::vector<int32_t> history;
  std::vector<uint32_t> words;
  int32_t prompt_count = 0;
  int32_t position = 0;
};

HostRow random_row(RandomSource& random, int32_t vocab_size, int kind) {
  HostRow row;
  const float spread = kind % 5 == 4 ? 0.0F : (kind % 3 == 0 ? 1.0F : 4.0F);
  row.logits = random.normals(as_size(vocab_size), spread);
  if (kind % 4 == 1) for (float& value : row.logits) value = std::round(value * 2.0F) / 2.0F;
  row.settings.seed = random.bits();
  row.settings.choice_index = static_cast<uint32_t>(random.below(4));
  row.settings.temperature = kind % 7 == 0 ? 0.0F : static_cast<float>(0.2 + random.uniform() * 1.5);
  if (kind % 2 == 0) row.settings.top_p = static_cast<float>(0.3 + 0.69 * random.uniform());
  if (kind % 3 == 1) row.settings.top_k = static_cast<int32_t>(1 + random.below(200));
  if (kind % 5 == 2) row.settings.min_p = static_cast<float>(0.2 * random.uniform());
  if (kind % 20 == 12) row.settings.min_p = 1.0F;
  if (kind % 20 == 16) row.settings.top_k = 1;
  row.settings.has_logprobs = kind % 2 == 1;
  row.settings.num_logprobs = row.settings.has_logprobs ? kind % 21 : 0;
  if (kind % 6 == 3) {
    row.settings.repetition_penalty = 1.3F;
    row.settings.frequency_penalty = 0.4F;
    row.settings.presence_penalty = -0.7F;
    for (int index = 0; index < 700; ++index) row.history.push_back(static_cast<int32_t>(random.below(vocab_size)));
    for (int index = 0; index < 100; ++index) row.history.push_back(row.history[as_size(index / 3)]);
    row.prompt_count = 300;
  }
  if (kind % 8 == 5) {
    for (int index = 0; index < 50; ++index) {
      row.settings.bias.push_back({static_cast<int32_t>(random.below(vocab_size)), 5.0F * random.normal()});
    }
    row.settings.bias.push_back(row.settings.bias.front());
  }
  if (kind % 9 == 7) {
    for (int32_t word = 0; word < (vocab_size + 31) / 32; ++word) {
      row.words.push_back(static_cast<uint32_t>(random.bits() & random.bits()));
    }
  }
  if (kind % 50 == 49) row.logits[as_size(random.below(vocab_size))] = std::nanf("");
  if (kind % 50 == 48) row.words.assign(as_size((vocab_size + 31) / 32), 0U);
  row.position = static_cast<int32_t>(random.below(5000));
  return row;
}

struct DeviceRow {
  explicit DeviceRow(const HostRow& row) : logits(row.logits), history(row.history), words(row.words) {
    std::vector<int32_t> bias_tokens;
    std::vector<float> bias_values;
    for (const TokenBias& bias : row.settings.bias) {
      bias_tokens.push_back(bias.token);
      bias_values.push_back(bias.value);
    }
    tokens = std::make_unique<DeviceArray<int32_t>>(bias_tokens);
    values = std::make_unique<DeviceArray<float>>(bias_values);
    const SamplingSettings& from = row.settings;
    settings = {.logits = logits.data(),
                .history = history.data(),
                .allowed_words = row.words.empty() ? nullptr : words.data(),
                .bias_tokens = tokens->data(),
                .bias_values = values->data(),
                .seed = from.seed,
                .choice_index = from.choice_index,
                .position = row.position,
                .history_count = static_cast<int32_t>(row.history.size()),
                .prompt_count = row.prompt_count,
                .bias_count = static_cast<int32_t>(bias_tokens.size()),
                .top_k = from.top_k,
                .num_logprobs = from.num_logprobs,
                .given_token = 0,
                .temperature = from.temperature,
                .top_p = from.top_p,
                .min_p = from.min_p,
                .repetition_penalty = from.repetition_penalty,
                .frequency_penalty = from.frequency_penalty,
                .presence_penalty = from.presence_penalty,
                .has_logprobs = from.has_logprobs,
                .has_given_token = false};
  }

  DeviceArray<float> logits;
  DeviceArray<int32_t> history;
  DeviceArray<uint32_t> words;
  std::unique_ptr<DeviceArray<int32_t>> tokens;
  std::unique_ptr<DeviceArray<float>> values;
  SampleSettings settings{};
};

bool same_logprobs(const SampleResult& out, const SampledRow& wanted) {
  if (std::fabs(out.logprob - wanted.logprob) > 1e-6F * (1.0F + std::fabs(wanted.logprob))) return false;
  if (out.top_count != wanted.top_count) return false;
  for (int32_t index = 0; index < out.top_count; ++index) {
    const auto place = as_size(index);
    const float gap = std::fabs(out.top_logprobs[index] - wanted.top_logprobs[place]);
    const float allowed_gap = 2e-6F * (1.0F + std::fabs(wanted.top_logprobs[place]));
    if (out.top_tokens[index] != wanted.top_tokens[place] || gap > allowed_gap) return false;
  }
  return true;
}

void check_rows(Report& report, int32_t vocab_size, int count) {
  RandomSource random(static_cast<uint64_t>(vocab_size));
  std::vector<HostRow> rows;
  std::vector<std::unique_ptr<DeviceRow>> device_rows;
  std::vector<SampleSettings> settings;
  for (int index = 0; index < count; ++index) {
    rows.push_back(random_row(random, vocab_size, index));
    device_rows.push_back(std::make_unique<DeviceRow>(rows.back()));
    settings.push_back(device_rows.back()->settings);
  }
  DeviceArray<SampleSettings> device_settings(settings);
  DeviceArray<SampleResult> results(as_size(count));
  const SampleCall call{results.data(), device_settings.data(), count, vocab_size, true};
  launch_sample_rows(call, nullptr);
  const std::vector<SampleResult> out = results.download();
  cpu::SamplerScratch scratch(vocab_size);
  int wrong_tokens = 0;
  int wrong_failures = 0;
  int wrong_logprobs = 0;
  for (int index = 0; index < count; ++index) {
    HostRow& row = rows[as_size(index)];
    SampledRow wanted;
    const uint32_t* words = row.words.empty() ? nullptr : row.words.data();
    const SamplingRow host_row{.logit_row = 0,
                               .settings = &row.settings,
                               .history = row.history,
                               .prompt_count = row.prompt_count,
                               .allowed_words = words,
                               .position = row.position,
                               .has_given_token = false,
                               .given_token = 0};
    cpu::sample_row(wanted, row.logits, host_row, scratch);
    const SampleResult& result = out[as_size(index)];
    wrong_failures += result.failure == wanted.failure ? 0 : 1;
    if (wanted.failure != GLINT_FAILURE_NONE) continue;
    if (result.token != wanted.token) {
      std::printf("row %d: token %d, the CPU sampler drew %d\n", index, result.token, wanted.token);
    }
    wrong_tokens += result.token == wanted.token ? 0 : 1;
    if (row.settings.has_logprobs) wrong_logprobs += same_logprobs(result, wanted) ? 0 : 1;
  }
  report.check(wrong_tokens == 0 && wrong_failures == 0 && wrong_logprobs == 0 && results.guard_is_whole(),
               text("sampler, ", count, " rows of ", vocab_size, " against the CPU sampler"),
               text(wrong_tokens, " tokens, ", wrong_failures, " failures, ", wrong_logprobs, " logprobs differ"));
  report.check(is_repeatable([&](cudaStream_t stream) { launch_sample_rows(call, stream); }, results.data(),
                             results.bytes(), 100),
               text("sampler, ", vocab_size, ": 100 runs give the same bits"));
}

void time_sampler(const Ceiling& ceiling, int count, const std::string& name, const SamplingSettings& wanted) {
  constexpr int32_t kVocab = 151552;
  RandomSource random(4);
  std::vector<std::unique_ptr<DeviceRow>> rows;
  std::vector<SampleSettings> settings;
  for (int index = 0; index < count; ++index) {
    HostRow row;
    row.logits = random.normals(kVocab, 2.5F);
    row.settings = wanted;
    row.settings.seed = random.bits();
    rows.push_back(std::make_unique<DeviceRow>(row));
    settings.push_back(rows.back()->settings);
  }
  DeviceArray<SampleSettings> device_settings(settings);
  DeviceArray<SampleResult> results(as_size(count));
  const SampleCall call{results.data(), device_settings.data(), count, kVocab, false};
  const double seconds = median_seconds([&](int, cudaStream_t stream) { launch_sample_rows(call, stream); }, 1);
  print_time(text("sampler ", name, ", ", count, " rows"), seconds, {.bytes = 4.0 * count * kVocab}, ceiling);
}

}

void run_sampling(Report& report, const Ceiling& ceiling) {
  check_rows(report, 151552, 100);
  check_rows(report, 1003, 200);
  check_rows(report, 49152, 100);
  SamplingSettings greedy;
  greedy.temperature = 0.0F;
  SamplingSettings plain;
  SamplingSettings nucleus;
  nucleus.top_p = 0.95F;
  SamplingSettings logprobs = nucleus;
  logprobs.has_logprobs = true;
  logprobs.num_logprobs = 20;
  for (const int count : {1, 64}) {
    time_sampler(ceiling, count, "greedy", greedy);
    time_sampler(ceiling, count, "temperature 1", plain);
    time_sampler(ceiling, count, "top-p 0.95", nucleus);
    time_sampler(ceiling, count, "top-p 0.95, 20 logprobs", logprobs);
  }
}

}
