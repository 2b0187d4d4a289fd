#include "cuda/comm/peer_sum.h"

#include <algorithm>

#include "cuda/kernels/norm/norm.cuh"
#include "cuda/kernels/ptx/memory.cuh"
#include "cuda/launch.h"

namespace glint::cuda {

namespace {

__device__ __forceinline__ void report_failure(const PeerSumCall& call, PeerSumFailure failure, uint32_t peer,
                                               uint32_t epoch) {
  if (atomicExch(&call.state->failed, 1U) != 0) return;
  call.status->peer = peer;
  call.status->epoch = epoch;
  ptx::st_release_sys(&call.status->failure, static_cast<uint32_t>(failure));
}

__device__ __forceinline__ bool wait_for_peer(const PeerSumCall& call, uint32_t peer, uint32_t epoch) {
  constexpr uint32_t kSpinsBetweenLooks = 256;
  uint64_t start = 0;
  for (uint32_t spins = 1;; ++spins) {
    const uint32_t reached = ptx::ld_acquire_sys(&call.state->flags[peer]);
    if (static_cast<int32_t>(reached - epoch) >= 0) return true;
    if (spins % kSpinsBetweenLooks != 0) continue;
    if (ptx::ld_acquire_sys(&call.state->failed) != 0) return false;
    if (ptx::ld_acquire_sys(&call.status->is_stopped) != 0) {
      report_failure(call, PeerSumFailure::kStopped, peer, epoch);
      return false;
    }
    const uint64_t now = ptx::globaltimer();
    if (start == 0) start = now;
    if (now - start > call.wait_nanoseconds) {
      report_failure(call, PeerSumFailure::kNoAnswer, peer, epoch);
      return false;
    }
  }
}

__device__ __forceinline__ bool wait_for_peers(const PeerSumCall& call, uint32_t epoch) {
  const uint32_t peer = threadIdx.x;
  bool has_synced = true;
  if (peer < static_cast<uint32_t>(call.norm.num_parts)) {
    has_synced = ptx::ld_acquire_sys(&call.state->failed) == 0 && wait_for_peer(call, peer, epoch);
  }
  return __syncthreads_and(has_synced ? 1 : 0) != 0;
}

__device__ __forceinline__ bool sync_with_peers(const PeerSumCall& call, uint32_t epoch) {
  const uint32_t peer = threadIdx.x;
  if (blockIdx.x == 0 && peer < static_cast<uint32_t>(call.norm.num_parts)) {
    if (peer == 0 && call.state->last_slot == static_cast<uint32_t>(call.slot) + 1) {
      report_failure(call, PeerSumFailure::kRepeatedSlot, static_cast<uint32_t>(call.rank), epoch);
    }
    const bool is_whole = ptx::ld_acquire_sys(&call.state->failed) == 0;
    if (is_whole) ptx::st_release_sys(call.flags[peer] + call.rank, epoch);
  }
  return wait_for_peers(call, epoch);
}

__device__ __forceinline__ void leave_epoch(const PeerSumCall& call, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(&call.state->arrivals, 1U) + 1 < gridDim.x) return;
  call.state->arrivals = 0;
  call.state->last_slot = static_cast<uint32_t>(call.slot) + 1;
  call.state->epoch = epoch;
}

template <int kRoom, typename Parts>
__device__ __forceinline__ void reduce_parts(float* g_out, const Parts& parts, int num_parts, int64_t first,
                                             int64_t count, bool is_aligned) {
  const int64_t stride = int64_t{gridDim.x} * kRowThreads;
  const int64_t start = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  const int64_t num_vectors = is_aligned ? count / kVectorFloats : 0;
  for (int64_t vector = start; vector < num_vectors; vector += stride) {
    const int64_t index = vector * kVectorFloats;
    *reinterpret_cast<float4*>(g_out + index) = reduced_vector<kRoom>(parts, num_parts, first + index);
  }
  for (int64_t index = num_vectors * kVectorFloats + start; index < count; index += stride) {
    g_out[index] = reduced_number<kRoom>(parts, num_parts, first + index);
  }
}

template <int kRoom>
__device__ __forceinline__ void sum_own_share(const PeerSumCall& call) {
  const int64_t first = min(call.rank * call.share_rows, call.norm.count);
  const int64_t count = min(call.share_rows, call.norm.count - first);
  reduce_parts<kRoom>(call.shares[call.rank], call.parts, call.norm.num_parts, first * call.norm.width,
                      count * call.norm.width, call.norm.width % kVectorFloats == 0);
}

__device__ __forceinline__ void announce_share(const PeerSumCall& call, uint32_t epoch) {
  __shared__ bool s_is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    s_is_last = atomicAdd(&call.state->share_arrivals, 1U) + 1 == gridDim.x;
    __threadfence_system();
    if (s_is_last) call.state->share_arrivals = 0;
  }
  __syncthreads();
  if (s_is_last && threadIdx.x < static_cast<uint32_t>(call.norm.num_parts)) {
    ptx::st_release_sys(call.flags[threadIdx.x] + call.rank, epoch);
  }
}

