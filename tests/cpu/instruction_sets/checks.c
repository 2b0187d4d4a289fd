#define _GNU_SOURCE
#include "checks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SHOWN_FAILURES = 40 };

static uint64_t random_state = 0x9E3779B97F4A7C15U;
static int64_t checks_made;
static int64_t failures;

workers* open_workers(int32_t kernels, int32_t num_threads) {
  const test_shape shape = {.max_cols = 8192, .group_heads = 16, .head_dim = 128, .page_tokens = 16};
  workers* opened = glint_testing_backend_new(kernels, num_threads, &shape);
  if (opened != NULL) return opened;
  fprintf(stderr, "kernels %d: %s\n", (int)kernels, glint_testing_operations_error());
  exit(1);
}

static size_t whole_pages(size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

void* guarded_memory(size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  const size_t whole = whole_pages(bytes);
  char* start = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(start + whole, page, PROT_NONE) != 0) {
    perror("mmap");
    exit(1);
  }
  return start + (whole - bytes);
}

void free_guarded(void* memory, size_t bytes) {
  const size_t whole = whole_pages(bytes);
  char* start = (char*)memory - (whole - bytes);
  if (munmap(start, whole + (size_t)sysconf(_SC_PAGESIZE)) == 0) return;
  perror("munmap");
  exit(1);
}

float* new_floats(int64_t count) {
  float* values = malloc((size_t)count * sizeof(float));
  if (values != NULL) return values;
  perror("malloc");
  exit(1);
}

float* poisoned_floats(int64_t count) {
  float* values = new_floats(count);
  for (int64_t index = 0; index < count; ++index) values[index] = NAN;
  return values;
}

static uint32_t random_bits(void) {
  random_state = random_state * 6364136223846793005U + 1442695040888963407U;
  return (uint32_t)(random_state >> 32);
}

uint32_t random_below(uint32_t limit) { return (uint32_t)((uint64_t)random_bits() * limit >> 32); }

float random_float(void) {
  float sum = 0.0F;
  for (int part = 0; part < 4; ++part) sum += (float)(random_bits() >> 8) * 0x1p-24F;
  return (sum - 2.0F) * 1.7320508F;
}

float* random_floats(int64_t count, float spread) {
  float* values = new_floats(count);
  for (int64_t index = 0; index < count; ++index) values[index] = random_float() * spread;
  return values;
}

float* uneven_rows(int64_t count, int64_t width) {
  float* values = new_floats(count * width);
  for (int64_t row = 0; row < count; ++row) {
    const float size = exp2f(4.0F * random_float());
    for (int64_t col = 0; col < width; ++col) values[row * width + col] = random_float() * size;
  }
  return values;
}

void check(int passed, const char* what, const char* where) {
  checks_made += 1;
  if (passed) return;
  failures += 1;
  if (failures <= SHOWN_FAILURES) fprintf(stderr, "FAILED %s: %s\n", where, what);
}

static void check_element(int passed, int64_t index, double got, double want, const char* where) {
  char what[120];
  if (!passed) snprintf(what, sizeof(what), "element %lld is %.9g instead of %.9g", (long long)index, got, want);
  check(passed, what, where);
}

void check_same(const float* got, const float* want, int64_t count, const char* where) {
  for (int64_t index = 0; index < count; ++index) {
    const int is_same = memcmp(got + index, want + index, sizeof(float)) == 0;
    check_element(is_same, index, (double)got[index], (double)want[index], where);
  }
}

void check_near(const float* got, const float* want, const float* magnitude, double bound, int64_t count,
                const char* where) {
  for (int64_t index = 0; index < count; ++index) {
    const double error = fabs((double)got[index] - (double)want[index]);
    const double allowed = bound * fabs((double)magnitude[index]) + 1e-30;
    check_element(error <= allowed, index, (double)got[index], (double)want[index], where);
  }
}

void check_last_place(const float* got, const double* want, int64_t count, const char* where) {
  for (int64_t index = 0; index < count; ++index) {
    const float rounded = (float)want[index];
    const double step = (double)(nextafterf(fabsf(rounded), INFINITY) - fabsf(rounded));
    check_element(fabs((double)got[index] - want[index]) <= step, index, (double)got[index], want[index], where);
  }
}

int64_t num_checks(void) { return checks_made; }

int64_t num_failures(void) { return failures; }
