#include "cpu/workers.h"

#include <algorithm>
#include <utility>

#include "base/contract.h"
#include "cpu/machine.h"

namespace glint {

namespace {

std::vector<const KernelSet*> kernels_by_speed() {
#if defined(GLINT_X86)
  std::vector<const KernelSet*> sets{&amx_kernels(),  &avx512_bf16_kernels(), &avx512_kernels(),
                                     &avx2_kernels(), &plain_kernels(),       &exact_kernels()};
  if (!prefers_bf16_dots()) std::swap(sets[1], sets[2]);
  return sets;
#else
  return {&neon_bf16_kernels(), &neon_kernels(), &plain_kernels(), &exact_kernels()};
#endif
}

int64_t scratch_bytes_per_thread(const cpu::WorkerOptions& options) {
  constexpr int64_t kPageBytes = 4096;
  const int64_t queries = cpu::query_rows_per_tile(options.group_heads) * options.group_heads;
  const int64_t bytes = std::max(gemm_scratch_bytes(options.max_cols),
                                 attention_scratch_bytes(queries, options.head_dim, options.page_tokens));
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}

const KernelSet& choose_kernels(int32_t requested) {
  require_argument(requested >= GLINT_KERNELS_AUTO && requested <= GLINT_KERNELS_NEON_BF16, "options.kernels is ",
                   requested, ", which names no kernels");
  for (const KernelSet* kernels : kernels_by_speed()) {
    const bool is_wanted = requested == GLINT_KERNELS_AUTO || requested == kernels->id;
    if (is_wanted && processor_runs(kernels->id)) return *kernels;
  }
  throw Failure(GLINT_STATUS_UNSUPPORTED, text("kernels ", requested, " need instructions that this processor or this ",
                                               "build does not have; use kernels auto"));
}

int64_t gemm_scratch_bytes(int64_t max_cols) {
  return std::max(kLeastGemmScratch, (max_cols + 2 * kOperandAlignment) * kScratchBytesPerColumn);
}

int64_t attention_scratch_bytes(int64_t queries, int64_t head_dim, int64_t page_tokens) {
  const int64_t slab_tokens = (page_tokens + kOperandAlignment - 1) / kOperandAlignment * kOperandAlignment;
  const int64_t floats = queries * (kSplitPositions + kOperandAlignment + 4 * head_dim + 4) + slab_tokens * head_dim;
  return (floats + 16 * kOperandAlignment) * static_cast<int64_t>(sizeof(float));
}

namespace cpu {

int64_t query_rows_per_tile(int64_t group_heads) { return std::max<int64_t>(1, kMaxQueriesPerTile / group_heads); }

uint64_t Workers::bytes_for(const WorkerOptions& options) {
  const uint64_t bytes_per_thread =
      static_cast<uint64_t>(scratch_bytes_per_thread(options)) + SamplerScratch::bytes_for(options.vocab_size);
  return bytes_per_thread * static_cast<uint64_t>(options.num_threads);
}

Workers::Workers(const WorkerOptions& options)
    : kernels_(choose_kernels(options.kernels)),
      scratch_bytes_(scratch_bytes_per_thread(options)),
      scratch_(static_cast<uint64_t>(scratch_bytes_) * static_cast<uint64_t>(options.num_threads)),
      packed_calls_(static_cast<size_t>(options.num_threads)),
      team_(options.num_threads) {
  samplers_.reserve(static_cast<size_t>(options.num_threads));
  for (int thread = 0; thread < options.num_threads; ++thread) samplers_.emplace_back(options.vocab_size);
  task_ends_.reserve(static_cast<size_t>(std::max(options.max_gemm_calls, options.max_step_items)));
}

}

}
