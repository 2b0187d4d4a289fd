#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"

static const double FAST_BOUND = 1e-6;

static void check_norm(const pair* sets, int64_t width) {
  enum { COUNT = 9 };
  const double epsilon = 1e-5;
  float* rows = uneven_rows(COUNT, width);
  float* weight = random_floats(width, 1.0F);
  float* got = poisoned_floats(COUNT * width);
  double* want = malloc((size_t)(COUNT * width) * sizeof(double));
  char where[80];
  for (int64_t row = 0; row < COUNT; ++row) {
    double squares = 0.0;
    for (int64_t col = 0; col < width; ++col) squares += pow((double)rows[row * width + col], 2.0);
    const double size = sqrt(squares / (double)width + epsilon);
    for (int64_t col = 0; col < width; ++col) {
      want[row * width + col] = (double)weight[col] * (double)rows[row * width + col] / size;
    }
  }
  snprintf(where, sizeof(where), "%s rms_norm of width %d", sets->name, (int)width);
  glint_testing_rms_norm(sets->tested, got, rows, weight, COUNT, width, epsilon);
  check_last_place(got, want, COUNT * width, where);
  free(want);
  free(got);
  free(weight);
  free(rows);
}

static void check_prepare(const pair* sets, int64_t width, int32_t slices, int32_t has_fp8) {
  enum { COUNT = 12 };
  float* rows = uneven_rows(COUNT, width);
  for (int64_t col = 0; col < width; ++col) {
    rows[4 * width + col] = 0.0F;
    rows[5 * width + col] = 1e-40F;
  }
  const int64_t elements = COUNT * glint_testing_operand_stride(sets->exact, width, slices);
  float* outs[2] = {poisoned_floats(elements), poisoned_floats(elements)};
  float* scales[2] = {poisoned_floats(COUNT * slices), poisoned_floats(COUNT * slices)};
  workers* backends[2] = {sets->exact, sets->tested};
  for (int side = 0; side < 2; ++side) {
    const test_operand operand = {outs[side], scales[side], rows, COUNT, width, slices, has_fp8, 0};
    glint_testing_prepare(backends[side], &operand);
  }
  char where[100];
  snprintf(where, sizeof(where), "%s %s of width %d in %d slices", sets->name, has_fp8 ? "FP8 values" : "floats",
           (int)width, (int)slices);
  for (int64_t index = 0; index < elements; ++index) {
    check(outs[1][index] == outs[0][index], "an element of the operand differs from exact", where);
  }
  if (has_fp8) check_same(scales[1], scales[0], COUNT * slices, where);
  for (int side = 0; side < 2; ++side) {
    free(outs[side]);
    free(scales[side]);
  }
  free(rows);
}

static void check_swiglu(const pair* sets, int64_t count) {
  static const float EDGES[] = {0.0F, 60.0F, -60.0F, 300.0F, -300.0F, -87.5F};
  float* gate = random_floats(count, 4.0F);
  float* up = uneven_rows(count, 1);
  for (int64_t index = 0; index < count && index < 6; ++index) gate[index] = EDGES[index];
  float* want = poisoned_floats(count);
  float* got = poisoned_floats(count + 1);
  float* magnitude = new_floats(count);
  char where[80];
  snprintf(where, sizeof(where), "%s swiglu of %d", sets->name, (int)count);
  glint_testing_swiglu(sets->exact, want, gate, up, count);
  glint_testing_swiglu(sets->tested, got, gate, up, count);
  for (int64_t index = 0; index < count; ++index) {
    magnitude[index] = fabsf(want[index]) + 1e-20F * fabsf(gate[index] * up[index]);
  }
  check_near(got, want, magnitude, FAST_BOUND, count, where);
  check(isnan(got[count]), "writes behind its result", where);
  gate[count / 2] = NAN;
  glint_testing_swiglu(sets->tested, got, gate, up, count);
  for (int64_t index = 0; index < count; ++index) {
    check(!isfinite(got[index]) == (index == count / 2), "NaN is not where it was put", where);
  }
  free(magnitude);
  free(got);
  free(want);
  free(up);
  free(gate);
}

static void check_rotary(const pair* sets, int32_t rotary_dim) {
  enum { COUNT = 6 };
  static const int32_t POSITIONS[COUNT] = {0, 1, 17, 1023, 65535, 202751};
  const int64_t half = rotary_dim / 2;
  float* cosines = poisoned_floats(COUNT * half);
  float* sines = poisoned_floats(COUNT * half);
  char where[80];
  snprintf(where, sizeof(where), "%s rotary table of %d", sets->name, (int)rotary_dim);
  glint_testing_fill_rotary(sets->tested, cosines, sines, POSITIONS, COUNT, rotary_dim, 1e6);
  for (int64_t index = 0; index < COUNT * half; ++index) {
    const double power = -2.0 * (double)(index % half) / (double)rotary_dim;
    const double angle = (double)POSITIONS[index / half] * pow(1e6, power);
    const double error = fmax(fabs((double)cosines[index] - cos(angle)), fabs((double)sines[index] - sin(angle)));
    check(error <= 2e-7, "a cosine or sine is off", where);
  }
  free(sines);
  free(cosines);
}

