#pragma once

#include "cuda/kernels/gemm/launch_wide.cuh"
#include "cuda/kernels/gemm/spread_product.cuh"

namespace glint::cuda {

template <class Shape, class Finish>
void launch_spread_product(const ProductInputs& inputs, const Finish& finish, int32_t num_tokens, int32_t row_tiles,
                           cudaStream_t stream) {
  const auto kernel = spread_product_kernel<Shape, Finish>;
  static PerDevice most_bytes;
  most_bytes.get([kernel] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimitBytes));
    return kSharedLimitBytes;
  });
  LaunchAttributes launch(kSpreadThreads, static_cast<size_t>(Shape::shared_bytes(inputs.piece_steps)), kSpreadPieces,
                          stream);
  launch.config.gridDim = dim3(static_cast<unsigned>(row_tiles * kSpreadPieces));
  const CUtensorMap tokens = tensor_tokens(inputs, num_tokens, Shape::kTokens).map;
  GLINT_CHECK_CUDA(cudaLaunchKernelEx(&launch.config, kernel, inputs, tokens, finish, num_tokens));
}

}
