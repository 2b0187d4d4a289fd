#include "cuda/kernels/moe/expert_down.cuh"
#include "cuda/kernels/moe/expert_down_many.cuh"

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

template <Multiply kMultiply, int kMaxTokens, int kBlockTokens, bool kIsStreamed>
void launch_few(const DownInputs& inputs, cudaStream_t stream) {
  using OneStep = DownShape<kMultiply, kMaxTokens, kBlockTokens, kIsStreamed, true>;
  using AnyWidth = DownShape<kMultiply, kMaxTokens, kBlockTokens, kIsStreamed, false>;
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

}

template <Multiply kMultiply>
void launch_expert_down_with(const DownCall& call, cudaStream_t stream) {
  require_down_shape(call.hidden_size, call.width);
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
  if (call.streams_gate_up) {
    launch_few<kMultiply, kStreamedTileTokens, kStreamedTokens, true>(inputs, stream);
  } else if (plan.down_tokens == 32) {
    launch_few<kMultiply, 32, 256, false>(inputs, stream);
  } else if (inputs.num_steps == 1) {
    launch_many<ManyDownShape<kMultiply, true>>(inputs, stream);
  } else {
    launch_many<ManyDownShape<kMultiply, false>>(inputs, stream);
  }
}

template void launch_expert_down_with<Multiply::GLINT_MULTIPLY>(const DownCall& call, cudaStream_t stream);

}
