#include "cuda/kernels/sampling/sampling.h"

#include "cuda/check.h"
#include "cuda/kernels/sampling/sample.cuh"

namespace glint::cuda {

void launch_sample_rows(const SampleCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  const int slice_bytes = slice_tokens(call.vocab_size) * static_cast<int>(sizeof(float));
  const int shared_bytes = (call.has_penalties ? 2 : 1) * slice_bytes;
  const int room_bytes = kSharedLimitBytes - static_cast<int>(sizeof(SamplePlan));
  require_argument(2 * slice_bytes <= room_bytes, "the vocabulary has ", call.vocab_size,
                   " tokens; the CUDA sampler holds at most ",
                   room_bytes / 2 / static_cast<int>(sizeof(float)) * kSampleRanks);
  GLINT_CHECK_CUDA(
      cudaFuncSetAttribute(sample_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * slice_bytes));
  const auto thread_blocks = static_cast<unsigned>(call.count * kSampleRanks);
  sample_rows_kernel<<<thread_blocks, kSampleThreads, static_cast<size_t>(shared_bytes), stream>>>(call);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

}
