#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "../programs/tiny_model.h"
#include "checks.h"

enum { NEW_TOKENS = 24, PROMPTS = 3, LONGEST = 53 };

typedef struct answer {
  int32_t tokens[NEW_TOKENS];
  float logprobs[NEW_TOKENS];
  int32_t count;
} answer;

static void take_token(answer* made, const glint_step_results* results) {
  made->tokens[made->count] = results->items[0].tokens[0];
  made->logprobs[made->count] = results->logprobs[0].logprob;
  made->count += 1;
}

static answer generate(const tiny_model* model, int32_t kernels, int32_t num_threads, int64_t step_tokens,
                       const int32_t* prompt, int32_t count) {
  glint_engine_options options = tiny_options(model, kernels, num_threads);
  options.max_step_tokens = step_tokens;
  glint_engine* engine = tiny_engine_open(model, &options);
  const glint_sampling sampling = tiny_greedy_sampling();
  const uint64_t id = tiny_add(engine, prompt, count, NEW_TOKENS, &sampling);
  glint_step_results results = {.struct_bytes = sizeof(glint_step_results)};
  answer made = {.count = 0};
  expect_ok(glint_prefill(engine, id, &results), "glint_prefill");
  take_token(&made, &results);
  while (results.items[0].finish_reason == GLINT_FINISH_NONE && made.count < NEW_TOKENS) {
    expect_ok(glint_decode_step(engine, id, &results), "glint_decode_step");
    take_token(&made, &results);
  }
  expect_ok(glint_free_request(engine, id), "glint_free_request");
  expect_ok(glint_check(engine), "glint_check");
  expect_ok(glint_free_engine(engine), "glint_free_engine");
  return made;
}

static void compare_answers(const answer* got, const answer* want, double bound, const char* where) {
  check(got->count == NEW_TOKENS && want->count == NEW_TOKENS, "an answer is too short", where);
  for (int32_t index = 0; index < NEW_TOKENS; ++index) {
    check(got->tokens[index] == want->tokens[index], "a token differs", where);
    check(fabs((double)got->logprobs[index] - (double)want->logprobs[index]) <= bound, "a logprob differs", where);
  }
}

void check_model(const pair* sets, const char* model_file) {
  static const int32_t KINDS[] = {GLINT_SCALE_NONE, GLINT_SCALE_CHANNEL};
  static const double BOUNDS[] = {1e-4, 2e-2};
  static const int32_t LENGTHS[PROMPTS] = {1, 8, LONGEST};
  for (int kind = 0; kind < 2; ++kind) {
    tiny_model model;
    tiny_model_write(&model, model_file, KINDS[kind]);
    for (int index = 0; index < PROMPTS; ++index) {
      int32_t prompt[LONGEST];
      for (int32_t place = 0; place < LENGTHS[index]; ++place) {
        prompt[place] = (7 + 5 * place + index) % TINY_VOCAB_SIZE;
      }
      char where[100];
      snprintf(where, sizeof(where), "%s model of %s, prompt of %d", sets->name, kind == 0 ? "BF16" : "FP8",
               (int)LENGTHS[index]);
      const answer exact = generate(&model, GLINT_KERNELS_EXACT, 1, 32, prompt, LENGTHS[index]);
      const answer plain = generate(&model, GLINT_KERNELS_PLAIN, 1, 32, prompt, LENGTHS[index]);
      const answer tested = generate(&model, sets->kernels, 2, 32, prompt, LENGTHS[index]);
      const answer in_small_steps = generate(&model, sets->kernels, 1, 5, prompt, LENGTHS[index]);
      compare_answers(&tested, &exact, BOUNDS[kind], where);
      compare_answers(&tested, &plain, BOUNDS[kind], where);
      compare_answers(&in_small_steps, &tested, 0.0, where);
    }
  }
}
