#include "tiny_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 32, LAYERS = 2, HEADS = 2, HEAD_DIM = 16, DENSE_WIDTH = 48, EXPERT_WIDTH = 16, EXPERTS = 4 };

void expect_ok(glint_status status, const char* call) {
  if (status == GLINT_STATUS_OK) return;
  fprintf(stderr, "%s: status %d: %s\n", call, (int)status, glint_last_error());
  exit(1);
}

static uint32_t element_hash(uint32_t tensor, uint32_t element) {
  uint32_t hash = (tensor << 20 ^ element) * 0x9E3779B1U;
  hash = (hash ^ hash >> 15) * 0x85EBCA77U;
  return (hash ^ hash >> 13) >> 24;
}

static float element_value(int32_t is_norm, uint32_t tensor, uint32_t element) {
  const int32_t number = (int32_t)element_hash(tensor, element);
  return is_norm ? (float)(64 + number / 2) / 128.0F : (float)(number - 128) / 256.0F;
}

static int is_norm_role(int32_t role) {
  return role == GLINT_ROLE_FINAL_NORM || role == GLINT_ROLE_INPUT_NORM || role == GLINT_ROLE_POST_ATTENTION_NORM ||
         role == GLINT_ROLE_QUERY_NORM || role == GLINT_ROLE_KEY_NORM || role == GLINT_ROLE_EMBEDDING_NORM ||
         role == GLINT_ROLE_HIDDEN_NORM;
}

static void write_or_exit(FILE* file, const void* data, size_t bytes, const char* path) {
  if (fwrite(data, 1, bytes, file) == bytes) return;
  perror(path);
  exit(1);
}

static uint32_t element_bits(const glint_tensor* tensor, uint32_t index, uint32_t element) {
  if (tensor->dtype == GLINT_DTYPE_F8_E4M3) {
    const uint32_t hash = element_hash(index, element);
    return (hash & 0x80U) | hash % 0x38U;
  }
  const float value = element_value(is_norm_role(tensor->role), index, element);
  uint32_t bits;
  memcpy(&bits, tensor->part == GLINT_PART_SCALE ? &(const float){0.5F} : &value, sizeof(bits));
  return tensor->dtype == GLINT_DTYPE_BF16 ? bits >> 16 : bits;
}

static void write_tensor(FILE* file, tiny_model* model, glint_tensor tensor) {
  const size_t element_bytes = tensor.dtype == GLINT_DTYPE_F32 ? 4 : tensor.dtype == GLINT_DTYPE_BF16 ? 2 : 1;
  tensor.struct_bytes = sizeof(glint_tensor);
  tensor.file_offset = model->file.byte_count;
  tensor.byte_count = (uint64_t)(tensor.rows * tensor.cols) * element_bytes;
  for (uint32_t element = 0; element < (uint32_t)(tensor.rows * tensor.cols); ++element) {
    const uint32_t bits = element_bits(&tensor, (uint32_t)model->tensor_count, element);
    unsigned char bytes[4];
    for (size_t place = 0; place < element_bytes; ++place) bytes[place] = (unsigned char)(bits >> (8 * place));
    write_or_exit(file, bytes, element_bytes, model->file.path);
  }
  model->file.byte_count += tensor.byte_count;
  model->tensors[model->tensor_count++] = tensor;
}

static void write_shaped(FILE* file, tiny_model* model, int32_t role, int32_t part, int32_t layer, int32_t expert,
                         int64_t rows, int64_t cols) {
  const int is_router_bias = role == GLINT_ROLE_ROUTER && part == GLINT_PART_BIAS;
  write_tensor(file, model,
               (glint_tensor){.role = role,
                              .part = part,
                              .layer = layer,
                              .expert = expert,
                              .dtype = is_router_bias ? GLINT_DTYPE_F32 : GLINT_DTYPE_BF16,
                              .rows = rows,
                              .cols = cols});
}

