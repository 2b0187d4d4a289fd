#include "cuda/kernels/norm/rows.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "cuda/kernels/norm/norm.cuh"
#include "cuda/kernels/norm/row_tile.cuh"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/launch.h"
#include "model/sampling.h"

namespace glint::cuda {

inline constexpr int kGatherVectors = 5;

__device__ __forceinline__ int32_t embedded_token(const EmbedCall& call, int64_t row) {
  const int32_t token = call.tokens[row];
  const int32_t sampled_row = call.sampled_rows == nullptr ? kNoSampledRow : call.sampled_rows[row];
  if (sampled_row == kNoSampledRow) return token;
  return min(max(call.sampled[sampled_row].token, 0), call.vocab_size - 1);
}

__device__ __forceinline__ float4 widened_bf16(uint2 values) {
  return make_float4(__uint_as_float(values.x << 16U), __uint_as_float(values.x & 0xffff0000U),
                     __uint_as_float(values.y << 16U), __uint_as_float(values.y & 0xffff0000U));
}

__global__ void __launch_bounds__(kRowThreads) embed_kernel(const EmbedCall call) {
  const int64_t row = blockIdx.x;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const uint16_t* g_source = call.table + embedded_token(call, row) * call.width;
  float* g_target = call.hidden + row * call.width;
  const int64_t num_vectors = call.width % kVectorFloats == 0 ? call.width / kVectorFloats : 0;
#pragma unroll 5
  for (int64_t vector = threadIdx.x; vector < num_vectors; vector += kRowThreads) {
    reinterpret_cast<float4*>(g_target)[vector] = widened_bf16(reinterpret_cast<const uint2*>(g_source)[vector]);
  }
  for (int64_t index = num_vectors * kVectorFloats + threadIdx.x; index < call.width; index += kRowThreads) {
    g_target[index] = __uint_as_float(static_cast<uint32_t>(g_source[index]) << 16U);
  }
}

__global__ void __launch_bounds__(kRowThreads) add_rows_kernel(float* hidden, const float* update, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * kRowThreads;
  const int64_t start = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  const int64_t num_vectors = count / kVectorFloats;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  for (int64_t vector = start; vector < num_vectors; vector += stride) {
    float4 sum = reinterpret_cast<const float4*>(hidden)[vector];
    const float4 change = reinterpret_cast<const float4*>(update)[vector];
    sum.x += change.x;
    sum.y += change.y;
    sum.z += change.z;
    sum.w += change.w;
    reinterpret_cast<float4*>(hidden)[vector] = sum;
  }
  for (int64_t index = num_vectors * kVectorFloats + start; index < count; index += stride) {
    hidden[index] += update[index];
  }
}

__global__ void __launch_bounds__(kRowThreads) gather_rows_kernel(const GatherCall call) {
  const int64_t row = blockIdx.x;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t source = call.rows[row] * call.width;
  const bool is_aligned = call.width % kVectorFloats == 0;
  for (int64_t first = 0; first < call.width; first += kGatherVectors * kRowThreads * kVectorFloats) {
    const int64_t width = call.width - first;
    RowTile<kGatherVectors> tile;
    tile.load(call.in + source + first, width, is_aligned);
    if (call.update != nullptr) {
      RowTile<kGatherVectors> update;
      update.load(call.update + source + first, width, is_aligned);
      RowTile<kGatherVectors>::for_each(width, [&](int vector, int element, int64_t) {
        tile.values[vector][element] += update.values[vector][element];
      });
    }
    tile.store(call.out + row * call.width + first, width, is_aligned);
  }
}

template <int kVectors>
__device__ __forceinline__ void load_embedding(RowTile<kVectors>& tile, const uint16_t* g_row, int64_t width,
                                               bool is_aligned) {
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
    const int64_t start = RowTile<kVectors>::first(vector);
    float4 loaded = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    if (is_aligned && start < width) loaded = widened_bf16(*reinterpret_cast<const uint2*>(g_row + start));
    tile.values[vector][0] = loaded.x;
    tile.values[vector][1] = loaded.y;
    tile.values[vector][2] = loaded.z;
    tile.values[vector][3] = loaded.w;
  }
  if (is_aligned) return;
  RowTile<kVectors>::for_each(width, [&](int vector, int element, int64_t index) {
    tile.values[vector][element] = __uint_as_float(static_cast<uint32_t>(g_row[index]) << 16U);
  });
}

