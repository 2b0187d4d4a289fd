#pragma once

#include "cuda/kernels/gemm/launch_product.cuh"
#include "cuda/kernels/gemm/wide_product.cuh"

namespace glint::cuda {

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTensorMap find_tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  GLINT_CHECK_CUDA(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
  require_argument(found == cudaDriverEntryPointSuccess,
                   "the CUDA driver has no cuTensorMapEncodeTiled; install one for CUDA 12 or newer");
  return reinterpret_cast<EncodeTensorMap>(function);
}

struct TensorShape {
  CUtensorMapDataType type;
  cuuint64_t columns;
  cuuint64_t rows;
  cuuint64_t row_bytes;
  cuuint32_t box_columns;
  cuuint32_t box_rows;
};

inline CUtensorMap make_tensor_map(const void* data, const TensorShape& shape) {
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  const cuuint64_t sizes[2] = {shape.columns, shape.rows};
  const cuuint32_t box[2] = {shape.box_columns, shape.box_rows};
  const cuuint32_t element_steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, shape.type, 2, const_cast<void*>(data), sizes, &shape.row_bytes, box,
                                 element_steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require_argument(result == CUDA_SUCCESS, "the driver refuses a tensor map of ", shape.rows, " rows of ",
                   shape.row_bytes, " bytes; rows must start at multiples of 16 bytes");
  return map;
}

inline TensorTokens tensor_tokens(const ProductInputs& inputs, int64_t num_tokens, int32_t tile_tokens) {
  const auto row_bytes = static_cast<cuuint64_t>(inputs.activation_stride);
  return {make_tensor_map(inputs.activations, {.type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                               .columns = row_bytes,
                                               .rows = static_cast<cuuint64_t>(num_tokens),
                                               .row_bytes = row_bytes,
                                               .box_columns = kProductTileK,
                                               .box_rows = static_cast<cuuint32_t>(tile_tokens)})};
}

inline CUtensorMap tensor_out(const DenseProductCall& call, int32_t tile_tokens) {
  return make_tensor_map(call.out, {.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                    .columns = static_cast<cuuint64_t>(call.rows),
                                    .rows = static_cast<cuuint64_t>(call.num_tokens),
                                    .row_bytes = static_cast<cuuint64_t>(call.out_stride) * sizeof(float),
                                    .box_columns = kStagedRows,
                                    .box_rows = static_cast<cuuint32_t>(tile_tokens)});
}

template <class Shape, class Walk, class Finish>
void launch_wide_product(const ProductInputs& inputs, const typename Shape::Tokens& tokens, const Walk& walk,
                         const Finish& finish, int64_t max_tiles, cudaStream_t stream) {
  constexpr int kBytes = sizeof(WidePlan<Shape>);
  static_assert(kBytes <= kSharedLimitBytes, "the shared plan is larger than one thread block may have");
  const auto kernel = wide_product_kernel<Shape, Walk, Finish>;
  static PerDevice thread_blocks;
  const int most = thread_blocks.get([kernel] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return device_multiprocessors();
  });
  LaunchAttributes launch(kProductThreads, kBytes, 1, stream);
  launch.config.gridDim = dim3(static_cast<unsigned>(max_tiles < most ? max_tiles : most));
  GLINT_CHECK_CUDA(cudaLaunchKernelEx(&launch.config, kernel, inputs, tokens, walk, finish));
}

}