static void check_combine(const pair* sets, int64_t hidden) {
  enum { COUNT = 5, KEPT = 3 };
  static const int32_t EXPERTS[COUNT * KEPT] = {0, 3, 9, 1, 2, 4, 5, 6, 7, 3, 8, 9, 0, 4, 6};
  static const int32_t ROWS[COUNT * KEPT] = {14, 2, 5, 0, 1, 13, 7, 3, 4, 12, 6, 8, 11, 10, 9};
  float* routed = random_floats(COUNT * KEPT * hidden, 1.0F);
  float* shared = random_floats(COUNT * hidden, 1.0F);
  float* weights = random_floats(COUNT * KEPT, 1.0F);
  float* got = poisoned_floats(COUNT * hidden);
  double* want = malloc((size_t)(COUNT * hidden) * sizeof(double));
  for (int64_t index = 0; index < COUNT * hidden; ++index) {
    const int64_t token = index / hidden;
    want[index] = (double)shared[index];
    for (int64_t place = token * KEPT; place < (token + 1) * KEPT; ++place) {
      if (EXPERTS[place] < 3 || EXPERTS[place] >= 8) continue;
      want[index] += (double)weights[place] * (double)routed[ROWS[place] * hidden + index % hidden];
    }
  }
  const test_combine call = {got, routed, ROWS, weights, EXPERTS, shared, COUNT, hidden, KEPT, 3, 8};
  char where[80];
  snprintf(where, sizeof(where), "%s combine of width %d", sets->name, (int)hidden);
  glint_testing_combine(sets->tested, &call);
  check_last_place(got, want, COUNT * hidden, where);
  free(want);
  free(got);
  free(weights);
  free(shared);
  free(routed);
}

static void check_joined_slices(const pair* sets) {
  enum { COUNT = 9001, PARTS = 4 };
  float* parts = random_floats(PARTS * COUNT, 1.0F);
  float* want = new_floats(COUNT);
  for (int64_t index = 0; index < COUNT; ++index) {
    want[index] = (parts[index] + parts[COUNT + index]) + (parts[2 * COUNT + index] + parts[3 * COUNT + index]);
  }
  glint_testing_reduce_slices(sets->tested, parts, COUNT, PARTS, COUNT);
  check_same(parts, want, COUNT, "reduce_slices of four parts");
  for (int64_t index = 0; index < COUNT; ++index) want[index] += parts[COUNT + index];
  glint_testing_add_rows(sets->tested, parts, parts + COUNT, COUNT);
  check_same(parts, want, COUNT, "add_rows");
  free(want);
  free(parts);
}

static void check_embedding(const pair* sets) {
  enum { VOCAB = 7, WIDTH = 33, COUNT = 4 };
  static const int32_t TOKENS[COUNT] = {6, 0, 3, 3};
  uint16_t table[VOCAB * WIDTH];
  float got[COUNT * WIDTH];
  float want[COUNT * WIDTH];
  for (int index = 0; index < VOCAB * WIDTH; ++index) table[index] = (uint16_t)random_below(0x7f80);
  for (int index = 0; index < COUNT * WIDTH; ++index) {
    const uint32_t bits = (uint32_t)table[TOKENS[index / WIDTH] * WIDTH + index % WIDTH] << 16;
    memcpy(want + index, &bits, sizeof(bits));
  }
  glint_testing_embed(sets->tested, got, table, TOKENS, COUNT, WIDTH);
  check_same(got, want, COUNT * WIDTH, "embed");
}

void check_rows(const pair* sets) {
  static const int64_t WIDTHS[] = {1, 5, 33, 130, 192, 1100};
  for (size_t index = 0; index < sizeof(WIDTHS) / sizeof(WIDTHS[0]); ++index) {
    check_norm(sets, WIDTHS[index]);
    check_prepare(sets, WIDTHS[index], 1, 1);
    check_prepare(sets, WIDTHS[index], 1, 0);
    check_swiglu(sets, WIDTHS[index]);
    check_combine(sets, WIDTHS[index]);
  }
  check_prepare(sets, 192, 2, 1);
  check_prepare(sets, 1000, 8, 1);
  check_prepare(sets, 24, 3, 1);
  check_swiglu(sets, 4099);
  check_rotary(sets, 2);
  check_rotary(sets, 18);
  check_rotary(sets, 64);
  check_joined_slices(sets);
  check_embedding(sets);
}
