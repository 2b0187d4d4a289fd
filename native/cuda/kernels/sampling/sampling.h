#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "include/glint.h"

namespace glint::cuda {

struct SampleSettings {
  const float* logits;
  const int32_t* history;
  const uint32_t* allowed_words;
  const int32_t* bias_tokens;
  const float* bias_values;
  uint64_t seed;
  uint32_t choice_index;
  int32_t position;
  int32_t history_count;
  int32_t prompt_count;
  int32_t bias_count;
  int32_t top_k;
  int32_t num_logprobs;
  int32_t given_token;
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float frequency_penalty;
  float presence_penalty;
  bool has_logprobs;
  bool has_given_token;
};

struct SampleResult {
  int32_t token;
  int32_t failure;
  float logprob;
  int32_t top_count;
  int32_t top_tokens[GLINT_MAX_LOGPROBS];
  float top_logprobs[GLINT_MAX_LOGPROBS];
};

struct SampleCall {
  SampleResult* results;
  const SampleSettings* rows;
  int32_t count;
  int32_t vocab_size;
  bool has_penalties;
};

void launch_sample_rows(const SampleCall& call, cudaStream_t stream);

}
