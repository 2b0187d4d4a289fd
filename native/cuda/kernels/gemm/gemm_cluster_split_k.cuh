#pragma once

#include "cuda/kernels/gemm/gemm_tile.cuh"

namespace glint::cuda {

constexpr int kClusterSplitKThreads = kConsumerWarps * 32;

template <Multiply kMultiplyValue, GemmElement kElementValue, int kTokensValue>
struct ClusterSplitKShape {
  static constexpr Multiply kMultiply = kMultiplyValue;
  static constexpr GemmElement kElement = kElementValue;
  static constexpr int kTokens = kTokensValue;
  static constexpr int kGroups = kTokens / kFragmentTokens;
  static constexpr int kFragmentBytes = kFragmentRows * kTokens * static_cast<int>(sizeof(float));
  static constexpr int kPartialBytes = kClusterSplits * kFragmentBytes;
  static constexpr int kStepBytes = kGemmTileBytes + kTokens * kGemmTileK;
  static_assert(kGroups <= kConsumerWarps, "a warp reduces the splits of at most one group of tokens");

  static constexpr bool fits(int split_steps) { return shared_bytes(split_steps) <= kSharedLimitBytes; }
  static constexpr int shared_bytes(int split_steps) {
    return kPartialBytes + split_steps * kStepBytes + (split_steps + 1) * static_cast<int>(sizeof(uint64_t));
  }
};

template <class Shape>
struct ClusterSplit {
  using Step = StepMultiply<Shape::kMultiply, Shape::kElement, Shape::kTokens>;
  static constexpr int kRegisters = Shape::kTokens / 2;

  uint8_t* s_partials;
  uint8_t* s_steps;
  uint64_t* s_arrived;
  int num_steps;
  int step_first;

  __device__ __forceinline__ ClusterSplit(uint8_t* s_bytes, int split_steps)
      : s_partials(s_bytes),
        s_steps(s_bytes + Shape::kPartialBytes),
        num_steps(split_steps),
        step_first(static_cast<int>(ptx::cluster_ctarank()) * split_steps) {
    s_arrived = reinterpret_cast<uint64_t*>(s_steps + num_steps * Shape::kStepBytes);
  }

  __device__ __forceinline__ uint8_t* weights(int step) const { return s_steps + step * Shape::kStepBytes; }
  __device__ __forceinline__ uint8_t* tokens(int step) const { return weights(step) + kGemmTileBytes; }
  __device__ __forceinline__ uint64_t& partials_arrived() const { return s_arrived[num_steps]; }

  __device__ __forceinline__ void load_weights(const uint8_t* g_weights, int row_tile) const {
    const int64_t first_tile = int64_t{row_tile} * kClusterSplits * num_steps + step_first;
    const uint8_t* g_step = g_weights + first_tile * kGemmTileBytes;
    for (int step = 0; step <= num_steps; ++step) ptx::mbarrier_init(s_arrived[step], 1);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async();
    for (int step = 0; step < num_steps; ++step, g_step += kGemmTileBytes) {
      ptx::mbarrier_arrive_expect_tx(s_arrived[step], Shape::kStepBytes);
      ptx::cp_async_bulk(weights(step), g_step, kGemmTileBytes, s_arrived[step], ptx::kEvictFirst);
    }
    ptx::mbarrier_arrive_expect_tx(partials_arrived(), Shape::kPartialBytes);
  }

  __device__ __forceinline__ void load_tokens(const CUtensorMap& map) const {
    for (int step = 0; step < num_steps; ++step) {
      ptx::cp_async_bulk_tensor_load(tokens(step), map, (step_first + step) * kGemmTileK, 0, s_arrived[step],
                                     ptx::kEvictNormal);
    }
  }

  __device__ __forceinline__ void begin(float (&r_step)[kRegisters], int step) const {
    const int half = static_cast<int>(threadIdx.x) / 128 * kWarpgroupBytes;
    ptx::mbarrier_wait_suspended(s_arrived[step], 0);
    Step::start(r_step, weights(step) + half, tokens(step));
  }

  template <int kPending>
  __device__ __forceinline__ static void add_step(float (&r_sum)[kRegisters], float (&r_step)[kRegisters]) {
    Step::template wait<kPending>(r_step);
#pragma unroll
    for (int index = 0; index < kRegisters; ++index) r_sum[index] = __fadd_rn(r_sum[index], r_step[index]);
  }

