#if defined(GLINT_X86)
#include <cpuid.h>
#endif

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/fp8.h"
#include "base/memory.h"
#include "cpu/operations.h"
#include "include/glint.h"
#include "testing/cases.h"
#include "testing/guarded.h"

namespace {

using glint::Buffer;
using glint::cpu::Workers;
using glint::testing::guarded;
using glint::testing::last_error;
using glint::testing::TestGemm;
using glint::testing::TestOperand;
using glint::testing::TestPages;
using glint::testing::TestRotation;
using glint::testing::TestRounding;

struct TestShape {
  int64_t max_cols;
  int64_t group_heads;
  int64_t head_dim;
  int64_t page_tokens;
};

glint::cpu::PageLayout layout_of(const TestPages& pages) {
  return {.data = pages.data,
          .num_pages = pages.num_pages,
          .page_tokens = pages.page_tokens,
          .num_kv_heads = pages.num_kv_heads,
          .head_dim = pages.head_dim,
          .dtype = pages.dtype,
          .rounds_to_e4m3 = pages.rounding != TestRounding::kNone};
}

glint::cpu::HeadShape heads_of(const TestPages& pages) {
  return {pages.num_heads, pages.num_kv_heads, pages.head_dim, pages.rotary_dim};
}

struct TestCombine {
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
};

struct Operand {
  Buffer<std::byte> data;
  Buffer<float> scales;
  int64_t stride;
  int64_t groups;
};

Operand prepare(Workers& workers, const TestOperand& source) {
  const int64_t stride = glint::cpu::operand_stride(source.width, source.row_slices);
  const auto bytes = static_cast<uint64_t>(source.count * stride * glint::cpu::kOperandElementBytes);
  const int64_t groups = glint::cpu::num_input_groups(source.width / source.row_slices, source.group_size);
  Operand operand{Buffer<std::byte>(bytes),
                  Buffer<float>(static_cast<uint64_t>(source.count * source.row_slices * groups)), stride, groups};
  std::fill_n(operand.data.data(), bytes, std::byte{0xff});
  const glint::cpu::OperandBuffer buffer{operand.data.data(), operand.scales.data()};
  if (source.has_fp8 != 0) {
    glint::cpu::prepare_fp8(workers, buffer, source.in, source.count, source.width, source.row_slices,
                            source.group_size);
  } else {
    glint::cpu::prepare_floats(workers, buffer, source.in, source.count, source.width, source.row_slices);
  }
  return operand;
}

float operand_value(const Workers& workers, const Operand& operand, int64_t index, bool has_fp8) {
  if (has_fp8 && workers.kernels().fp8_form == glint::OperandForm::kBf16) {
    return glint::float_from_bf16(reinterpret_cast<const uint16_t*>(operand.data.data())[index]);
  }
  return reinterpret_cast<const float*>(operand.data.data())[index];
}

glint::Weight weight_of(const TestGemm& gemm) {
  const glint::Weight whole{.data = gemm.weight,
                            .scales = gemm.scales,
                            .rows = gemm.weight_rows,
                            .cols = gemm.weight_cols,
                            .stride = gemm.weight_cols,
                            .row_first = 0,
                            .col_first = 0,
                            .scale_stride = (gemm.weight_cols + glint::kScaleTile - 1) / glint::kScaleTile,
                            .dtype = gemm.dtype,
                            .scale_kind = gemm.scale_kind};
  return whole.row_slice(gemm.row_first, gemm.row_count).col_slice(gemm.col_first, gemm.col_count);
}

uint32_t upper_halves_in_use() {
#if defined(GLINT_X86)
  constexpr uint32_t kKnowsStatesInUse = 1U << 2U;
  constexpr uint32_t kUpperHalvesOfAvx = 1U << 2U;
  constexpr uint32_t kUpperHalvesOfAvx512 = 1U << 6U;
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (__get_cpuid_count(13, 1, &eax, &ebx, &ecx, &edx) == 0 || (eax & kKnowsStatesInUse) == 0) return 0;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(1));
  return eax & (kUpperHalvesOfAvx | kUpperHalvesOfAvx512);
#else
  return 0;
#endif
}

