#include <algorithm>

#include "cuda/backend.h"
#include "cuda/check.h"
#include "cuda/memory/copies.h"

namespace glint {

namespace {

using cuda::SampleBuffers;
using cuda::SampleResult;
using cuda::SampleSettings;

bool has_penalties(const SamplingSettings& settings) {
  return settings.repetition_penalty != 1.0F || settings.frequency_penalty != 0.0F || settings.presence_penalty != 0.0F;
}

struct SampleWriter {
  Backend& backend;
  const SampleBuffers& host;
  const SampleBuffers& device;
  int64_t num_rows = 0;
  int64_t num_mask_words = 0;
  int64_t num_biases = 0;
  int64_t num_history = 0;
  bool any_penalties = false;

  const uint32_t* add_mask(const uint32_t* words) {
    if (words == nullptr) return nullptr;
    const int64_t first = num_mask_words;
    num_mask_words += cuda::mask_words(backend.model);
    std::copy_n(words, cuda::mask_words(backend.model), host.mask_words + first);
    return device.mask_words + first;
  }

  int64_t add_bias(std::span<const TokenBias> bias) {
    const int64_t first = num_biases;
    for (const TokenBias& entry : bias) {
      host.bias_tokens[num_biases] = entry.token;
      host.bias_values[num_biases++] = entry.value;
    }
    return first;
  }

  const int32_t* add_history(std::span<const int32_t> history) {
    const int64_t first = num_history;
    std::ranges::copy(history, host.history + first);
    num_history += static_cast<int64_t>(history.size());
    return device.history + first;
  }

  void add(const SamplingRow& row) {
    const SamplingSettings& settings = *row.settings;
    const bool is_penalised = !row.has_given_token && has_penalties(settings);
    const bool is_biased = !row.has_given_token;
    const int64_t bias_first = is_biased ? add_bias(settings.bias) : 0;
    any_penalties = any_penalties || is_penalised;
    host.settings[num_rows++] = {
        .logits = backend.workspace.logits + int64_t{row.logit_row} * backend.model.vocab_size,
        .history = is_penalised ? add_history(row.history) : nullptr,
        .allowed_words = add_mask(row.allowed_words),
        .bias_tokens = device.bias_tokens + bias_first,
        .bias_values = device.bias_values + bias_first,
        .seed = settings.seed,
        .choice_index = settings.choice_index,
        .position = row.position,
        .history_count = is_penalised ? static_cast<int32_t>(row.history.size()) : 0,
        .prompt_count = row.prompt_count,
        .bias_count = is_biased ? static_cast<int32_t>(settings.bias.size()) : 0,
        .top_k = settings.top_k,
        .num_logprobs = row.has_given_token ? settings.num_prompt_logprobs : settings.num_logprobs,
        .given_token = row.given_token,
        .temperature = settings.temperature,
        .top_p = settings.top_p,
        .min_p = settings.min_p,
        .repetition_penalty = is_penalised ? settings.repetition_penalty : 1.0F,
        .frequency_penalty = is_penalised ? settings.frequency_penalty : 0.0F,
        .presence_penalty = is_penalised ? settings.presence_penalty : 0.0F,
        .has_logprobs = row.has_given_token || (settings.has_logprobs && !row.is_draft),
        .has_given_token = row.has_given_token};
  }

  void send() const {
    cuda::Copies uploads(cuda::CopyDirection::kToDevice, backend.stream);
    uploads.add(device.settings, host.settings, num_rows);
    uploads.add(device.mask_words, host.mask_words, num_mask_words);
    uploads.add(device.bias_tokens, host.bias_tokens, num_biases);
    uploads.add(device.bias_values, host.bias_values, num_biases);
    uploads.add(device.history, host.history, num_history);
    uploads.send();
  }
};

void start_sampling(Backend& backend, SampleResult* results, std::span<const SamplingRow> rows) {
  SampleWriter writer{backend, backend.staging.sampling, backend.workspace.sampling};
  for (const SamplingRow& row : rows) writer.add(row);
  writer.send();
  cuda::launch_sample_rows({.results = results,
                            .rows = backend.workspace.sampling.settings,
                            .count = static_cast<int32_t>(rows.size()),
                            .vocab_size = backend.model.vocab_size,
                            .has_penalties = writer.any_penalties},
                           backend.stream);
}

void broadcast_results(Backend& backend, void* results, int64_t byte_count) {
  if (!backend.has_peers() || byte_count == 0) return;
  backend.collectives->broadcast(results, static_cast<uint64_t>(byte_count), 0, backend.stream);
}

SampleResult* device_results(const Backend& backend, int32_t slot) {
  return backend.workspace.sampling.results[slot == kPromptSlot ? kPromptSlot : 0];
}

}

namespace ops {

void sample_rows(Backend& backend, int32_t slot, std::span<const SamplingRow> rows) {
  SampleResult* results = device_results(backend, slot);
  if (slot == kPromptSlot) backend.wait_for_event(backend.staging.sampled[backend.staging.last_sampled_slot]);
  if (backend.slice.is_first()) start_sampling(backend, results, rows);
  if (slot != kPromptSlot) {
    broadcast_results(backend, results, static_cast<int64_t>(rows.size() * sizeof(SampleResult)));
  }
  cuda::Copies downloads(cuda::CopyDirection::kToHost, backend.stream);
  downloads.add(backend.staging.sampling.results[slot], results, static_cast<int64_t>(rows.size()));
  downloads.add(backend.staging.experts_touched[slot], backend.workspace.moe.experts_touched, 1);
  downloads.send();
  GLINT_CHECK_CUDA(cudaEventRecord(backend.staging.sampled[slot], backend.stream));
  backend.staging.last_sampled_slot = slot;
}

void collect_rows(Backend& backend, int32_t slot, std::span<SampledRow> out) {
  backend.wait_for_event(backend.staging.sampled[slot]);
  backend.experts_read = *backend.staging.experts_touched[slot];
  const SampleResult* results = backend.staging.sampling.results[slot];
  for (size_t row = 0; row < out.size(); ++row) {
    const SampleResult& result = results[row];
    SampledRow& sampled = out[row];
    sampled.token = result.token;
    sampled.failure = result.failure;
    sampled.logprob = result.logprob;
    sampled.top_count = result.top_count;
    std::ranges::copy(result.top_tokens, sampled.top_tokens.begin());
    std::ranges::copy(result.top_logprobs, sampled.top_logprobs.begin());
  }
}

}

}
