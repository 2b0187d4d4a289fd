#include "cuda/attention.h"

#include "cuda/check.h"
#include "cuda/kernels/attention_decode.cuh"
#include "cuda/kernels/attention_prefill.cuh"
#include "cuda/kernels/rotate.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

constexpr int32_t kLargeHeadDim = 128;
constexpr int32_t kSmallHeadDim = 64;
constexpr int kHopperMajor = 9;

void check_heads(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  require_argument(head_dim == kLargeHeadDim || head_dim == kSmallHeadDim, "head_dim is ", head_dim,
                   "; the CUDA attention kernels are built for ", kSmallHeadDim, " and ", kLargeHeadDim);
  require_argument(num_heads % num_kv_heads == 0 && num_heads / num_kv_heads <= kMaxGroupHeads, num_heads,
                   " heads over ", num_kv_heads, " KV heads: a KV head serves a whole number of heads, at most ",
                   kMaxGroupHeads);
}

template <int kHeadDim>
void start_rotate(const RotateCall& call, cudaStream_t stream) {
  const int64_t tasks = call.count * (call.num_heads + 2 * call.num_kv_heads);
  const auto thread_blocks = static_cast<unsigned>((tasks + kRotateWarps - 1) / kRotateWarps);
  launch_dependent(rotate_and_store_kernel<kHeadDim>, {thread_blocks, kRotateWarps * kWarpLanes, 0}, stream, call);
}

template <int kHeadDim>
void start_decode(const DecodeCall& call, cudaStream_t stream) {
  start_persistent<DecodePlan<kHeadDim>>(attention_decode_kernel<kHeadDim>, call, kDecodeThreads, kDecodeBlocksPerSm,
                                         stream);
}

template <int kHeadDim>
void start_prefill(const PrefillCall& call, cudaStream_t stream) {
  start_persistent<PrefillPlan<kHeadDim>>(attention_prefill_kernel<kHeadDim>, call, kPrefillThreads, 1, stream);
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
  if (call.count == 0) return;
  call.head_dim == kLargeHeadDim ? start_rotate<kLargeHeadDim>(call, stream)
                                 : start_rotate<kSmallHeadDim>(call, stream);
}

void launch_attention_decode(const DecodeCall& call, cudaStream_t stream) {
  check_heads(call.attend.num_heads, call.attend.num_kv_heads, call.attend.head_dim);
  call.attend.head_dim == kLargeHeadDim ? start_decode<kLargeHeadDim>(call, stream)
                                        : start_decode<kSmallHeadDim>(call, stream);
}

void launch_attention_prefill_portable(const PrefillCall& call, cudaStream_t stream) {
  check_heads(call.attend.num_heads, call.attend.num_kv_heads, call.attend.head_dim);
  call.attend.head_dim == kLargeHeadDim ? start_prefill<kLargeHeadDim>(call, stream)
                                        : start_prefill<kSmallHeadDim>(call, stream);
}

void launch_attention_prefill(const PrefillCall& call, cudaStream_t stream) {
  check_heads(call.attend.num_heads, call.attend.num_kv_heads, call.attend.head_dim);
  const bool is_hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == kHopperMajor;
  if (is_hopper && call.attend.head_dim == kLargeHeadDim) return launch_attention_prefill_hopper(call, stream);
  launch_attention_prefill_portable(call, stream);
}

}
