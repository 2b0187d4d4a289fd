#include <stdio.h>
#include <stdlib.h>

#include "tiny_model.h"

enum { ROUNDS = 3, REQUESTS = 4 };

static void report(const char* part, glint_status status) { printf("%s %d\n", part, (int)status); }

static void open_without_last_tensor(const tiny_model* model, const glint_engine_options* options) {
  glint_engine* engine = NULL;
  report("missing_tensor", glint_init_engine(options, model->tensors, model->tensor_count - 1, &engine));
}

static void open_with_short_file(const tiny_model* model, glint_engine_options options) {
  glint_engine* engine = NULL;
  glint_file file = model->file;
  file.byte_count += 1;
  options.files = &file;
  report("short_file", glint_init_engine(&options, model->tensors, model->tensor_count, &engine));
}

static uint64_t add(glint_engine* engine, int32_t first_token, glint_status* status) {
  const int32_t prompt[] = {first_token, 2, 3, 4, 5, 6, 7, 8, 9};
  const int32_t stop_sequences[] = {1, 2, 3, 4, 5};
  const int32_t stop_lengths[] = {2, 3};
  const int32_t stop_tokens[] = {63};
  glint_sampling sampling = tiny_greedy_sampling();
  sampling.temperature = 0.9F;
  sampling.num_logprobs = 5;
  const glint_request request = {.struct_bytes = sizeof(glint_request),
                                 .prompt_count = sizeof(prompt) / sizeof(prompt[0]),
                                 .prompt_tokens = prompt,
                                 .max_new_tokens = 50,
                                 .stop_tokens = stop_tokens,
                                 .stop_token_count = 1,
                                 .stop_sequence_tokens = stop_sequences,
                                 .stop_sequence_lengths = stop_lengths,
                                 .stop_sequence_count = 2,
                                 .sampling = &sampling};
  uint64_t id = 0;
  *status = glint_add_request(engine, &request, &id);
  return id;
}

static void submit(glint_engine* engine, const uint64_t* ids, glint_ticket* ticket) {
  glint_step_item items[REQUESTS];
  for (int index = 0; index < REQUESTS; ++index) {
    items[index] = (glint_step_item){.request_id = ids[index], .advance_tokens = 4};
  }
  *ticket = (glint_ticket){.struct_bytes = sizeof(glint_ticket)};
  expect_ok(glint_submit_step(engine, items, REQUESTS, ticket), "glint_submit_step");
}

static void leave_in_the_middle(const tiny_model* model, const glint_engine_options* options) {
  glint_engine* engine = tiny_engine_open(model, options);
  glint_status status = GLINT_STATUS_OK;
  uint64_t ids[REQUESTS];
  for (int32_t index = 0; index < REQUESTS; ++index) {
    ids[index] = add(engine, index, &status);
    expect_ok(status, "glint_add_request");
  }
  add(engine, TINY_VOCAB_SIZE, &status);
  report("unknown_token", status);
  glint_ticket tickets[2];
  submit(engine, ids, &tickets[0]);
  expect_ok(glint_sample_step(engine, &tickets[0], NULL), "glint_sample_step");
  submit(engine, ids, &tickets[1]);
  expect_ok(glint_free_request(engine, ids[0]), "glint_free_request");
  glint_step_results results = {.struct_bytes = sizeof(glint_step_results)};
  expect_ok(glint_collect_step(engine, &tickets[0], &results), "glint_collect_step");
  expect_ok(glint_free_engine(engine), "glint_free_engine");
  report("freed_with_a_step_in_flight", GLINT_STATUS_OK);
}

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: left_unfinished MODEL_FILE SCALE_KIND THREADS\n");
    return 2;
  }
  tiny_model model;
  tiny_model_write(&model, argv[1], (int32_t)atoi(argv[2]));
  const glint_engine_options options = tiny_options(&model, GLINT_KERNELS_AUTO, (int32_t)atoi(argv[3]));
  for (int round = 0; round < ROUNDS; ++round) {
    open_without_last_tensor(&model, &options);
    open_with_short_file(&model, options);
    leave_in_the_middle(&model, &options);
  }
  return 0;
}
