#pragma once

#include "cuda/kernels/gemm/gemm_tile.cuh"

namespace glint::cuda {

constexpr int kResidentSplits = 3;
constexpr int kResidentThreads = kResidentSplits * 128;
constexpr int kResidentRows = 64;

template <Multiply kMultiplyValue, GemmElement kElementValue, int kTokensValue>
struct ResidentShape {
  static constexpr Multiply kMultiply = kMultiplyValue;
  static constexpr GemmElement kElement = kElementValue;
  static constexpr int kTokens = kTokensValue;
  static constexpr int kStepBytes = kWarpgroupBytes + kTokens * kGemmTileK;
  static constexpr int kSumPitch = kResidentRows + 4;
  static constexpr int kRowThreads = kResidentRows / 4;
  static constexpr int kPassTokens = kResidentThreads / kRowThreads;
  static constexpr int kPasses = (kTokens + kPassTokens - 1) / kPassTokens;
  static_assert(kTokens * kSumPitch * 4 <= 2 * kStepBytes, "a split's sums take the place of its first two steps");

  static constexpr bool fits(int split_steps) { return shared_bytes(split_steps) <= kSharedLimitBytes; }
  static constexpr int shared_bytes(int split_steps) {
    return kResidentSplits * split_steps * (kStepBytes + static_cast<int>(sizeof(uint64_t)));
  }
};

template <class Shape>
struct ResidentSplit {
  using Step = StepMultiply<Shape::kMultiply, Shape::kElement, Shape::kTokens>;
  static constexpr int kRegisters = Shape::kTokens / 2;

  uint8_t* s_steps;
  uint64_t* s_arrived;
  int num_steps;
  int step_first;

  __device__ __forceinline__ ResidentSplit(uint8_t* s_bytes, int split_steps)
      : num_steps(split_steps), step_first(static_cast<int>(threadIdx.x) / 128 * split_steps) {
    s_steps = s_bytes + step_first * Shape::kStepBytes;
    s_arrived = reinterpret_cast<uint64_t*>(s_bytes + kResidentSplits * num_steps * Shape::kStepBytes) + step_first;
  }

  __device__ __forceinline__ uint8_t* weights(int step) const { return s_steps + step * Shape::kStepBytes; }
  __device__ __forceinline__ uint8_t* tokens(int step) const { return weights(step) + kWarpgroupBytes; }

  __device__ __forceinline__ void load_weights(const uint8_t* g_weights) const {
    const int64_t first_tile = int64_t{blockIdx.x} / 2 * kResidentSplits * num_steps + step_first;
    const uint8_t* g_step = g_weights + first_tile * kGemmTileBytes + blockIdx.x % 2 * kWarpgroupBytes;
    for (int step = 0; step < num_steps; ++step) ptx::mbarrier_init(s_arrived[step], 1);
    ptx::fence_proxy_async();
    for (int step = 0; step < num_steps; ++step, g_step += kGemmTileBytes) {
      ptx::mbarrier_arrive_expect_tx(s_arrived[step], Shape::kStepBytes);
      ptx::cp_async_bulk(weights(step), g_step, kWarpgroupBytes, s_arrived[step], ptx::kEvictFirst);
    }
  }

  __device__ __forceinline__ void load_tokens(const CUtensorMap& map) const {
    for (int step = 0; step < num_steps; ++step) {
      ptx::cp_async_bulk_tensor_load(tokens(step), map, (step_first + step) * kGemmTileK, 0, s_arrived[step],
                                     ptx::kEvictNormal);
    }
  }

  __device__ __forceinline__ void multiply(float (&r_sum)[kRegisters]) const {
#pragma unroll
    for (int index = 0; index < kRegisters; ++index) r_sum[index] = 0.0F;
    for (int step = 0; step < num_steps; ++step) {
      float r_step[kRegisters];
      ptx::mbarrier_wait_suspended(s_arrived[step], 0);
      Step::start(r_step, weights(step), tokens(step));
      Step::template wait<0>(r_step);
#pragma unroll
      for (int index = 0; index < kRegisters; ++index) r_sum[index] = __fadd_rn(r_sum[index], r_step[index]);
    }
  }