static void write_weight(FILE* file, tiny_model* model, int32_t role, int32_t layer, int32_t expert, int64_t rows,
                         int64_t cols) {
  if (model->shape.weight_scale_kind == GLINT_SCALE_NONE) {
    write_shaped(file, model, role, GLINT_PART_WEIGHT, layer, expert, rows, cols);
    return;
  }
  glint_tensor tensor = {.role = role,
                         .part = GLINT_PART_WEIGHT,
                         .layer = layer,
                         .expert = expert,
                         .dtype = GLINT_DTYPE_F8_E4M3,
                         .rows = rows,
                         .cols = cols};
  write_tensor(file, model, tensor);
  tensor.part = GLINT_PART_SCALE;
  tensor.dtype = GLINT_DTYPE_F32;
  tensor.cols = 1;
  write_tensor(file, model, tensor);
}

static void write_feed_forward(FILE* file, tiny_model* model, int32_t gate_role, int32_t layer, int32_t expert,
                               int64_t width) {
  write_weight(file, model, gate_role, layer, expert, width, HIDDEN);
  write_weight(file, model, gate_role + 1, layer, expert, width, HIDDEN);
  write_weight(file, model, gate_role + 2, layer, expert, HIDDEN, width);
}

static void write_attention(FILE* file, tiny_model* model, int32_t layer) {
  const int64_t query_width = HEADS * HEAD_DIM;
  write_shaped(file, model, GLINT_ROLE_INPUT_NORM, GLINT_PART_WEIGHT, layer, -1, HIDDEN, 1);
  write_shaped(file, model, GLINT_ROLE_POST_ATTENTION_NORM, GLINT_PART_WEIGHT, layer, -1, HIDDEN, 1);
  write_weight(file, model, GLINT_ROLE_QUERY, layer, -1, query_width, HIDDEN);
  write_shaped(file, model, GLINT_ROLE_QUERY, GLINT_PART_BIAS, layer, -1, query_width, 1);
  write_weight(file, model, GLINT_ROLE_KEY, layer, -1, HEAD_DIM, HIDDEN);
  write_shaped(file, model, GLINT_ROLE_KEY, GLINT_PART_BIAS, layer, -1, HEAD_DIM, 1);
  write_weight(file, model, GLINT_ROLE_VALUE, layer, -1, HEAD_DIM, HIDDEN);
  write_shaped(file, model, GLINT_ROLE_VALUE, GLINT_PART_BIAS, layer, -1, HEAD_DIM, 1);
  write_weight(file, model, GLINT_ROLE_OUTPUT, layer, -1, HIDDEN, query_width);
  write_shaped(file, model, GLINT_ROLE_QUERY_NORM, GLINT_PART_WEIGHT, layer, -1, HEAD_DIM, 1);
  write_shaped(file, model, GLINT_ROLE_KEY_NORM, GLINT_PART_WEIGHT, layer, -1, HEAD_DIM, 1);
}

static void write_expert_layer(FILE* file, tiny_model* model, int32_t layer) {
  write_attention(file, model, layer);
  write_shaped(file, model, GLINT_ROLE_ROUTER, GLINT_PART_WEIGHT, layer, -1, EXPERTS, HIDDEN);
  write_shaped(file, model, GLINT_ROLE_ROUTER, GLINT_PART_BIAS, layer, -1, EXPERTS, 1);
  for (int32_t expert = 0; expert < EXPERTS; ++expert) {
    write_feed_forward(file, model, GLINT_ROLE_GATE, layer, expert, EXPERT_WIDTH);
  }
  write_feed_forward(file, model, GLINT_ROLE_SHARED_GATE, layer, -1, EXPERT_WIDTH);
}

static void write_mtp(FILE* file, tiny_model* model) {
  write_expert_layer(file, model, LAYERS);
  write_shaped(file, model, GLINT_ROLE_EMBEDDING_NORM, GLINT_PART_WEIGHT, LAYERS, -1, HIDDEN, 1);
  write_shaped(file, model, GLINT_ROLE_HIDDEN_NORM, GLINT_PART_WEIGHT, LAYERS, -1, HIDDEN, 1);
  write_shaped(file, model, GLINT_ROLE_EH_PROJ, GLINT_PART_WEIGHT, LAYERS, -1, HIDDEN, 2 * HIDDEN);
  write_shaped(file, model, GLINT_ROLE_FINAL_NORM, GLINT_PART_WEIGHT, LAYERS, -1, HIDDEN, 1);
}

