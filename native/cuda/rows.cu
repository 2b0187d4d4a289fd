#include "cuda/rows.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/kernels/rows.cuh"

namespace glint::cuda {

namespace {

template <int kVectors, int kParts>
void start_norm(const NormCall& call, cudaStream_t stream) {
  const auto thread_blocks = static_cast<unsigned>(call.count);
  launch_dependent(norm_kernel<kVectors, kParts>, {thread_blocks, kRowThreads, 0}, stream, call);
}

template <int kVectors>
void choose_parts(const NormCall& call, cudaStream_t stream) {
  switch (call.num_parts) {
    case 0:
      return start_norm<kVectors, 0>(call, stream);
    case 1:
      return start_norm<kVectors, 1>(call, stream);
    case 2:
      return start_norm<kVectors, 2>(call, stream);
    case 4:
      return start_norm<kVectors, 4>(call, stream);
    case kMaxParts:
      return start_norm<kVectors, kMaxParts>(call, stream);
    default:
      require_argument(false, "a norm joins ", call.num_parts, " parts; it joins 0, 1, 2, 4 or ", kMaxParts);
  }
}

}

void launch_norm(const NormCall& call, cudaStream_t stream) {
  constexpr int64_t kTileFloats = kRowThreads * kVectorFloats;
  if (call.count == 0) return;
  require_argument(call.width <= 8 * kTileFloats, "a norm is ", call.width, " wide; at most ", 8 * kTileFloats);
  if (call.width <= kTileFloats) return choose_parts<1>(call, stream);
  if (call.width <= 5 * kTileFloats) return choose_parts<5>(call, stream);
  choose_parts<8>(call, stream);
}

void launch_embed(const EmbedCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  require_argument(call.sampled == nullptr || call.vocab_size > 0, "tokens are taken from a sampler of ",
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
