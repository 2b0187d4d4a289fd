#ifndef CHECKS_H
#define CHECKS_H

#include <stddef.h>
#include <stdint.h>

#include "glint.h"

typedef struct workers workers;

typedef struct test_shape {
  int64_t max_cols;
  int64_t group_heads;
  int64_t head_dim;
  int64_t page_tokens;
} test_shape;

typedef struct test_operand {
  float* out;
  float* scales;
  const float* in;
  int64_t count;
  int64_t width;
  int32_t row_slices;
  int32_t has_fp8;
  int64_t group_size;
} test_operand;

typedef struct test_gemm {
  float* out;
  const float* in;
  const void* weight;
  const float* scales;
  const float* bias;
  const int32_t* input_rows;
  int64_t out_stride;
  int64_t input_count;
  int64_t count;
  int64_t weight_rows;
  int64_t weight_cols;
  int64_t row_first;
  int64_t row_count;
  int64_t col_first;
  int64_t col_count;
  int32_t dtype;
  int32_t scale_kind;
  int64_t group_size;
} test_gemm;

typedef struct test_request {
  int32_t row_first;
  int32_t row_count;
  int32_t first_position;
  int32_t context_first;
  const int32_t* pages;
} test_request;

typedef struct test_pages {
  void* data;
  int64_t num_pages;
  int64_t page_tokens;
  int64_t layer;
  int32_t dtype;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  int32_t rounding;
  int32_t request_count;
  const test_request* requests;
} test_pages;

typedef struct test_rotation {
  float* query;
  float* key;
  float* value;
  const float* query_norm;
  const float* key_norm;
  const float* cosines;
  const float* sines;
  double norm_epsilon;
} test_rotation;

typedef struct test_combine {
  float* out;
  const float* routed;
  const int32_t* routed_rows;
  const float* weights;
  const int32_t* experts;
  const float* shared;
  int64_t count;
  int64_t hidden_size;
  int64_t experts_per_token;
  int32_t expert_first;
  int32_t expert_last;
} test_combine;

const char* glint_testing_operations_error(void);
workers* glint_testing_backend_new(int32_t kernels, int32_t num_threads, const test_shape* shape);
void glint_testing_backend_free(workers* backend);
const char* glint_testing_backend_kernels(workers* backend);
void glint_testing_float_from_e4m3(float* out, const uint8_t* in, int64_t count);
void glint_testing_float_from_bf16(float* out, const uint16_t* in, int64_t count);
void glint_testing_embed(workers* backend, float* out, const uint16_t* table, const int32_t* tokens, int64_t count,
                         int64_t width);
void glint_testing_rms_norm(workers* backend, float* out, const float* in, const float* weight, int64_t count,
                            int64_t width, double epsilon);
int64_t glint_testing_operand_stride(workers* backend, int64_t width, int32_t row_slices);
void glint_testing_prepare(workers* backend, const test_operand* source);
int32_t glint_testing_gemms(workers* backend, const test_gemm* gemms, int32_t count);
void glint_testing_fill_rotary(workers* backend, float* cosines, float* sines, const int32_t* positions, int64_t count,
                               int64_t rotary_dim, double theta);
void glint_testing_rope_and_cache(workers* backend, const test_rotation* rotation, const test_pages* pages);
void glint_testing_attend(workers* backend, float* out, const float* query, const test_pages* pages);
void glint_testing_swiglu(workers* backend, float* out, const float* gate, const float* up, int64_t count);
void glint_testing_combine(workers* backend, const test_combine* call);
void glint_testing_reduce_slices(workers* backend, float* parts, int64_t part_stride, int32_t num_parts, int64_t count);
void glint_testing_add_rows(workers* backend, float* hidden, const float* update, int64_t count);

typedef struct pair {
  const char* name;
  int32_t kernels;
  workers* exact;
  workers* tested;
} pair;

workers* open_workers(int32_t kernels, int32_t num_threads);

void* guarded_memory(size_t bytes);
void free_guarded(void* memory, size_t bytes);
float* new_floats(int64_t count);
float* poisoned_floats(int64_t count);
float random_float(void);
uint32_t random_below(uint32_t limit);
float* random_floats(int64_t count, float spread);
float* uneven_rows(int64_t count, int64_t width);

void check(int passed, const char* what, const char* where);
void check_same(const float* got, const float* want, int64_t count, const char* where);
void check_near(const float* got, const float* want, const float* magnitude, double bound, int64_t count,
                const char* where);
void check_last_place(const float* got, const double* want, int64_t count, const char* where);
int64_t num_checks(void);
int64_t num_failures(void);

void check_gemms(const pair* sets);
void check_attention(const pair* sets);
void check_rows(const pair* sets);
void check_model(const pair* sets, const char* model_file);

#endif