static void write_tensors(FILE* file, tiny_model* model) {
  write_shaped(file, model, GLINT_ROLE_EMBEDDING, GLINT_PART_WEIGHT, -1, -1, TINY_VOCAB_SIZE, HIDDEN);
  write_attention(file, model, 0);
  write_feed_forward(file, model, GLINT_ROLE_GATE, 0, -1, DENSE_WIDTH);
  write_expert_layer(file, model, 1);
  write_shaped(file, model, GLINT_ROLE_FINAL_NORM, GLINT_PART_WEIGHT, -1, -1, HIDDEN, 1);
  write_shaped(file, model, GLINT_ROLE_LM_HEAD, GLINT_PART_WEIGHT, -1, -1, TINY_VOCAB_SIZE, HIDDEN);
  const int64_t main_count = model->tensor_count;
  write_mtp(file, model);
  model->all_tensor_count = model->tensor_count;
  model->tensor_count = main_count;
}

void tiny_model_write(tiny_model* model, const char* path, int32_t weight_scale_kind) {
  memset(model, 0, sizeof(*model));
  model->shape = (glint_model){.struct_bytes = sizeof(glint_model),
                               .vocab_size = TINY_VOCAB_SIZE,
                               .hidden_size = HIDDEN,
                               .num_layers = LAYERS,
                               .num_dense_layers = 1,
                               .num_heads = HEADS,
                               .num_kv_heads = 1,
                               .head_dim = HEAD_DIM,
                               .rotary_dim = HEAD_DIM / 2,
                               .dense_width = DENSE_WIDTH,
                               .expert_width = EXPERT_WIDTH,
                               .shared_width = EXPERT_WIDTH,
                               .num_experts = EXPERTS,
                               .experts_per_token = 2,
                               .max_positions = TINY_MAX_POSITIONS,
                               .has_qk_norm = 1,
                               .has_attention_bias = 1,
                               .normalise_weights = 1,
                               .weight_scale_kind = weight_scale_kind,
                               .mtp_vocab_size = TINY_VOCAB_SIZE,
                               .routed_scaling = 1.5F,
                               .norm_epsilon = 1e-5,
                               .rope_theta = 10000.0};
  model->file = (glint_file){.struct_bytes = sizeof(glint_file), .path = path};
  FILE* file = fopen(path, "wb");
  if (file == NULL) {
    perror(path);
    exit(1);
  }
  write_tensors(file, model);
  if (fclose(file) != 0) {
    perror(path);
    exit(1);
  }
}

glint_engine_options tiny_options(const tiny_model* model, int32_t kernels, int32_t num_threads) {
  return (glint_engine_options){.struct_bytes = sizeof(glint_engine_options),
                                .kernels = kernels,
                                .num_threads = num_threads,
                                .num_ranks = 1,
                                .row_slices = 1,
                                .expert_layout = GLINT_EXPERT_LAYOUT_TP,
                                .page_tokens = 8,
                                .num_pages = 160,
                                .max_step_tokens = 32,
                                .max_step_items = 8,
                                .max_requests = 8,
                                .max_context_tokens = TINY_MAX_POSITIONS,
                                .file_count = 1,
                                .model = &model->shape,
                                .files = &model->file};
}

glint_engine* tiny_engine_open(const tiny_model* model, const glint_engine_options* options) {
  glint_engine* engine = NULL;
  const int64_t count = options->max_draft_tokens > 0 ? model->all_tensor_count : model->tensor_count;
  expect_ok(glint_init_engine(options, model->tensors, count, &engine), "glint_init_engine");
  return engine;
}

glint_sampling tiny_greedy_sampling(void) {
  return (glint_sampling){
      .struct_bytes = sizeof(glint_sampling), .top_p = 1.0F, .repetition_penalty = 1.0F, .has_logprobs = 1};
}

uint64_t tiny_add(glint_engine* engine, const int32_t* prompt, int32_t count, int32_t max_new_tokens,
                  const glint_sampling* sampling) {
  const glint_request request = {.struct_bytes = sizeof(glint_request),
                                 .prompt_count = count,
                                 .prompt_tokens = prompt,
                                 .max_new_tokens = max_new_tokens,
                                 .sampling = sampling};
  uint64_t id = 0;
  expect_ok(glint_add_request(engine, &request, &id), "glint_add_request");
  return id;
}
