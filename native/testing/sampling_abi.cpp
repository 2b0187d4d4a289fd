#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/rng.h"
#include "cpu/sampling.h"
#include "include/glint.h"
#include "testing/cases.h"

namespace {

using glint::testing::TestRow;

struct TestResult {
  int32_t token;
  int32_t failure;
  float logprob;
  int32_t top_count;
  int32_t top_tokens[GLINT_MAX_LOGPROBS];
  float top_logprobs[GLINT_MAX_LOGPROBS];
};

TestResult test_result(const glint::SampledRow& row) {
  TestResult result{row.token, row.failure, row.logprob, row.top_count, {}, {}};
  std::ranges::copy(row.top_tokens, result.top_tokens);
  std::ranges::copy(row.top_logprobs, result.top_logprobs);
  return result;
}

class RowSampler {
 public:
  explicit RowSampler(const TestRow& row)
      : row_(row),
        settings_(glint::sampling_settings(*row.sampling)),
        scratch_(row.vocab_size),
        logits_(static_cast<size_t>(row.vocab_size)) {}

  TestResult sample(int32_t position) {
    std::copy_n(row_.logits, logits_.size(), logits_.begin());
    glint::SampledRow out;
    const std::span history(row_.history, static_cast<size_t>(row_.history_count));
    glint::cpu::sample_row(out, logits_,
                           {.logit_row = 0,
                            .settings = &settings_,
                            .history = history,
                            .prompt_count = row_.prompt_count,
                            .allowed_words = row_.allowed_words,
                            .position = position,
                            .has_given_token = false,
                            .given_token = 0},
                           scratch_);
    return test_result(out);
  }

  std::vector<int32_t> kept_tokens() const { return scratch_.kept_tokens(); }

 private:
  TestRow row_;
  glint::SamplingSettings settings_;
  glint::cpu::SamplerScratch scratch_;
  std::vector<float> logits_;
};

}

extern "C" {

GLINT_API void glint_testing_sample(const TestRow* row, TestResult* result) {
  *result = RowSampler(*row).sample(row->position);
}

GLINT_API void glint_testing_sample_positions(const TestRow* row, int32_t count, int32_t* tokens) {
  RowSampler sampler(*row);
  for (int32_t index = 0; index < count; ++index) tokens[index] = sampler.sample(row->position + index).token;
}

GLINT_API int32_t glint_testing_kept_tokens(const TestRow* row, int32_t* tokens) {
  RowSampler sampler(*row);
  sampler.sample(row->position);
  const std::vector<int32_t> kept = sampler.kept_tokens();
  std::ranges::copy(kept, tokens);
  return static_cast<int32_t>(kept.size());
}

GLINT_API void glint_testing_logprobs(const float* logits, int32_t vocab_size, int32_t actual_token, int32_t num_top,
                                      TestResult* result) {
  glint::SampledRow out;
  glint::cpu::logprobs_row(out, {logits, static_cast<size_t>(vocab_size)}, actual_token, num_top);
  *result = test_result(out);
}

GLINT_API int32_t glint_testing_sampling_problem(const glint_sampling* sampling, int32_t vocab_size, char* text,
                                                 int32_t capacity) {
  const std::string problem = glint::sampling_problem(*sampling, vocab_size);
  const size_t count = std::min(problem.size(), static_cast<size_t>(capacity) - 1);
  std::memcpy(text, problem.data(), count);
  text[count] = 0;
  return static_cast<int32_t>(problem.size());
}

GLINT_API void glint_testing_random_bits(uint64_t seed, uint32_t choice_index, int32_t position, int32_t count,
                                         uint64_t* bits) {
  for (int32_t token = 0; token < count; ++token) {
    bits[token] = glint::random_bits(seed, choice_index, position, token);
  }
}

GLINT_API double glint_testing_open_uniform(uint64_t bits) { return glint::open_uniform(bits); }

GLINT_API double glint_testing_gumbel(uint64_t bits) { return glint::gumbel(bits); }
}