  __device__ __forceinline__ void multiply(float (&r_sum)[kRegisters]) const {
    float r_even[kRegisters];
    float r_odd[kRegisters];
#pragma unroll
    for (int index = 0; index < kRegisters; ++index) r_sum[index] = 0.0F;
    begin(r_even, 0);
    int step = 1;
    for (; step + 1 < num_steps; step += 2) {
      begin(r_odd, step);
      add_step<1>(r_sum, r_even);
      begin(r_even, step + 1);
      add_step<1>(r_sum, r_odd);
    }
    if (step < num_steps) {
      begin(r_odd, step);
      add_step<1>(r_sum, r_even);
      add_step<0>(r_sum, r_odd);
    } else {
      add_step<0>(r_sum, r_even);
    }
  }

  __device__ __forceinline__ void send(const float (&r_sum)[kRegisters]) const {
    const uint32_t owner = threadIdx.x / 32;
    const uint8_t* s_target = s_partials + ptx::cluster_ctarank() * Shape::kFragmentBytes + threadIdx.x % 32 * 16;
    const uint32_t target = ptx::mapa(ptx::shared_address(s_target), owner);
    const uint32_t barrier = ptx::mapa(ptx::shared_address(&partials_arrived()), owner);
#pragma unroll
    for (int group = 0; group < Shape::kGroups; ++group) {
      ptx::st_async(target + group * 512, r_sum + group * 4, barrier);
    }
  }

  __device__ __forceinline__ void reduce(float (&r_sum)[4], int group) const {
    const auto* s_fragments = reinterpret_cast<const float4*>(s_partials) + group * 32 + threadIdx.x % 32;
    ptx::mbarrier_wait_suspended(partials_arrived(), 0);
    float4 sum = s_fragments[0];
#pragma unroll
    for (int split = 1; split < kClusterSplits; ++split) {
      const float4 next = s_fragments[split * (Shape::kFragmentBytes / 16)];
      sum = {__fadd_rn(sum.x, next.x), __fadd_rn(sum.y, next.y), __fadd_rn(sum.z, next.z), __fadd_rn(sum.w, next.w)};
    }
    r_sum[0] = sum.x;
    r_sum[1] = sum.y;
    r_sum[2] = sum.z;
    r_sum[3] = sum.w;
  }
};

template <class Shape, class Epilogue>
__global__ void __launch_bounds__(kClusterSplitKThreads, 1)
    gemm_cluster_split_k_kernel(const __grid_constant__ GemmInputs inputs, const __grid_constant__ CUtensorMap tokens,
                                const __grid_constant__ Epilogue epilogue, int num_tokens) {
  extern __shared__ __align__(1024) uint8_t s_bytes[];
  const ClusterSplit<Shape> split(s_bytes, inputs.split_steps);
  const GemmTile tile = {{0, 0, num_tokens, 0}, static_cast<int32_t>(blockIdx.x) / kClusterSplits};
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(tokens);
    split.load_weights(inputs.weights, tile.row_tile);
  }
  __syncwarp();
  const int fragment = static_cast<int>(ptx::cluster_ctarank());
  const int group = static_cast<int>(threadIdx.x) / 32;
  const int column = group * kFragmentTokens + static_cast<int>(threadIdx.x) % 4 * 2;
  const typename Epilogue::RowMetadata rows = epilogue.row_metadata(tile, fragment);
  ptx::barrier_cluster_sync_relaxed();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) split.load_tokens(tokens);
  __syncwarp();
  const float2 scales = {epilogue.token_scale(epilogue.scale_place(tile, column)),
                         epilogue.token_scale(epilogue.scale_place(tile, column + 1))};
  float r_sum[Shape::kTokens / 2];
  split.multiply(r_sum);
  split.send(r_sum);
  if (group >= Shape::kGroups) return;
  float r_reduced[4];
  split.reduce(r_reduced, group);
  epilogue.store_group(tile, fragment, column, r_reduced, rows, scales);
}

template <class Shape, class Epilogue>
void launch_gemm_cluster_split_k(const GemmInputs& inputs, const Epilogue& epilogue, int32_t num_tokens,
                                 int32_t row_tiles, cudaStream_t stream) {
  const auto kernel = gemm_cluster_split_k_kernel<Shape, Epilogue>;
  static PerDevice most_bytes;
  most_bytes.get([kernel] {
    GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimitBytes));
    return kSharedLimitBytes;
  });
  const CUtensorMap tokens = token_map(inputs, num_tokens, Shape::kTokens);
  launch_dependent(kernel,
                   {static_cast<unsigned>(row_tiles * kClusterSplits), kClusterSplitKThreads,
                    Shape::shared_bytes(inputs.split_steps), kClusterSplits},
                   stream, inputs, tokens, epilogue, num_tokens);
}

}
