#include "cuda/comm/peer_sum.h"

#include <algorithm>

#include "cuda/comm/peer_sum.cuh"
#include "cuda/launch.h"
#include "cuda/kernels/norm/norm_choice.h"

namespace glint::cuda {

namespace {

constexpr int64_t kMaxThreadBlocks = 1056;

int64_t most_thread_blocks(const PeerSumCall& call) {
  const int resident = device_attribute(cudaDevAttrMultiProcessorCount);
  if (call.shares_device) return std::max(1, resident / call.norm.num_parts);
  return call.share_rows > 0 ? resident : kMaxThreadBlocks;
}

bool starts_at_vector(const void* place) { return reinterpret_cast<uintptr_t>(place) % sizeof(float4) == 0; }

}

void launch_peer_sum(const PeerSumCall& call, cudaStream_t stream) {
  const NormCall& norm = call.norm;
  if (norm.count == 0) return;
  require_argument(norm.num_parts > 0, "a peer sum joins ", norm.num_parts, " parts; it joins 1 to ", kMaxParts);
  const auto thread_blocks = static_cast<unsigned>(std::min(norm.count, most_thread_blocks(call)));
  with_norm_vectors(norm.width, [&](auto vectors) {
    with_room_for(norm.num_parts, [&](auto room) {
      if constexpr (decltype(room)::value > 0) {
        launch_dependent(peer_sum_kernel<decltype(vectors)::value, decltype(room)::value>,
                         {thread_blocks, kRowThreads, 0}, stream, call);
      }
    });
  });
}

void launch_sum(const SumCall& given, cudaStream_t stream) {
  SumCall call = given;
  if (call.count == 0) return;
  require_argument(call.num_parts > 0, "a sum joins ", call.num_parts, " parts; it joins 1 to ", kMaxParts);
  call.is_aligned =
      call.part_stride % kVectorFloats == 0 && starts_at_vector(call.out) && starts_at_vector(call.parts);
  const int64_t wanted = (call.count + kRowThreads * kVectorFloats - 1) / (kRowThreads * kVectorFloats);
  const auto thread_blocks = static_cast<unsigned>(std::min(wanted, kMaxThreadBlocks));
  with_room_for(call.num_parts, [&](auto room) {
    if constexpr (decltype(room)::value > 0) {
      launch_dependent(sum_parts_kernel<decltype(room)::value>, {thread_blocks, kRowThreads, 0}, stream, call);
    }
  });
}

}