template <int kVectors, int kRoom>
__device__ __forceinline__ void add_update(const PeerSumCall& call, RowTile<kVectors>& tile, int64_t row,
                                           bool is_aligned) {
  const NormCall& norm = call.norm;
  if (call.share_rows == 0) {
    add_parts<kVectors, kRoom>(tile, call.parts, norm.num_parts, row * norm.width, norm.width, is_aligned);
    return;
  }
  const StridedParts share{call.shares[row / call.share_rows], 0};
  add_parts<kVectors, 1>(tile, share, 1, row % call.share_rows * norm.width, norm.width, is_aligned);
}

template <int kVectors, int kRoom>
__device__ __forceinline__ void sum_rows(const PeerSumCall& call, RowTile<kVectors>& tile,
                                         const RowTile<kVectors>& weight, NormShared& s_norm) {
  const NormCall& norm = call.norm;
  const bool is_aligned = norm.width % kVectorFloats == 0;
  for (int64_t row = blockIdx.x; row < norm.count; row += gridDim.x) {
    if (row != blockIdx.x) tile.load(norm.hidden + row * norm.width, norm.width, is_aligned);
    add_update<kVectors, kRoom>(call, tile, row, is_aligned);
    tile.store(norm.hidden + row * norm.width, norm.width, is_aligned);
    if (norm.weight != nullptr) norm_and_quantise(tile, weight, norm, row, norm.width, is_aligned, s_norm);
    __syncthreads();
  }
}

template <int kVectors, int kRoom>
__global__ void __launch_bounds__(kRowThreads) peer_sum_kernel(const __grid_constant__ PeerSumCall call) {
  __shared__ NormShared s_norm;
  const NormCall& norm = call.norm;
  const bool is_aligned = norm.width % kVectorFloats == 0;
  RowTile<kVectors> weight;
  RowTile<kVectors> tile;
  if (norm.weight != nullptr) weight.load(norm.weight, norm.width, is_aligned);
  if (!call.shares_device) ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  uint32_t epoch = call.state->epoch + 1;
  tile.load(norm.hidden + blockIdx.x * norm.width, norm.width, is_aligned);
  bool has_synced = sync_with_peers(call, epoch);
  if (call.share_rows > 0) {
    ++epoch;
    if (has_synced) {
      sum_own_share<kRoom>(call);
      announce_share(call, epoch);
      has_synced = wait_for_peers(call, epoch);
    }
  }
  if (has_synced) sum_rows<kVectors, kRoom>(call, tile, weight, s_norm);
  leave_epoch(call, epoch);
}

template <int kRoom>
__global__ void __launch_bounds__(kRowThreads) sum_parts_kernel(const SumCall call) {
  const StridedParts parts{call.parts, call.part_stride};
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  reduce_parts<kRoom>(call.out, parts, call.num_parts, 0, call.count, call.is_aligned);
}

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
  require_argument(norm.num_parts > 0, "a peer sum reduces ", norm.num_parts, " parts; it reduces 1 to ", kMaxParts);
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
  require_argument(call.num_parts > 0, "a sum reduces ", call.num_parts, " parts; it reduces 1 to ", kMaxParts);
  call.is_aligned = call.part_stride % kVectorFloats == 0 && starts_at_vector(call.out) && starts_at_vector(call.parts);
  const int64_t wanted = (call.count + kRowThreads * kVectorFloats - 1) / (kRowThreads * kVectorFloats);
  const auto thread_blocks = static_cast<unsigned>(std::min(wanted, kMaxThreadBlocks));
  with_room_for(call.num_parts, [&](auto room) {
    if constexpr (decltype(room)::value > 0) {
      launch_dependent(sum_parts_kernel<decltype(room)::value>, {thread_blocks, kRowThreads, 0}, stream, call);
    }
  });
}

}
