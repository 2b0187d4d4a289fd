#include "cuda/kernels/moe/expert_down.cuh"
#include "cuda/kernels/moe/expert_down_many.cuh"
#include "cuda/kernels/moe/expert_down_rows.cuh"

namespace glint::cuda {

namespace {

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

template <class Shape>
void launch_few(const DownInputs& inputs, cudaStream_t stream) {
  launch_down<expert_down_kernel<Shape>, DownStorage<Shape>>(inputs, Shape::kThreads, stream);
}

template <class Shape>
void launch_many(const DownInputs& inputs, cudaStream_t stream) {
  launch_down<expert_down_many_kernel<Shape>, ManyDownStorage<Shape>>(inputs, Shape::kThreads, stream);
}

template <Multiply kMultiply, class Tile, bool kIsOneStep>
void launch_many_tokens(const DownCall& call, const DownInputs& inputs, cudaStream_t stream) {
  if constexpr (kMultiply == Multiply::kWgmma && std::is_same_v<Tile, DownTile32> && !kIsOneStep) {
    if (call.routed != nullptr) return launch_down_rows<DownRowsShape<kMultiply, Tile>>(call, stream);
  }
  launch_many<ManyDownShape<kMultiply, Tile, kIsOneStep>>(inputs, stream);
}

template <Multiply kMultiply, class Tile, bool kIsOneStep>
void launch_steps(const DownCall& call, const DownInputs& inputs, cudaStream_t stream) {
  if (call.streams_gate_up) {
    launch_few<DownShape<kMultiply, Tile, kStreamedTileTokens, kStreamedTokens, true, kIsOneStep>>(inputs, stream);
  } else if (plan_tiles(call.num_tokens).down_tokens == 32) {
    launch_few<DownShape<kMultiply, Tile, 32, 256, false, kIsOneStep>>(inputs, stream);
  } else {
    launch_many_tokens<kMultiply, Tile, kIsOneStep>(call, inputs, stream);
  }
}

template <Multiply kMultiply, class Tile>
void launch_tile(const DownCall& call, const DownInputs& inputs, cudaStream_t stream) {
  if (inputs.num_steps == 1) {
    launch_steps<kMultiply, Tile, true>(call, inputs, stream);
  } else if constexpr (!Tile::kIsPadded) {
    launch_steps<kMultiply, Tile, false>(call, inputs, stream);
  }
}

}

template <Multiply kMultiply>
void launch_expert_down_with(const DownCall& call, cudaStream_t stream) {
  require_down_shape(call.hidden_size, call.width);
  const DownTilePlan tile = plan_down_tile(call.width);
  const int64_t packed_width = tile.packed_width(call.width);
  const DownInputs inputs = {call.out,
                             call.packed_tiles,
                             call.arrivals,
                             call.grouped,
                             call.packed_weights,
                             call.row_scales,
                             call.hidden,
                             static_cast<int32_t>(call.width),
                             static_cast<int32_t>(packed_width),
                             static_cast<int32_t>(call.hidden_size),
                             static_cast<int32_t>(call.num_tokens),
                             static_cast<int32_t>(packed_width / tile.k),
                             static_cast<int32_t>(call.hidden_size / tile.rows),
                             plan_tiles(call.num_tokens).block_tokens,
                             static_cast<int32_t>(call.max_rows)};
  require_argument(inputs.num_owners <= device_multiprocessors(), "down of ", call.hidden_size, " rows has ",
                   inputs.num_owners, " thread blocks that wait for each other; this GPU runs ",
                   device_multiprocessors(), " at once");
  if (tile.rows == DownTile40::kRows) {
    launch_tile<kMultiply, DownTile40>(call, inputs, stream);
  } else if (tile.k == DownTile32::kK) {
    launch_tile<kMultiply, DownTile32>(call, inputs, stream);
  } else {
    launch_tile<kMultiply, PaddedDownTile32>(call, inputs, stream);
  }
}

template void launch_expert_down_with<Multiply::GLINT_MULTIPLY>(const DownCall& call, cudaStream_t stream);

}
