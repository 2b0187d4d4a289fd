#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"

enum { MARGIN = 3, SCALE_TILE = 128, KINDS = 4 };

static const double FAST_BOUND = 1e-6;
static const int32_t ALL_KINDS[KINDS] = {GLINT_SCALE_CHANNEL, GLINT_SCALE_TENSOR, GLINT_SCALE_TILE, GLINT_SCALE_NONE};
static const char* const KIND_NAMES[KINDS] = {"a scale per channel", "one scale", "a scale per tile", "BF16"};

typedef struct stored_weight {
  void* data;
  void* magnitudes;
  size_t bytes;
  float* scales;
  int64_t rows;
  int64_t cols;
  int32_t kind;
} stored_weight;

typedef struct part {
  int64_t row_first;
  int64_t row_count;
  int64_t col_first;
  int64_t col_count;
} part;

static int is_fp8(const stored_weight* weight) { return weight->kind != GLINT_SCALE_NONE; }

static int64_t num_scales(int32_t kind, int64_t rows, int64_t cols) {
  if (kind == GLINT_SCALE_TENSOR) return 1;
  if (kind == GLINT_SCALE_CHANNEL) return rows;
  return (rows + SCALE_TILE - 1) / SCALE_TILE * ((cols + SCALE_TILE - 1) / SCALE_TILE);
}

static void fill_fp8(stored_weight* weight) {
  uint8_t* fp8 = weight->data;
  uint8_t* magnitudes = weight->magnitudes;
  for (size_t index = 0; index < weight->bytes; ++index) {
    magnitudes[index] = (uint8_t)random_below(127);
    fp8[index] = (uint8_t)(magnitudes[index] | random_below(2) << 7);
  }
}

static void fill_bf16(stored_weight* weight) {
  char* bits = weight->data;
  char* magnitudes = weight->magnitudes;
  for (size_t index = 0; index < weight->bytes; index += sizeof(uint16_t)) {
    const uint16_t magnitude = (uint16_t)(0x3d00 + random_below(0x400));
    const uint16_t signed_bits = (uint16_t)(magnitude | random_below(2) << 15);
    memcpy(magnitudes + index, &magnitude, sizeof(magnitude));
    memcpy(bits + index, &signed_bits, sizeof(signed_bits));
  }
}

static stored_weight new_weight(int64_t rows, int64_t cols, int32_t kind, float scale_size) {
  stored_weight weight = {.rows = rows, .cols = cols, .kind = kind};
  weight.bytes = (size_t)(rows * cols) * (is_fp8(&weight) ? 1 : sizeof(uint16_t));
  weight.data = guarded_memory(weight.bytes);
  weight.magnitudes = guarded_memory(weight.bytes);
  if (!is_fp8(&weight)) {
    fill_bf16(&weight);
    return weight;
  }
  fill_fp8(&weight);
  const int64_t count = num_scales(kind, rows, cols);
  weight.scales = new_floats(count);
  for (int64_t index = 0; index < count; ++index) {
    weight.scales[index] = scale_size * (0.5F + (float)random_below(1000) / 1000.0F);
  }
  return weight;
}

static void free_weight(stored_weight* weight) {
  free_guarded(weight->data, weight->bytes);
  free_guarded(weight->magnitudes, weight->bytes);
  free(weight->scales);
}

static part whole_of(const stored_weight* weight) { return (part){0, weight->rows, 0, weight->cols}; }

static test_gemm gemm_of(const float* rows, int64_t count, const stored_weight* weight, const float* bias,
                         part chosen) {
  return (test_gemm){.in = rows,
                     .weight = weight->data,
                     .scales = weight->scales,
                     .bias = bias,
                     .out_stride = chosen.row_count + MARGIN,
                     .input_count = count,
                     .count = count,
                     .weight_rows = weight->rows,
                     .weight_cols = weight->cols,
                     .row_first = chosen.row_first,
                     .row_count = chosen.row_count,
                     .col_first = chosen.col_first,
                     .col_count = chosen.col_count,
                     .dtype = is_fp8(weight) ? GLINT_DTYPE_F8_E4M3 : GLINT_DTYPE_BF16,
                     .scale_kind = weight->kind};
}

static float* run_gemm(workers* backend, test_gemm gemm, const char* where) {
  float* out = poisoned_floats(gemm.count * gemm.out_stride);
  float* result = new_floats(gemm.count * gemm.row_count);
  gemm.out = out;
  check(glint_testing_gemms(backend, &gemm, 1) == GLINT_STATUS_OK, "the GEMM is refused", where);
  for (int64_t row = 0; row < gemm.count; ++row) {
    const float* line = out + row * gemm.out_stride;
    for (int64_t place = 0; place < MARGIN; ++place) {
      check(isnan(line[gemm.row_count + place]), "writes beside its result", where);
    }
    memcpy(result + row * gemm.row_count, line, (size_t)gemm.row_count * sizeof(float));
  }
  free(out);
  return result;
}

