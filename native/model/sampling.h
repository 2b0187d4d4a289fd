#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "include/glint.h"

namespace glint {

inline constexpr int32_t kMaxBiasCount = 1024;
inline constexpr float kMaxBiasValue = 100.0F;
inline constexpr int32_t kNoSampledRow = -1;

struct TokenBias {
  int32_t token;
  float value;
};

struct SamplingSettings {
  uint64_t seed = 0;
  uint32_t choice_index = 0;
  float temperature = 1.0F;
  float top_p = 1.0F;
  float min_p = 0.0F;
  float repetition_penalty = 1.0F;
  float frequency_penalty = 0.0F;
  float presence_penalty = 0.0F;
  int32_t top_k = 0;
  bool has_logprobs = false;
  int32_t num_logprobs = 0;
  bool has_prompt_logprobs = false;
  int32_t num_prompt_logprobs = 0;
  std::vector<TokenBias> bias;
};

struct SamplingRow {
  int32_t logit_row = 0;
  const SamplingSettings* settings = nullptr;
  std::span<const int32_t> history = {};
  int32_t prompt_count = 0;
  const uint32_t* allowed_words = nullptr;
  int32_t position = 0;
  bool is_draft = false;
  bool has_given_token = false;
  int32_t given_token = 0;
};

struct SampledRow {
  int32_t token = 0;
  int32_t failure = GLINT_FAILURE_NONE;
  float logprob = 0.0F;
  int32_t top_count = 0;
  std::array<int32_t, GLINT_MAX_LOGPROBS> top_tokens{};
  std::array<float, GLINT_MAX_LOGPROBS> top_logprobs{};
};

inline SamplingSettings sampling_settings(const glint_sampling& sampling) {
  SamplingSettings settings{
      .seed = sampling.seed,
      .choice_index = sampling.choice_index,
      .temperature = sampling.temperature,
      .top_p = sampling.top_p,
      .min_p = sampling.min_p,
      .repetition_penalty = sampling.repetition_penalty,
      .frequency_penalty = sampling.frequency_penalty,
      .presence_penalty = sampling.presence_penalty,
      .top_k = sampling.top_k,
      .has_logprobs = sampling.has_logprobs != 0,
      .num_logprobs = sampling.num_logprobs,
      .has_prompt_logprobs = sampling.has_prompt_logprobs != 0,
      .num_prompt_logprobs = sampling.num_prompt_logprobs,
      .bias = {},
  };
  settings.bias.reserve(static_cast<size_t>(sampling.bias_count));
  for (int32_t index = 0; index < sampling.bias_count; ++index) {
    settings.bias.push_back({sampling.bias_tokens[index], sampling.bias_values[index]});
  }
  return settings;
}

template <typename Value>
std::string field_problem(bool is_good, const std::string& field, Value value, const std::string& range) {
  if (is_good) return {};
  std::ostringstream text;
  text << field << " is " << value << "; it must be " << range;
  return text.str();
}

inline std::string element_name(std::string list, int32_t index) {
  return list.append("[").append(std::to_string(index)).append("]");
}

inline std::string bias_problem(const glint_sampling& sampling, int32_t vocab_size) {
  const int32_t count = sampling.bias_count;
  if (count < 0 || count > kMaxBiasCount) {
    return field_problem(false, "bias_count", count, "0 to " + std::to_string(kMaxBiasCount));
  }
  if (count > 0 && (sampling.bias_tokens == nullptr || sampling.bias_values == nullptr)) {
    return field_problem(false, "bias_count", count, "0 where bias_tokens or bias_values is null");
  }
  for (int32_t index = 0; index < count; ++index) {
    const int32_t token = sampling.bias_tokens[index];
    if (token < 0 || token >= vocab_size) {
      return field_problem(false, element_name("bias_tokens", index), token, "0 to " + std::to_string(vocab_size - 1));
    }
    const float value = sampling.bias_values[index];
    if (!(std::fabs(value) <= kMaxBiasValue)) {
      return field_problem(false, element_name("bias_values", index), value, "a number from -100 to 100");
    }
  }
  return {};
}

inline std::string sampling_problem(const glint_sampling& sampling, int32_t vocab_size) {
  if (sampling.struct_bytes != sizeof(glint_sampling)) {
    return field_problem(false, "struct_bytes", sampling.struct_bytes,
                         std::to_string(sizeof(glint_sampling)) + ", the size of glint_sampling in this library");
  }
  const auto number = [](const char* field, float value, bool is_good, const char* range) {
    return field_problem(is_good && std::isfinite(value), field, value, range);
  };
  const auto penalty = [&](const char* field, float value) {
    return number(field, value, std::fabs(value) <= 2.0F, "a number from -2 to 2");
  };
  const auto flag = [](const char* field, int32_t value) {
    return field_problem(value == 0 || value == 1, field, value, "0 or 1");
  };
  const auto top_count = [](const char* field, int32_t value) {
    return field_problem(value >= 0 && value <= GLINT_MAX_LOGPROBS, field, value,
                         "0 to " + std::to_string(GLINT_MAX_LOGPROBS));
  };
  const float top_p = sampling.top_p;
  const float min_p = sampling.min_p;
  const std::array problems = {
      number("temperature", sampling.temperature, sampling.temperature >= 0.0F, "a finite number, 0 or more"),
      number("top_p", top_p, top_p > 0.0F && top_p <= 1.0F, "above 0 and at most 1"),
      number("min_p", min_p, min_p >= 0.0F && min_p <= 1.0F, "from 0 to 1"),
      number("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0.0F,
             "a finite number above 0"),
      penalty("frequency_penalty", sampling.frequency_penalty),
      penalty("presence_penalty", sampling.presence_penalty),
      field_problem(sampling.top_k >= 0, "top_k", sampling.top_k, "0 (off) or more"),
      flag("has_logprobs", sampling.has_logprobs),
      top_count("num_logprobs", sampling.num_logprobs),
      flag("has_prompt_logprobs", sampling.has_prompt_logprobs),
      top_count("num_prompt_logprobs", sampling.num_prompt_logprobs),
      bias_problem(sampling, vocab_size),
  };
  for (const std::string& text : problems) {
    if (!text.empty()) return text;
  }
  return {};
}

}