template <int kVectors>
__global__ void __launch_bounds__(kRowThreads) mtp_input_kernel(const MtpInputCall call) {
  __shared__ NormShared s_norm;
  const int64_t row = blockIdx.x;
  const bool is_hidden = blockIdx.y == 1;
  const bool is_aligned = call.width % kVectorFloats == 0;
  RowTile<kVectors> tile;
  RowTile<kVectors> weight;
  weight.load(is_hidden ? call.hidden_norm : call.embedding_norm, call.width, is_aligned);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (is_hidden) {
    tile.load(call.hidden + row * call.width, call.width, is_aligned);
  } else {
    load_embedding(tile, call.table + call.tokens[row] * call.width, call.width, is_aligned);
  }
  norm_row(tile, weight, call.width, call.epsilon, s_norm);
  auto* g_row = reinterpret_cast<__nv_bfloat16*>(call.out + row * call.out_stride_bytes);
  __nv_bfloat16* g_half = g_row + (is_hidden ? call.width : 0);
  RowTile<kVectors>::for_each(call.width, [&](int vector, int element, int64_t index) {
    g_half[index] = __float2bfloat16_rn(tile.values[vector][element]);
  });
  if (!is_hidden) return;
  for (int64_t index = 2 * call.width + threadIdx.x; index < call.out_stride_bytes / 2; index += kRowThreads) {
    g_row[index] = __float2bfloat16_rn(0.0F);
  }
}

__global__ void __launch_bounds__(kRowThreads) page_states_kernel(const PageStatesCall call) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const PageState state = call.states[blockIdx.x];
  float* g_row = call.rows + state.row * call.width;
  float* g_kept = call.kept + state.page * call.width;
  const float* g_source = state.is_kept ? g_row : g_kept;
  float* g_target = state.is_kept ? g_kept : g_row;
  for (int64_t index = threadIdx.x; index < call.width; index += kRowThreads) g_target[index] = g_source[index];
}

void launch_norm(const NormCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  const LaunchShape shape = {static_cast<unsigned>(call.count), kRowThreads, 0};
  const auto start_whole = [&](auto vectors) {
    launch_dependent(norm_fixed_width_kernel<decltype(vectors)::value>, shape, stream, call);
  };
  const bool has_vectors = call.num_parts == 1 && call.weight != nullptr && call.fp8_stride % kVectorFloats == 0;
  if (has_vectors && with_fixed_width(call.width, start_whole)) return;
  with_norm_vectors(call.width, [&](auto vectors) {
    with_room_for(call.num_parts, [&](auto room) {
      launch_dependent(norm_kernel<decltype(vectors)::value, decltype(room)::value>, shape, stream, call);
    });
  });
}

void launch_embed(const EmbedCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  require_argument(call.sampled_rows == nullptr || (call.sampled != nullptr && call.vocab_size > 0),
                   "tokens are taken from a sampler of ", call.vocab_size, " tokens; give the size of the vocabulary");
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

void launch_mtp_input(const MtpInputCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  const LaunchShape shape = {dim3(static_cast<unsigned>(call.count), 2), kRowThreads, 0};
  with_norm_vectors(call.width, [&](auto vectors) {
    launch_dependent(mtp_input_kernel<decltype(vectors)::value>, shape, stream, call);
  });
}

void launch_page_states(const PageStatesCall& call, cudaStream_t stream) {
  if (call.count == 0) return;
  launch_dependent(page_states_kernel, {static_cast<unsigned>(call.count), kRowThreads, 0}, stream, call);
}

}
