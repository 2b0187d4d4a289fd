#include <stdio.h>
#include <string.h>

#include "checks.h"

static int32_t kernels_of(const char* name) {
  static const struct {
    const char* name;
    int32_t kernels;
  } known[] = {
      {"plain", GLINT_KERNELS_PLAIN}, {"neon", GLINT_KERNELS_NEON},     {"neon_bf16", GLINT_KERNELS_NEON_BF16},
      {"avx2", GLINT_KERNELS_AVX2},   {"avx512", GLINT_KERNELS_AVX512}, {"avx512_bf16", GLINT_KERNELS_AVX512_BF16},
      {"amx", GLINT_KERNELS_AMX}};
  for (size_t index = 0; index < sizeof(known) / sizeof(known[0]); ++index) {
    if (strcmp(name, known[index].name) == 0) return known[index].kernels;
  }
  return GLINT_KERNELS_AUTO;
}

static void finish_part(const char* name, const char* part, int64_t* made_before) {
  printf("%-11s %-10s %9lld comparisons\n", name, part, (long long)(num_checks() - *made_before));
  fflush(stdout);
  *made_before = num_checks();
}

int main(int argc, char** argv) {
  if (argc != 3 || kernels_of(argv[1]) == GLINT_KERNELS_AUTO) {
    fprintf(stderr, "usage: instruction_sets plain|neon|neon_bf16|avx2|avx512|avx512_bf16|amx MODEL_FILE\n");
    return 2;
  }
  const int32_t kernels = kernels_of(argv[1]);
  const pair sets = {argv[1], kernels, open_workers(GLINT_KERNELS_EXACT, 1), open_workers(kernels, 1)};
  int64_t made_before = 0;
  check(strcmp(glint_testing_backend_kernels(sets.tested), argv[1]) == 0, "another kernel set computes", argv[1]);
  check_rows(&sets);
  finish_part(argv[1], "rows", &made_before);
  check_gemms(&sets);
  finish_part(argv[1], "GEMMs", &made_before);
  check_attention(&sets);
  finish_part(argv[1], "attention", &made_before);
  check_model(&sets, argv[2]);
  finish_part(argv[1], "model", &made_before);
  glint_testing_backend_free(sets.tested);
  glint_testing_backend_free(sets.exact);
  if (num_failures() != 0) fprintf(stderr, "%s: %lld failures\n", argv[1], (long long)num_failures());
  return num_failures() == 0 ? 0 : 1;
}
