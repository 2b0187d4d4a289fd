#ifndef TINY_MODEL_H
#define TINY_MODEL_H

#include "glint.h"

enum { TINY_VOCAB_SIZE = 64, TINY_MAX_POSITIONS = 256, TINY_MAX_TENSORS = 160 };

typedef struct tiny_model {
  glint_model shape;
  glint_file file;
  glint_tensor tensors[TINY_MAX_TENSORS];
  int64_t tensor_count;
  int64_t all_tensor_count;
} tiny_model;

void tiny_model_write(tiny_model* model, const char* path, int32_t weight_scale_kind);
glint_engine_options tiny_options(const tiny_model* model, int32_t kernels, int32_t num_threads);
glint_engine* tiny_engine_open(const tiny_model* model, const glint_engine_options* options);
glint_sampling tiny_greedy_sampling(void);
uint64_t tiny_add(glint_engine* engine, const int32_t* prompt, int32_t count, int32_t max_new_tokens,
                  const glint_sampling* sampling);
void expect_ok(glint_status status, const char* call);

#endif