  __device__ __forceinline__ void share(const float (&r_sum)[kRegisters]) const {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 % 4 * kFragmentRows + lane / 4;
    float* s_sums = reinterpret_cast<float*>(s_steps) + lane % 4 * 2 * Shape::kSumPitch + row;
    ptx::bar_sync(1 + static_cast<int>(threadIdx.x) / 128, 128);
#pragma unroll
    for (int index = 0; index < kRegisters; ++index) {
      const int token = index / 4 * kFragmentTokens + index % 2;
      s_sums[token * Shape::kSumPitch + index % 4 / 2 * 8] = r_sum[index];
    }
  }
};

template <class Shape, class Epilogue>
struct ResidentReduction {
  const Epilogue& epilogue;
  typename Epilogue::RowMetadata r_rows[2];
  float r_token_scales[Shape::kPasses];
  int num_tokens;
  int block_row;
  int first_token;

  __device__ __forceinline__ ResidentReduction(const Epilogue& call_epilogue, int call_tokens)
      : epilogue(call_epilogue),
        num_tokens(call_tokens),
        block_row(threadIdx.x % Shape::kRowThreads * 4),
        first_token(threadIdx.x / Shape::kRowThreads) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) r_rows[pair] = epilogue.metadata_of_rows(row() + pair * 2, 1);
  }

  __device__ __forceinline__ int row() const { return static_cast<int>(blockIdx.x) * kResidentRows + block_row; }
  __device__ __forceinline__ int token(int pass) const { return first_token + pass * Shape::kPassTokens; }

  __device__ __forceinline__ void load_token_scales() {
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const bool has_scale = epilogue.token_scales != nullptr && token(pass) < num_tokens;
      r_token_scales[pass] = has_scale ? __ldcg(epilogue.token_scales + token(pass)) : 1.0F;
    }
  }

  __device__ __forceinline__ void store(const uint8_t* s_bytes, int split_bytes) const {
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      if (token(pass) >= num_tokens) break;
      const uint8_t* s_sums = s_bytes + (token(pass) * Shape::kSumPitch + block_row) * sizeof(float);
      float4 sum = *reinterpret_cast<const float4*>(s_sums);
#pragma unroll
      for (int split = 1; split < kResidentSplits; ++split) {
        const float4 next = *reinterpret_cast<const float4*>(s_sums + split * split_bytes);
        sum = {__fadd_rn(sum.x, next.x), __fadd_rn(sum.y, next.y), __fadd_rn(sum.z, next.z), __fadd_rn(sum.w, next.w)};
      }
      const float scale = r_token_scales[pass];
      epilogue.store_rows(token(pass), row(),
                          {epilogue.value(sum.x, scale, r_rows[0], 0), epilogue.value(sum.y, scale, r_rows[0], 1),
                           epilogue.value(sum.z, scale, r_rows[1], 0), epilogue.value(sum.w, scale, r_rows[1], 1)});
    }
  }
};

template <class Shape, class Epilogue>
__global__ void __launch_bounds__(kResidentThreads, 1)
    gemm_resident_kernel(const __grid_constant__ GemmInputs inputs, const __grid_constant__ CUtensorMap tokens,
                         const __grid_constant__ Epilogue epilogue, int num_tokens) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  const bool copies = threadIdx.x % 128 == 0;
  const ResidentSplit<Shape> split(s_bytes, inputs.split_steps);
  if (copies) {
    ptx::prefetch_tensormap(tokens);
    split.load_weights(inputs.weights);
  }
  ResidentReduction<Shape, Epilogue> reduction(epilogue, num_tokens);
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (copies) split.load_tokens(tokens);
  __syncwarp();
  reduction.load_token_scales();
  float r_sum[Shape::kTokens / 2];
  split.multiply(r_sum);
  split.share(r_sum);
  __syncthreads();
  reduction.store(s_bytes, inputs.split_steps * Shape::kStepBytes);
}

template <class Shape, class Epilogue>
void launch_gemm_resident(const GemmInputs& inputs, const Epilogue& epilogue, int32_t num_tokens, cudaStream_t stream) {
  const auto kernel = gemm_resident_kernel<Shape, Epilogue>;
  static PerDevice most_bytes;
  most_bytes.get([kernel] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimitBytes));
    return kSharedLimitBytes;
  });
  const CUtensorMap tokens = token_map(inputs, num_tokens, Shape::kTokens);
  const auto thread_blocks = static_cast<unsigned>((epilogue.num_rows + kResidentRows - 1) / kResidentRows);
  launch_dependent(kernel, {thread_blocks, kResidentThreads, Shape::shared_bytes(inputs.split_steps)}, stream, inputs,
                   tokens, epilogue, num_tokens);
}

}
