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

constexpr int kHopperMajor = 9;

void check_heads(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  require_argument(head_dim >= 2 && head_dim <= kMaxHeadDim && head_dim % 2 == 0, "head_dim is ", head_dim,
                   "; the CUDA attention kernels take even numbers from 2 to ", kMaxHeadDim);
  require_argument(num_kv_heads > 0 && num_heads % num_kv_heads == 0 && num_heads / num_kv_heads <= kMaxGroupHeads,
                   num_heads, " heads over ", num_kv_heads,
                   " KV heads: a KV head serves a whole number of heads, at most ", kMaxGroupHeads);
}

void check_widened(const PagePool& pages) {
  require_argument(!holds_codes(pages.element), "prefill attention reads BF16 pages; widen the E4M3 pages before it");
}

bool is_one_slab(int32_t head_dim) { return padded_head_dim(head_dim) == kSlabDims; }

void check_rotary(const RotateCall& call) {
  require_argument(call.rotary_dim >= 0 && call.rotary_dim <= call.head_dim && call.rotary_dim % 2 == 0,
                   "rotary_dim is ", call.rotary_dim, "; it is an even number up to head_dim ", call.head_dim);
  require_argument(call.query_stride % 2 == 0 && call.key_stride % 2 == 0, "query rows are ",
                   call.query_stride, " floats apart, key rows ", call.key_stride, "; both must be even");
}

void check_vectors(const RotateCall& call) {
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
void start_rotate_of(const RotateCall& call, int64_t most_thread_blocks, cudaStream_t stream) {
  const int64_t row_tasks = (call.num_heads + kHeads - 1) / kHeads + call.num_kv_heads;
  const int64_t wanted = (call.count * row_tasks + kRotateWarps - 1) / kRotateWarps;
  const auto thread_blocks = static_cast<unsigned>(std::min(wanted, most_thread_blocks));
  launch_dependent(rotate_and_store_kernel<kHeadDim, kHeads>, {thread_blocks, kRotateWarps * kWarpLanes, 0}, stream,
                   call);
}

template <int kHeadDim>
void start_rotate(const RotateCall& call, cudaStream_t stream) {
  constexpr int64_t kManyRows = 512;
  constexpr int kHeadsOfMany = 4;
  if (call.count < kManyRows) return start_rotate_of<kHeadDim, 1>(call, std::numeric_limits<int32_t>::max(), stream);
  const int64_t most = device_attribute(cudaDevAttrMultiProcessorCount) * kRotateBlocks;
  start_rotate_of<kHeadDim, kHeadsOfMany>(call, most, stream);
}

template <typename Tile, bool kIsWhole>
void start_decode(const DecodeCall& call, cudaStream_t stream) {
  start_persistent<DecodePlan<Tile>[kDecodeTeams]>(attention_decode_kernel<Tile, kIsWhole>, call,
                                                   {kTeamThreads, kDecodeTeams}, stream);
}

template <template <int> typename Tile>
void start_decode_of(const DecodeCall& call, cudaStream_t stream) {
  if (call.attend.head_dim == kMaxHeadDim) return start_decode<Tile<kMaxHeadDim>, true>(call, stream);
  if (!is_one_slab(call.attend.head_dim)) return start_decode<Tile<kMaxHeadDim>, false>(call, stream);
  start_decode<Tile<kSlabDims>, false>(call, stream);
}

template <int kPaddedDim>
void start_widen(const WidenCall& call, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(call.num_pages), static_cast<unsigned>(2 * call.num_kv_heads), 1);
  launch_dependent(widen_pages_kernel<kPaddedDim>, {grid, kWidenThreads, 0}, stream, call);
}

template <int kHeadDim, bool kIsWhole>
void start_prefill(const PrefillCall& call, cudaStream_t stream) {
  start_persistent<PrefillPlan<kHeadDim>>(attention_prefill_kernel<kHeadDim, kIsWhole>, call, kPrefillThreads, stream);
}

}

void launch_rotary_table(const RotaryTableCall& call, cudaStream_t stream) {
  constexpr int64_t kThreads = 128;
  const int64_t elements = call.count * call.rotary_dim / 2;
  if (elements == 0) return;
  rotary_table_kernel<<<static_cast<unsigned>((elements + kThreads - 1) / kThreads), kThreads, 0, stream>>>(call);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

void launch_rotate_and_store(const RotateCall& call, cudaStream_t stream) {
  check_heads(call.num_heads, call.num_kv_heads, call.head_dim);
  check_rotary(call);
  if (call.count == 0) return;
  is_one_slab(call.head_dim) ? start_rotate<kSlabDims>(call, stream) : start_rotate<kMaxHeadDim>(call, stream);
}

void launch_attention_decode(const DecodeCall& call, cudaStream_t stream) {
  check_heads(call.attend.num_heads, call.attend.num_kv_heads, call.attend.head_dim);
  if (holds_codes(call.attend.pages.element)) return start_decode_of<CodeTile>(call, stream);
  start_decode_of<Bf16Tile>(call, stream);
}

void launch_widen_pages(const WidenCall& call, cudaStream_t stream) {
  require_argument(holds_codes(call.codes.element) && !holds_codes(call.widened.element),
                   "pages are widened from E4M3 to BF16 pages only; give the pool of codes and the widened one");
  if (call.num_pages == 0) return;
  is_one_slab(call.head_dim) ? start_widen<kSlabDims>(call, stream) : start_widen<kMaxHeadDim>(call, stream);
}

void launch_attention_step(const AttentionStepCall& call, cudaStream_t stream) {
  const AttendCall& attend = call.attend;
  check_rotary(call.rotate);
  require_argument(attend.pages.element == PageElement::kBf16 && call.rotate.pages.element == PageElement::kBf16,
                   "the attention of a whole step keeps keys and values in BF16; launch its parts one by one");
  require_argument(
      fits_attention_step(attend.num_heads, attend.num_kv_heads, attend.head_dim, call.rotate.rotary_dim),
      attend.num_heads, " heads over ", attend.num_kv_heads, " KV heads of ", attend.head_dim, ", ",
      call.rotate.rotary_dim, " of them rotated, do not fit the attention of a whole step; launch its parts one by one");
  check_vectors(call.rotate);
  start_persistent<StepPlan[kDecodeTeams]>(attention_step_kernel, call, {kTeamThreads, kDecodeTeams}, stream);
}

void launch_attention_prefill_portable(const PrefillCall& call, cudaStream_t stream) {
  check_heads(call.attend.num_heads, call.attend.num_kv_heads, call.attend.head_dim);
  check_widened(call.attend.pages);
  if (call.attend.head_dim == kMaxHeadDim) return start_prefill<kMaxHeadDim, true>(call, stream);
  if (!is_one_slab(call.attend.head_dim)) return start_prefill<kMaxHeadDim, false>(call, stream);
  start_prefill<kSlabDims, false>(call, stream);
}

void launch_attention_prefill(const PrefillCall& call, cudaStream_t stream) {
  check_heads(call.attend.num_heads, call.attend.num_kv_heads, call.attend.head_dim);
  check_widened(call.attend.pages);
  const bool is_hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == kHopperMajor;
  if (is_hopper && call.attend.head_dim == kMaxHeadDim) return launch_attention_prefill_hopper(call, stream);
  launch_attention_prefill_portable(call, stream);
}

}
