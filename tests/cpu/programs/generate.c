#include <stdio.h>
#include <stdlib.h>

#include "tiny_model.h"

static void print_token(const glint_step_results* results) {
  printf("%d %a\n", (int)results->items[0].tokens[0], (double)results->logprobs[0].logprob);
}

int main(int argc, char** argv) {
  if (argc < 5) {
    fprintf(stderr, "usage: generate MODEL_FILE SCALE_KIND NEW_TOKENS PROMPT_TOKENS\n");
    return 2;
  }
  int32_t prompt[TINY_MAX_POSITIONS];
  int32_t count = 0;
  for (int index = 4; index < argc && count < TINY_MAX_POSITIONS; ++index) prompt[count++] = (int32_t)atoi(argv[index]);

  tiny_model model;
  tiny_model_write(&model, argv[1], (int32_t)atoi(argv[2]));
  const glint_engine_options options = tiny_options(&model, GLINT_KERNELS_EXACT, 1);
  glint_engine* engine = tiny_engine_open(&model, &options);
  const glint_sampling sampling = tiny_greedy_sampling();
  const uint64_t id = tiny_add(engine, prompt, count, (int32_t)atoi(argv[3]), &sampling);

  glint_step_results results = {.struct_bytes = sizeof(glint_step_results)};
  expect_ok(glint_prefill(engine, id, &results), "glint_prefill");
  print_token(&results);
  while (results.items[0].finish_reason == GLINT_FINISH_NONE) {
    expect_ok(glint_decode_step(engine, id, &results), "glint_decode_step");
    print_token(&results);
  }
  expect_ok(glint_free_request(engine, id), "glint_free_request");
  expect_ok(glint_check(engine), "glint_check");
  expect_ok(glint_free_engine(engine), "glint_free_engine");
  return 0;
}
