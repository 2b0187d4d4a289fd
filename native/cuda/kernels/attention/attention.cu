#include "cuda/kernels/attention/attention.h"

#include <algorithm>
#include <limits>

#include "cuda/check.h"
#include "cuda/kernels/attention/attention_step.cuh"
#include "cuda/kernels/attention/attention_prefill.cuh"
#include "cuda/kernels/attention/dequantise_kv.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

void check_heads(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  require_argument(head_dim >= 2 && head_dim <= kMaxHeadDim && head_dim % 2 == 0, "head_dim is ", head_dim,
                   "; the CUDA attention kernels take even numbers from 2 to ", kMaxHeadDim);
  require_argument(num_kv_heads > 0 && num_heads % num_kv_heads == 0 && num_heads / num_kv_heads <= kMaxGroupHeads,
                   num_heads, " heads over ", num_kv_heads,
                   " KV heads: a KV head serves a whole number of heads, at most ", kMaxGroupHeads);
}

void check_bf16_pages(const KvPages& pages) {
  require_argument(!holds_fp8(pages.element),
                   "prefill attention reads BF16 pages; dequantise the E4M3 pages before it");
}

bool is_one_slab(int32_t head_dim) { return padded_head_dim(head_dim) == kSlabDims; }

void check_rotary(const RopeCall& call) {
  require_argument(call.rotary_dim >= 0 && call.rotary_dim <= call.head_dim && call.rotary_dim % 2 == 0,
                   "rotary_dim is ", call.rotary_dim, "; it is an even number up to head_dim ", call.head_dim);
  require_argument(call.query_stride % 2 == 0 && call.key_stride % 2 == 0, "query rows are ", call.query_stride,
                   " floats apart, key rows ", call.key_stride, "; both must be even");
}

void check_vectors(const RopeCall& call) {
  constexpr uintptr_t kVectorBytes = 16;
  require_argument(call.query_stride % 4 == 0 && call.key_stride % 4 == 0, "query rows are ", call.query_stride,
                   " floats apart, key rows ", call.key_stride,
                   "; the attention of a whole step reads them as vectors of 4, launch its parts one by one");
  for (const float* rows :
       {call.query, call.key, call.value, call.query_norm, call.key_norm, call.cosines, call.sines}) {
    require_argument(reinterpret_cast<uintptr_t>(rows) % kVectorBytes == 0,
                     "rows of the attention of a whole step start at address ", reinterpret_cast<uintptr_t>(rows),
                     "; let them start at a multiple of ", kVectorBytes);
  }
}

template <int kHeadDim, int kHeads>
void start_rope_of(const RopeCall& call, int64_t most_thread_blocks, cudaStream_t stream) {
  const int64_t row_tasks = (call.num_heads + kHeads - 1) / kHeads + call.num_kv_heads;
  const int64_t wanted = (call.count * row_tasks + kRopeWarps - 1) / kRopeWarps;
  const auto thread_blocks = static_cast<unsigned>(std::min(wanted, most_thread_blocks));
  launch_dependent(rope_and_cache_kernel<kHeadDim, kHeads>, {thread_blocks, kRopeWarps * kWarpLanes, 0}, stream, call);
}

template <int kHeadDim>
void start_rope(const RopeCall& call, cudaStream_t stream) {
  constexpr int64_t kManyRows = 512;
  constexpr int kHeadsOfMany = 4;
  if (call.count < kManyRows) return start_rope_of<kHeadDim, 1>(call, std::numeric_limits<int32_t>::max(), stream);
  const int64_t most = device_attribute(cudaDevAttrMultiProcessorCount) * kRopeBlocks;
  start_rope_of<kHeadDim, kHeadsOfMany>(call, most, stream);
}

template <typename Tile, bool kIsWhole>
void start_decode(const DecodeCall& call, cudaStream_t stream) {
  start_persistent<DecodeStorage<Tile>[kDecodeWarpGroups]>(attention_decode_kernel<Tile, kIsWhole>, call,
                                                           {kWarpGroupThreads, kDecodeWarpGroups}, stream);
}

template <template <int> typename Tile>
void start_decode_of(const DecodeCall& call, cudaStream_t stream) {
  if (call.attend.head_dim == kMaxHeadDim) return start_decode<Tile<kMaxHeadDim>, true>(call, stream);
  if (!is_one_slab(call.attend.head_dim)) return start_decode<Tile<kMaxHeadDim>, false>(call, stream);
  start_decode<Tile<kSlabDims>, false>(call, stream);
}

