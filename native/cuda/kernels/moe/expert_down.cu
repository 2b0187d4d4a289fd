#include "cuda/kernels/moe/expert_down.cuh"
#include "cuda/kernels/moe/expert_down_many.cuh"

namespace glint::cuda {

namespace {

constexpr int kPackThreads = 256;

__global__ void pack_down_kernel(const PackCall call, int64_t num_owners, int64_t num_chunks) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= num_chunks) return;
  constexpr int kColumns = kDownTileK / 16;
  const int64_t num_steps = call.k_bytes / kDownTileK;
  const int64_t tile_row = index % kDownTileRows;
  const int64_t column = index / kDownTileRows % kColumns;
  const int64_t tile = index / (kDownTileRows * kColumns);
  const int64_t k_step = tile % num_steps;
  const int64_t row = tile / num_steps % num_owners * kDownTileRows + tile_row;
  const int64_t matrix = tile / num_steps / num_owners;
  const int64_t offset = (matrix * call.rows + row) * call.k_bytes + k_step * kDownTileK + column * 16;
  reinterpret_cast<uint4*>(call.packed)[index] = *reinterpret_cast<const uint4*>(call.weights + offset);
}

using DownKernel = void (*)(DownInputs);

template <DownKernel kKernel, class Storage>
void launch_down(const DownInputs& inputs, int threads, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Storage);
  static_assert(kBytes <= kSharedLimitBytes, "the shared storage is larger than one thread block may have");
  static PerDevice shared_bytes;
  shared_bytes.get([] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return kBytes;
  });
  launch_dependent(kKernel, {static_cast<unsigned>(inputs.num_owners), static_cast<unsigned>(threads), kBytes}, stream,
                   inputs);
}

template <int kMaxTokens, int kBlockTokens, bool kIsStreamed>
void launch_few(const DownInputs& inputs, cudaStream_t stream) {
  using OneStep = DownShape<kMaxTokens, kBlockTokens, kIsStreamed, true>;
  using AnyWidth = DownShape<kMaxTokens, kBlockTokens, kIsStreamed, false>;
  if (inputs.num_steps == 1) {
    launch_down<expert_down_kernel<OneStep>, DownStorage<OneStep>>(inputs, OneStep::kThreads, stream);
  } else {
    launch_down<expert_down_kernel<AnyWidth>, DownStorage<AnyWidth>>(inputs, AnyWidth::kThreads, stream);
  }
}

template <class Shape>
void launch_many(const DownInputs& inputs, cudaStream_t stream) {
  launch_down<expert_down_many_kernel<Shape>, ManyDownStorage<Shape>>(inputs, Shape::kThreads, stream);
}

void require_shape(int64_t hidden_size, int64_t width) {
  require_argument(hidden_size % kDownTileRows == 0 && width % kDownTileK == 0, "a down GEMM of ", hidden_size,
                   " rows and width ", width, " is not made of tiles of ", kDownTileRows, " by ", kDownTileK);
  require_argument(width <= kQuantisedWidthLimit, "an expert's width is at most ", kQuantisedWidthLimit, ", not ",
                   width);
}

}

int64_t packed_down_bytes(int64_t hidden_size, int64_t width) {
  require_shape(hidden_size, width);
  return hidden_size * width;
}

void launch_pack_down(const PackCall& call, cudaStream_t stream) {
  require_shape(call.rows, call.k_bytes);
  const int64_t num_chunks = call.num_matrices * call.rows * call.k_bytes / 16;
  const auto blocks = static_cast<unsigned>((num_chunks + kPackThreads - 1) / kPackThreads);
  pack_down_kernel<<<blocks, kPackThreads, 0, stream>>>(call, call.rows / kDownTileRows, num_chunks);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

void launch_expert_down(const DownCall& call, cudaStream_t stream) {
  require_shape(call.hidden_size, call.width);
  const TilePlan plan = plan_tiles(call.num_tokens);
  const DownInputs inputs = {call.out,
                             call.packed_tiles,
                             call.arrivals,
                             call.grouped,
                             call.packed_weights,
                             call.row_scales,
                             call.hidden,
                             static_cast<int32_t>(call.width),
                             static_cast<int32_t>(call.hidden_size),
                             static_cast<int32_t>(call.num_tokens),
                             static_cast<int32_t>(call.width / kDownTileK),
                             static_cast<int32_t>(call.hidden_size / kDownTileRows),
                             plan.block_tokens,
                             static_cast<int32_t>(call.max_rows)};
  require_argument(inputs.num_owners <= device_multiprocessors(), "down of ", call.hidden_size, " rows has ",
                   inputs.num_owners, " thread blocks that wait for each other; this GPU runs ",
                   device_multiprocessors(), " at once");
  if (streams_gate_up(call.num_tokens)) {
    launch_few<kStreamedTileTokens, kStreamedTokens, true>(inputs, stream);
  } else if (plan.down_tokens == 32) {
    launch_few<32, 256, false>(inputs, stream);
  } else if (inputs.num_steps == 1) {
    launch_many<ManyDownShape<true>>(inputs, stream);
  } else {
    launch_many<ManyDownShape<false>>(inputs, stream);
  }
}

}
