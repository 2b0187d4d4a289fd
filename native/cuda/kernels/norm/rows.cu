#include "cuda/kernels/norm/rows.h"

#include <algorithm>

#include "cuda/kernels/norm/norm.cuh"
#include "cuda/kernels/norm/rows.cuh"
#include "cuda/launch.h"
#include "cuda/kernels/norm/norm_choice.h"

namespace glint::cuda {

void launch_norm(const NormCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  const LaunchShape shape = {static_cast<unsigned>(call.count), kRowThreads, 0};
  const auto start_whole = [&](auto vectors) {
    launch_dependent(whole_norm_kernel<decltype(vectors)::value>, shape, stream, call);
  };
  const bool has_vectors = call.num_parts == 1 && call.weight != nullptr && call.code_stride % kVectorFloats == 0;
  if (has_vectors && with_whole_vectors(call.width, start_whole)) return;
  with_norm_vectors(call.width, [&](auto vectors) {
    with_room_for(call.num_parts, [&](auto room) {
      launch_dependent(norm_kernel<decltype(vectors)::value, decltype(room)::value>, shape, stream, call);
    });
  });
}

void launch_embed(const EmbedCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  require_argument(call.sampled_rows == nullptr || (call.sampled != nullptr && call.vocab_size > 0), "tokens are taken from a sampler of ",
                   call.vocab_size, " tokens; give the size of the vocabulary");
  launch_dependent(embed_kernel, {static_cast<unsigned>(call.count), kRowThreads, 0}, stream, call);
}

void launch_add_rows(float* hidden, const float* update, int64_t count, cudaStream_t stream) {
  constexpr int64_t kMaxThreadBlocks = 1056;
  if (count == 0) return;
  const int64_t wanted = (count + kRowThreads * kVectorFloats - 1) / (kRowThreads * kVectorFloats);
  const auto thread_blocks = static_cast<unsigned>(std::min(wanted, kMaxThreadBlocks));
  launch_dependent(add_rows_kernel, {thread_blocks, kRowThreads, 0}, stream, hidden, update, count);
}

void launch_gather_rows(const GatherCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  launch_dependent(gather_rows_kernel, {static_cast<unsigned>(call.count), kRowThreads, 0}, stream, call);
}

}