static float* magnitudes_of(const float* values, int64_t count) {
  float* magnitudes = new_floats(count);
  for (int64_t index = 0; index < count; ++index) magnitudes[index] = fabsf(values[index]);
  return magnitudes;
}

static void compare_with_exact(const pair* sets, test_gemm gemm, const stored_weight* weight,
                               const char* where) {
  float* want = run_gemm(sets->exact, gemm, where);
  float* got = run_gemm(sets->tested, gemm, where);
  float* in = magnitudes_of(gemm.in, gemm.input_count * gemm.col_count);
  float* bias = magnitudes_of(gemm.bias, gemm.row_count);
  gemm.weight = weight->magnitudes;
  gemm.in = in;
  gemm.bias = bias;
  float* magnitude = run_gemm(sets->exact, gemm, where);
  check_near(got, want, magnitude, FAST_BOUND, gemm.count * gemm.row_count, where);
  free(magnitude);
  free(bias);
  free(in);
  free(got);
  free(want);
}

static void check_shape(const pair* sets, int kind, int64_t rows, int64_t cols, float scale_size) {
  static const int64_t COUNTS[] = {1, 6, 21};
  stored_weight weight = new_weight(rows, cols, ALL_KINDS[kind], scale_size);
  float* bias = random_floats(rows, scale_size);
  for (size_t index = 0; index < sizeof(COUNTS) / sizeof(COUNTS[0]); ++index) {
    char where[120];
    snprintf(where, sizeof(where), "%s GEMM %d x %d, %d rows, %s", sets->name, (int)rows, (int)cols,
             (int)COUNTS[index], KIND_NAMES[kind]);
    float* in = uneven_rows(COUNTS[index], cols);
    test_gemm gemm = gemm_of(in, COUNTS[index], &weight, bias, whole_of(&weight));
    compare_with_exact(sets, gemm, &weight, where);
    if (weight.kind == GLINT_SCALE_TILE) {
      gemm.group_size = SCALE_TILE;
      compare_with_exact(sets, gemm, &weight, where);
    }
    free(in);
  }
  free(bias);
  free_weight(&weight);
}

static void check_slices_of_gathered_rows(const pair* sets, int kind) {
  enum { INPUTS = 11, CHOSEN = 5 };
  static const int32_t ROWS[CHOSEN] = {7, 0, 7, 10, 3};
  const part chosen = {131, 77, 90, 100};
  stored_weight weight = new_weight(260, 330, ALL_KINDS[kind], 1.0F);
  float* in = uneven_rows(INPUTS, chosen.col_count);
  float* bias = random_floats(chosen.row_count, 1.0F);
  char where[120];
  snprintf(where, sizeof(where), "%s part of a weight with gathered rows, %s", sets->name, KIND_NAMES[kind]);
  test_gemm gemm = gemm_of(in, INPUTS, &weight, bias, chosen);
  gemm.input_rows = ROWS;
  gemm.count = CHOSEN;
  compare_with_exact(sets, gemm, &weight, where);
  free(bias);
  free(in);
  free_weight(&weight);
}

static void check_every_fp8_value(const pair* sets, int kind, int64_t cols) {
  enum { VALUES = 254 };
  stored_weight weight = new_weight(VALUES, cols, ALL_KINDS[kind], 1.0F);
  const int64_t count = num_scales(weight.kind, VALUES, cols);
  for (int64_t index = 0; index < count; ++index) weight.scales[index] = 1.0F;
  uint8_t fp8[VALUES];
  float numbers[VALUES];
  for (int value = 0; value < VALUES; ++value) fp8[value] = (uint8_t)(value < 127 ? value : value + 1);
  for (int value = 0; value < VALUES; ++value) memset((uint8_t*)weight.data + value * cols, fp8[value], (size_t)cols);
  glint_testing_float_from_e4m3(numbers, fp8, VALUES);
  for (int value = 0; value < VALUES; ++value) numbers[value] = 448.0F * numbers[value] + 0.0F;
  float* in = new_floats(2 * cols);
  for (int64_t col = 0; col < 2 * cols; ++col) in[col] = (col + 1) % cols == 0 ? 448.0F : 0.0F;
  char where[120];
  snprintf(where, sizeof(where), "%s every FP8 value in %d columns, %s", sets->name, (int)cols, KIND_NAMES[kind]);
  for (int64_t inputs = 1; inputs <= 2; ++inputs) {
    float* got = run_gemm(sets->tested, gemm_of(in, inputs, &weight, NULL, whole_of(&weight)), where);
    for (int64_t row = 0; row < inputs; ++row) check_same(got + row * VALUES, numbers, VALUES, where);
    free(got);
  }
  free(in);
  free_weight(&weight);
}