template <bool kHasOneKvHead>
void start_step(const StepCall& call, cudaStream_t stream) {
  start_persistent<StepStorage[kDecodeWarpGroups]>(attention_step_kernel<kHasOneKvHead>, call,
                                                   {kWarpGroupThreads, kDecodeWarpGroups}, stream);
}

template <int kPaddedDim>
void start_dequantise(const DequantiseKvCall& call, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(call.num_pages), static_cast<unsigned>(2 * call.num_kv_heads), 1);
  launch_dependent(dequantise_kv_kernel<kPaddedDim>, {grid, kDequantiseThreads, 0}, stream, call);
}

template <int kHeadDim, bool kIsWhole>
void start_prefill(const PrefillCall& call, cudaStream_t stream) {
  start_persistent<PrefillStorage<kHeadDim>>(attention_prefill_kernel<kHeadDim, kIsWhole>, call, kPrefillThreads,
                                             stream);
}

}

void launch_rotary_table(const RotaryTableCall& call, cudaStream_t stream) {
  constexpr int64_t kThreads = 128;
  const int64_t elements = call.count * call.rotary_dim / 2;
  if (elements == 0) return;
  rotary_table_kernel<<<static_cast<unsigned>((elements + kThreads - 1) / kThreads), kThreads, 0, stream>>>(call);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

void launch_rope_and_cache(const RopeCall& call, cudaStream_t stream) {
  check_heads(call.num_heads, call.num_kv_heads, call.head_dim);
  check_rotary(call);
  if (call.count == 0) return;
  is_one_slab(call.head_dim) ? start_rope<kSlabDims>(call, stream) : start_rope<kMaxHeadDim>(call, stream);
}

void launch_attention_decode(const DecodeCall& call, cudaStream_t stream) {
  check_heads(call.attend.num_heads, call.attend.num_kv_heads, call.attend.head_dim);
  if (holds_fp8(call.attend.pages.element)) return start_decode_of<Fp8Tile>(call, stream);
  start_decode_of<Bf16Tile>(call, stream);
}

void launch_dequantise_kv(const DequantiseKvCall& call, cudaStream_t stream) {
  require_argument(holds_fp8(call.fp8.element) && !holds_fp8(call.bf16.element),
                   "E4M3 pages are dequantised to BF16 pages; give E4M3 pages as fp8 and BF16 pages as bf16");
  if (call.num_pages == 0) return;
  is_one_slab(call.head_dim) ? start_dequantise<kSlabDims>(call, stream) : start_dequantise<kMaxHeadDim>(call, stream);
}

void launch_attention_step(const AttentionStepCall& call, cudaStream_t stream) {
  const AttendCall& attend = call.attend;
  check_rotary(call.rope);
  require_argument(attend.pages.element == PageElement::kBf16 && call.rope.pages.element == PageElement::kBf16,
                   "the attention of a whole step keeps keys and values in BF16; launch its parts one by one");
  require_argument(fits_attention_step(attend.num_heads, attend.num_kv_heads, attend.head_dim, call.rope.rotary_dim),
                   attend.num_heads, " heads over ", attend.num_kv_heads, " KV heads of ", attend.head_dim, ", ",
                   call.rope.rotary_dim,
                   " of them rotated, do not fit the attention of a whole step; launch its parts one by one");
  check_vectors(call.rope);
  const StepCall step{call, attend.num_heads / attend.num_kv_heads};
  attention_step_quantises(attend.num_kv_heads) ? start_step<true>(step, stream) : start_step<false>(step, stream);
}

void launch_attention_prefill(const PrefillCall& call, cudaStream_t stream) {
  check_heads(call.attend.num_heads, call.attend.num_kv_heads, call.attend.head_dim);
  check_bf16_pages(call.attend.pages);
  const bool is_whole = call.attend.head_dim == kMaxHeadDim;
  const bool is_hopper = is_whole && call.kernels == GLINT_KERNELS_HOPPER && !call.hides_earlier;
  if (is_hopper) return launch_attention_prefill_hopper(call, stream);
  if (is_whole) return start_prefill<kMaxHeadDim, true>(call, stream);
  if (!is_one_slab(call.attend.head_dim)) return start_prefill<kMaxHeadDim, false>(call, stream);
  start_prefill<kSlabDims, false>(call, stream);
}

}
