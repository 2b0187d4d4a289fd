#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum { MAX_SPANS = 8, LAYERS = 2, SPARE_PAGES = 7 };

static const double MEDIAN_BOUND = 1e-7;
static const double THETA = 1e6;

typedef struct heads {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  int64_t page_tokens;
} heads;

typedef struct span {
  int32_t first;
  int32_t count;
} span;

typedef struct scene {
  heads shape;
  test_pages pages;
  test_request requests[MAX_SPANS];
  int32_t* page_numbers;
  float* query;
  float* step_query;
  int64_t step_rows;
  int64_t row_width;
  float largest_value;
} scene;

static int32_t* shuffled(int32_t count) {
  int32_t* numbers = malloc((size_t)count * sizeof(int32_t));
  for (int32_t index = 0; index < count; ++index) {
    const int32_t place = (int32_t)random_below((uint32_t)index + 1);
    numbers[index] = numbers[place];
    numbers[place] = index;
  }
  return numbers;
}

static void store_context(workers* writer, scene* made, const test_request* whole, int32_t count, int64_t rows) {
  const heads shape = made->shape;
  int32_t* positions = malloc((size_t)rows * sizeof(int32_t));
  for (int32_t index = 0; index < count; ++index) {
    for (int32_t row = 0; row < whole[index].row_count; ++row) positions[whole[index].row_first + row] = row;
  }
  const int64_t kept = rows * shape.num_kv_heads * shape.head_dim;
  const int64_t half = shape.rotary_dim / 2;
  float* cosines = poisoned_floats(rows * half);
  float* sines = poisoned_floats(rows * half);
  float* norms = random_floats(2 * (int64_t)shape.head_dim, 1.0F);
  float* key = random_floats(kept, 2.0F);
  float* value = random_floats(kept, 2.0F);
  made->query = random_floats(rows * made->row_width, 2.0F);
  for (int64_t index = 0; index < kept; ++index) made->largest_value = fmaxf(made->largest_value, fabsf(value[index]));
  const test_rotation rotation = {made->query, key, value, norms, norms + shape.head_dim, cosines, sines, 1e-5};
  test_pages pages = made->pages;
  pages.requests = whole;
  glint_testing_fill_rotary(writer, cosines, sines, positions, rows, shape.rotary_dim, THETA);
  glint_testing_rope_and_cache(writer, &rotation, &pages);
  free(value);
  free(key);
  free(norms);
  free(sines);
  free(cosines);
  free(positions);
}

static scene new_scene(workers* writer, heads shape, int32_t dtype, const span* spans, int32_t count) {
  scene made = {.shape = shape, .row_width = (int64_t)shape.num_heads * shape.head_dim};
  test_request whole[MAX_SPANS];
  int64_t page_first[MAX_SPANS];
  int64_t num_pages = 0;
  int32_t rows = 0;
  int32_t step_rows = 0;
  for (int32_t index = 0; index < count; ++index) {
    const int32_t total = spans[index].first + spans[index].count;
    whole[index] = (test_request){rows, total, 0, 0, NULL};
    made.requests[index] = (test_request){step_rows, spans[index].count, spans[index].first, 0, NULL};
    page_first[index] = num_pages;
    num_pages += (total + shape.page_tokens - 1) / shape.page_tokens;
    rows += total;
    step_rows += spans[index].count;
  }
  num_pages += SPARE_PAGES;
  made.page_numbers = shuffled((int32_t)num_pages);
  for (int32_t index = 0; index < count; ++index) {
    whole[index].pages = made.requests[index].pages = made.page_numbers + page_first[index];
  }
  const int64_t elements = LAYERS * 2 * num_pages * shape.num_kv_heads * shape.page_tokens * shape.head_dim;
  const size_t bytes = (size_t)elements * (dtype == GLINT_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t));
  made.pages = (test_pages){.data = malloc(bytes),
                            .num_pages = num_pages,
                            .page_tokens = shape.page_tokens,
                            .layer = 1,
                            .dtype = dtype,
                            .num_heads = shape.num_heads,
                            .num_kv_heads = shape.num_kv_heads,
                            .head_dim = shape.head_dim,
                            .rotary_dim = shape.rotary_dim,
                            .request_count = count};
  memset(made.pages.data, 0xff, bytes);
  store_context(writer, &made, whole, count, rows);
  made.step_rows = step_rows;
  made.step_query = new_floats(step_rows * made.row_width);
  for (int32_t index = 0; index < count; ++index) {
    const int64_t source = whole[index].row_first + spans[index].first;
    memcpy(made.step_query + made.requests[index].row_first * made.row_width, made.query + source * made.row_width,
           (size_t)(spans[index].count * made.row_width) * sizeof(float));
  }
  return made;
}