static void make_cancelling(stored_weight* weight) {
  uint8_t* fp8 = weight->data;
  for (int64_t index = 2; index < weight->rows * weight->cols; ++index) {
    if (index % 4 >= 2) fp8[index] = (uint8_t)(fp8[index - 2] ^ 0x80);
    if (index % 7 == 0) fp8[index] = (uint8_t)(index % 2 == 0 ? 0x7e : 0x01);
  }
}

static void check_row_counts(const pair* sets, int kind, int64_t cols, int cancels) {
  enum { ROWS = 37, INPUTS = 110 };
  static const int64_t COUNTS[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 100};
  stored_weight weight = new_weight(ROWS, cols, ALL_KINDS[kind], 1.0F);
  if (cancels) make_cancelling(&weight);
  float* in = uneven_rows(INPUTS, cols);
  float* bias = random_floats(ROWS, 1.0F);
  char where[120];
  snprintf(where, sizeof(where), "%s all rows, %s", sets->name, KIND_NAMES[kind]);
  const test_gemm all = gemm_of(in, INPUTS, &weight, bias, whole_of(&weight));
  float* whole = run_gemm(sets->tested, all, where);
  for (size_t index = 0; index < sizeof(COUNTS) / sizeof(COUNTS[0]); ++index) {
    const int64_t first = COUNTS[index] * 37 % (INPUTS - COUNTS[index]);
    snprintf(where, sizeof(where), "%s row %d in %d rows, %s", sets->name, (int)first, (int)COUNTS[index],
             KIND_NAMES[kind]);
    const test_gemm some = gemm_of(in + first * cols, COUNTS[index], &weight, bias, whole_of(&weight));
    float* got = run_gemm(sets->tested, some, where);
    check_same(got, whole + first * ROWS, COUNTS[index] * ROWS, where);
    free(got);
  }
  int32_t backwards[INPUTS];
  for (int32_t row = 0; row < INPUTS; ++row) backwards[row] = INPUTS - 1 - row;
  test_gemm gathered = all;
  gathered.input_rows = backwards;
  float* got = run_gemm(sets->tested, gathered, "rows backwards");
  for (int64_t row = 0; row < INPUTS; ++row) {
    check_same(got + row * ROWS, whole + (INPUTS - 1 - row) * ROWS, ROWS, "rows backwards");
  }
  free(got);
  free(whole);
  free(bias);
  free(in);
  free_weight(&weight);
}

static void check_threads_and_nan(const pair* sets, int kind) {
  enum { ROWS = 150, COLS = 260, INPUTS = 9, BAD = 4 };
  stored_weight weight = new_weight(ROWS, COLS, ALL_KINDS[kind], 1.0F);
  float* in = uneven_rows(INPUTS, COLS);
  char where[120];
  snprintf(where, sizeof(where), "%s threads and NaN, %s", sets->name, KIND_NAMES[kind]);
  const test_gemm gemm = gemm_of(in, INPUTS, &weight, NULL, whole_of(&weight));
  float* clean = run_gemm(sets->tested, gemm, where);
  workers* three = open_workers(sets->kernels, 3);
  float* threaded = run_gemm(three, gemm, where);
  glint_testing_backend_free(three);
  check_same(threaded, clean, INPUTS * ROWS, where);
  in[BAD * COLS + COLS - 1] = NAN;
  float* got = run_gemm(sets->tested, gemm, where);
  for (int64_t row = 0; row < ROWS; ++row) check(!isfinite(got[BAD * ROWS + row]), "NaN is lost", where);
  memcpy(got + BAD * ROWS, clean + BAD * ROWS, ROWS * sizeof(float));
  check_same(got, clean, INPUTS * ROWS, where);
  free(got);
  free(threaded);
  free(clean);
  free(in);
  free_weight(&weight);
}

void check_gemms(const pair* sets) {
  static const int64_t SHAPES[][2] = {{1, 1}, {3, 5}, {33, 33}, {40, 130}, {17, 192}, {150, 320}, {9, 2051}};
  for (int kind = 0; kind < KINDS; ++kind) {
    for (size_t index = 0; index < sizeof(SHAPES) / sizeof(SHAPES[0]); ++index) {
      check_shape(sets, kind, SHAPES[index][0], SHAPES[index][1], 1.0F);
    }
    check_slices_of_gathered_rows(sets, kind);
    check_row_counts(sets, kind, 130, 0);
    check_row_counts(sets, kind, 192, 0);
    check_threads_and_nan(sets, kind);
    if (ALL_KINDS[kind] == GLINT_SCALE_NONE) continue;
    check_row_counts(sets, kind, 576, 1);
    check_every_fp8_value(sets, kind, 1);
    check_every_fp8_value(sets, kind, 40);
    check_shape(sets, kind, 40, 200, 1e-10F);
  }
}