void run_gemms(Workers& workers, std::span<const TestGemm> gemms) {
  std::vector<Operand> operands;
  std::vector<glint::cpu::GemmCall> calls;
  for (const TestGemm& gemm : gemms) {
    const bool has_fp8 = gemm.dtype == GLINT_DTYPE_F8_E4M3;
    operands.push_back(prepare(workers, {.out = nullptr,
                                         .scales = nullptr,
                                         .in = gemm.in,
                                         .count = gemm.input_count,
                                         .width = gemm.col_count,
                                         .row_slices = 1,
                                         .has_fp8 = has_fp8 ? 1 : 0,
                                         .group_size = gemm.group_size}));
    const Operand& operand = operands.back();
    calls.push_back(
        {.out = gemm.out,
         .out_stride = gemm.out_stride,
         .input = {operand.data.data(), has_fp8 ? operand.scales.data() : nullptr, operand.stride, operand.groups},
         .input_rows = gemm.input_rows,
         .count = gemm.count,
         .weight = weight_of(gemm),
         .bias = gemm.bias});
  }
  glint::cpu::gemm(workers, calls);
}

}

extern "C" {

GLINT_API const char* glint_testing_operations_error(void) { return last_error.c_str(); }

GLINT_API Workers* glint_testing_backend_new(int32_t kernels, int32_t num_threads, const TestShape* shape) {
  std::unique_ptr<Workers> workers;
  guarded([&] {
    workers = std::make_unique<Workers>(glint::cpu::WorkerOptions{.num_threads = num_threads,
                                                                  .kernels = kernels,
                                                                  .max_gemm_calls = 64,
                                                                  .max_step_items = 64,
                                                                  .vocab_size = 64,
                                                                  .max_cols = shape->max_cols,
                                                                  .group_heads = shape->group_heads,
                                                                  .head_dim = shape->head_dim,
                                                                  .page_tokens = shape->page_tokens});
  });
  return workers.release();
}

GLINT_API void glint_testing_backend_free(Workers* workers) { delete workers; }

GLINT_API const char* glint_testing_backend_kernels(Workers* workers) { return workers->kernels().name; }

GLINT_API void glint_testing_e4m3_from_float(uint8_t* out, const float* in, int64_t count) {
  std::transform(in, in + count, out, glint::e4m3_from_float);
}

GLINT_API void glint_testing_float_from_e4m3(float* out, const uint8_t* in, int64_t count) {
  std::transform(in, in + count, out, glint::float_from_e4m3);
}

GLINT_API void glint_testing_bf16_from_float(uint16_t* out, const float* in, int64_t count) {
  std::transform(in, in + count, out, glint::bf16_from_float);
}

GLINT_API void glint_testing_float_from_bf16(float* out, const uint16_t* in, int64_t count) {
  std::transform(in, in + count, out, glint::float_from_bf16);
}

GLINT_API void glint_testing_embed(Workers* workers, float* out, const uint16_t* table, const int32_t* tokens,
                                   int64_t count, int64_t width) {
  const glint::Weight weight{.data = reinterpret_cast<const std::byte*>(table),
                             .scales = nullptr,
                             .rows = 0,
                             .cols = width,
                             .stride = width,
                             .row_first = 0,
                             .col_first = 0,
                             .scale_stride = 0,
                             .dtype = GLINT_DTYPE_BF16,
                             .scale_kind = GLINT_SCALE_NONE};
  glint::cpu::embed(*workers, out, weight, {tokens, static_cast<size_t>(count)});
}

GLINT_API void glint_testing_rms_norm(Workers* workers, float* out, const float* in, const float* weight, int64_t count,
                                      int64_t width, double epsilon) {
  glint::cpu::rms_norm(*workers, out, in, weight, count, width, epsilon);
}

GLINT_API int64_t glint_testing_operand_stride(Workers*, int64_t width, int32_t row_slices) {
  return glint::cpu::operand_stride(width, row_slices);
}

GLINT_API void glint_testing_prepare(Workers* workers, const TestOperand* source) {
  const Operand operand = prepare(*workers, *source);
  const bool has_fp8 = source->has_fp8 != 0;
  for (int64_t index = 0; index < source->count * operand.stride; ++index) {
    source->out[index] = operand_value(*workers, operand, index, has_fp8);
  }
  if (has_fp8) std::ranges::copy(operand.scales.span(), source->scales);
}

GLINT_API int32_t glint_testing_gemms(Workers* workers, const TestGemm* gemms, int32_t count) {
  return guarded([&] { run_gemms(*workers, {gemms, static_cast<size_t>(count)}); });
}

GLINT_API int32_t glint_testing_upper_halves_after_gemms(Workers* workers, const TestGemm* gemms, int32_t count,
                                                         uint32_t* in_use) {
  return guarded([&] {
    run_gemms(*workers, {gemms, static_cast<size_t>(count)});
    *in_use = upper_halves_in_use();
  });
}

GLINT_API void glint_testing_fill_rotary(Workers* workers, float* cosines, float* sines, const int32_t* positions,
                                         int64_t count, int64_t rotary_dim, double theta) {
  glint::cpu::fill_rotary(*workers, cosines, sines, {positions, static_cast<size_t>(count)}, rotary_dim, theta);
}

GLINT_API void glint_testing_rope_and_cache(Workers* workers, const TestRotation* rotation, const TestPages* pages) {
  glint::cpu::rope_and_cache(*workers,
                             {.query = rotation->query,
                              .key = rotation->key,
                              .value = rotation->value,
                              .query_norm = rotation->query_norm,
                              .key_norm = rotation->key_norm,
                              .cosines = rotation->cosines,
                              .sines = rotation->sines,
                              .heads = heads_of(*pages),
                              .norm_epsilon = rotation->norm_epsilon},
                             layout_of(*pages), pages->layer, pages->request_span());
}

GLINT_API void glint_testing_attend(Workers* workers, float* out, const float* query, const TestPages* pages) {
  glint::cpu::attention(*workers, out, query, layout_of(*pages), pages->layer, pages->request_span(), heads_of(*pages));
}

GLINT_API void glint_testing_swiglu(Workers* workers, float* out, const float* gate, const float* up, int64_t count) {
  glint::cpu::swiglu(*workers, out, gate, up, count);
}

GLINT_API int32_t glint_testing_route(Workers* workers, int32_t* experts, float* weights, const float* logits,
                                      const float* bias, int64_t count, const glint_model* model) {
  return guarded([&] {
    glint::cpu::route(
        *workers,
        {.experts = experts, .weights = weights, .logits = logits, .bias = bias, .count = count, .model = model});
  });
}

GLINT_API void glint_testing_combine(Workers* workers, const TestCombine* call) {
  glint::cpu::combine(*workers, {.out = call->out,
                                 .routed = call->routed,
                                 .routed_rows = call->routed_rows,
                                 .weights = call->weights,
                                 .experts = call->experts,
                                 .shared = call->shared,
                                 .count = call->count,
                                 .hidden_size = call->hidden_size,
                                 .experts_per_token = call->experts_per_token,
                                 .expert_first = call->expert_first,
                                 .expert_last = call->expert_last});
}

GLINT_API void glint_testing_reduce_slices(Workers* workers, float* parts, int64_t part_stride, int32_t num_parts,
                                           int64_t count) {
  glint::cpu::reduce_slices(*workers, parts, part_stride, num_parts, count);
}

GLINT_API void glint_testing_add_rows(Workers* workers, float* hidden, const float* update, int64_t count) {
  glint::cpu::add_rows(*workers, hidden, update, count);
}

GLINT_API void glint_testing_gather_rows(Workers* workers, float* out, const float* in, const int32_t* rows,
                                         int64_t count, int64_t width) {
  glint::cpu::gather_rows(*workers, out, in, {rows, static_cast<size_t>(count)}, width);
}
}
