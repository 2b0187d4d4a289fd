#include <stdio.h>
#include <stdlib.h>

#include "allocations.h"
#include "tiny_model.h"

enum { REQUESTS = 8, PROMPT_TOKENS = 33, DRAFTS = 3 };

typedef struct load {
  glint_engine* engine;
  glint_sampling sampling;
  uint64_t ids[REQUESTS];
  int32_t drafts;
} load;

static void submit_all(load* load, int32_t count, int32_t advance, glint_ticket* ticket) {
  glint_step_item items[REQUESTS];
  for (int32_t index = 0; index < count; ++index) {
    items[index] =
        (glint_step_item){.request_id = load->ids[index], .advance_tokens = advance, .draft_tokens = load->drafts};
  }
  *ticket = (glint_ticket){.struct_bytes = sizeof(glint_ticket)};
  expect_ok(glint_submit_step(load->engine, items, count, ticket), "glint_submit_step");
  expect_ok(glint_sample_step(load->engine, ticket, NULL), "glint_sample_step");
}

static void collect(load* load, const glint_ticket* ticket) {
  glint_step_results results = {.struct_bytes = sizeof(glint_step_results)};
  expect_ok(glint_collect_step(load->engine, ticket, &results), "glint_collect_step");
}

static void run_steps(load* load, int32_t count, int32_t advance, int steps) {
  for (int step = 0; step < steps; ++step) {
    glint_ticket ticket;
    submit_all(load, count, advance, &ticket);
    collect(load, &ticket);
  }
}

static void run_overlapped(load* load, int32_t count, int32_t advance, int steps) {
  glint_ticket tickets[2];
  submit_all(load, count, advance, &tickets[0]);
  for (int step = 1; step < steps; ++step) {
    submit_all(load, count, advance, &tickets[step % 2]);
    collect(load, &tickets[(step - 1) % 2]);
  }
  collect(load, &tickets[(steps - 1) % 2]);
}

static void run_drafted(load* load, int32_t count, int steps) {
  load->drafts = DRAFTS;
  run_steps(load, count, 1 + DRAFTS, steps);
  run_overlapped(load, count, 1 + DRAFTS, steps);
  load->drafts = 0;
}

static void add_all(load* load, int32_t shift) {
  for (int32_t index = 0; index < REQUESTS; ++index) {
    int32_t prompt[PROMPT_TOKENS];
    for (int32_t place = 0; place < PROMPT_TOKENS; ++place) prompt[place] = (place * 5 + shift) % TINY_VOCAB_SIZE;
    prompt[PROMPT_TOKENS - 1] = index;
    load->sampling.seed = (uint64_t)index;
    load->ids[index] = tiny_add(load->engine, prompt, PROMPT_TOKENS, 200, &load->sampling);
  }
}

static void free_all(load* load) {
  for (int32_t index = 0; index < REQUESTS; ++index) {
    expect_ok(glint_free_request(load->engine, load->ids[index]), "glint_free_request");
  }
}

static void prefill_all(load* load) {
  for (int32_t done = 0; done < PROMPT_TOKENS; done += 4) run_steps(load, REQUESTS, 4, 1);
}

static void report(const char* part) { printf("%s %ld\n", part, allocations_of_last_part()); }

int main(int argc, char** argv) {
  if (argc != 5) {
    fprintf(stderr, "usage: steady_steps MODEL_FILE SCALE_KIND KERNELS THREADS\n");
    return 2;
  }
  tiny_model model;
  tiny_model_write(&model, argv[1], (int32_t)atoi(argv[2]));
  glint_engine_options options = tiny_options(&model, (int32_t)atoi(argv[3]), (int32_t)atoi(argv[4]));
  options.max_draft_tokens = DRAFTS;
  options.max_step_items = REQUESTS * (1 + DRAFTS);
  start_counting();
  load load = {.engine = tiny_engine_open(&model, &options), .sampling = tiny_greedy_sampling()};
  report("init_engine");
  load.sampling.temperature = 0.8F;
  load.sampling.top_p = 0.9F;
  load.sampling.repetition_penalty = 1.1F;
  load.sampling.num_logprobs = GLINT_MAX_LOGPROBS;

  for (int32_t round = 0; round < 4; ++round) {
    const int is_measured = round > 0;
    if (is_measured) start_counting();
    add_all(&load, round);
    if (is_measured) report("add_requests");
    if (is_measured) start_counting();
    prefill_all(&load);
    if (is_measured) report("prompt_steps");
    if (is_measured) start_counting();
    run_steps(&load, REQUESTS, 1, 40);
    if (is_measured) report("decode_steps");
    if (is_measured) start_counting();
    run_overlapped(&load, REQUESTS, 1, 40);
    if (is_measured) report("overlapped_steps");
    if (is_measured) start_counting();
    run_drafted(&load, REQUESTS, 10);
    if (is_measured) report("draft_steps");
    for (int32_t index = 0; index < REQUESTS; ++index) {
      expect_ok(glint_release_pages(load.engine, load.ids[index]), "glint_release_pages");
    }
    if (is_measured) start_counting();
    run_steps(&load, REQUESTS, 4, 1);
    if (is_measured) report("resumed_steps");
    free_all(&load);
  }
  expect_ok(glint_check(load.engine), "glint_check");
  expect_ok(glint_free_engine(load.engine), "glint_free_engine");
  return 0;
}