static void free_scene(scene* made) {
  free(made->pages.data);
  free(made->page_numbers);
  free(made->query);
  free(made->step_query);
}

static float* attended(workers* backend, const scene* made, const float* query, const test_request* requests,
                       int32_t count, int64_t rows) {
  float* out = poisoned_floats(rows * made->row_width);
  test_pages pages = made->pages;
  pages.requests = requests;
  pages.request_count = count;
  glint_testing_attend(backend, out, query, &pages);
  return out;
}

static int compare_doubles(const void* left, const void* right) {
  const double a = *(const double*)left;
  const double b = *(const double*)right;
  return (a > b) - (a < b);
}

static void check_errors(const scene* made, const float* got, const float* want, const char* where) {
  const double bound = made->pages.dtype == GLINT_DTYPE_F32 ? 2e-6 : 2e-3;
  const int64_t count = made->step_rows * made->row_width;
  double* errors = malloc((size_t)count * sizeof(double));
  for (int64_t index = 0; index < count; ++index) {
    errors[index] = fabs((double)got[index] - (double)want[index]) / (double)made->largest_value;
    check(errors[index] <= bound, "an element is too far from exact", where);
  }
  qsort(errors, (size_t)count, sizeof(double), compare_doubles);
  check(errors[count / 2] <= MEDIAN_BOUND, "the median element is too far from exact", where);
  free(errors);
}

static void check_rows_alone(const pair* sets, const scene* made, const float* together, const char* where) {
  for (int32_t index = 0; index < made->pages.request_count; ++index) {
    const test_request request = made->requests[index];
    for (int32_t row = 0; row < request.row_count; ++row) {
      const int64_t first = (request.row_first + row) * made->row_width;
      const test_request alone = {0, 1, request.first_position + row, 0, request.pages};
      float* got = attended(sets->tested, made, made->step_query + first, &alone, 1, 1);
      check_same(got, together + first, made->row_width, where);
      free(got);
    }
  }
}

static void check_scene(const pair* sets, heads shape, int32_t dtype, const span* spans, int32_t count) {
  scene made = new_scene(sets->exact, shape, dtype, spans, count);
  char where[120];
  snprintf(where, sizeof(where), "%s attention, %d heads of %d, %s pages of %d, from position %d", sets->name,
           (int)shape.num_heads, (int)shape.head_dim, dtype == GLINT_DTYPE_F32 ? "FP32" : "BF16",
           (int)shape.page_tokens, (int)spans[0].first);
  float* want = attended(sets->exact, &made, made.step_query, made.requests, count, made.step_rows);
  float* got = attended(sets->tested, &made, made.step_query, made.requests, count, made.step_rows);
  check_errors(&made, got, want, where);
  workers* three = open_workers(sets->kernels, 3);
  float* threaded = attended(three, &made, made.step_query, made.requests, count, made.step_rows);
  glint_testing_backend_free(three);
  check_same(threaded, got, made.step_rows * made.row_width, where);
  check_rows_alone(sets, &made, got, where);
  free(threaded);
  free(got);
  free(want);
  free_scene(&made);
}

void check_attention(const pair* sets) {
  static const heads SHAPES[] = {{24, 2, 128, 64, 16}, {6, 2, 64, 32, 8}, {6, 3, 32, 32, 16}, {2, 2, 36, 18, 5}};
  static const span MIXED[] = {{0, 37}, {64, 5}, {129, 1}, {0, 1}, {15, 18}, {200, 1}, {0, 16}};
  static const span SPLITS[] = {{1015, 20}, {2100, 1}, {1023, 1}, {1024, 1}};
  static const int32_t DTYPES[] = {GLINT_DTYPE_F32, GLINT_DTYPE_BF16};
  for (int kind = 0; kind < 2; ++kind) {
    for (int shape = 0; shape < 4; ++shape) check_scene(sets, SHAPES[shape], DTYPES[kind], MIXED, 7);
    check_scene(sets, SHAPES[1], DTYPES[kind], SPLITS, 4);
  }
}
