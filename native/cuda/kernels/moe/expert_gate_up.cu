#include "cuda/kernels/moe/experts.h"
#include "cuda/kernels/gemm/gemm_persistent.cuh"
#include "cuda/kernels/gemm/gemm_split_k_tiles.cuh"

namespace glint::cuda {

namespace {

constexpr int kFewStages = 3;

__device__ __forceinline__ float quotient_of_sigmoid(float gate, float divisor) {
  const float quarter = __fmul_rn(divisor, 0.25F);
  const float value = __fmul_rn(gate, 0.25F);
  const float near = ptx::rcp_approx(quarter);
  const float reciprocal = __fmaf_rn(near, __fmaf_rn(-quarter, near, 1.0F), near);
  const float quotient = __fmul_rn(value, reciprocal);
  const float nearer = __fmaf_rn(reciprocal, __fmaf_rn(-quarter, quotient, value), quotient);
  return isnan(nearer) ? __fmul_rn(value, near) : nearer;
}

__device__ __forceinline__ float swiglu(float gate, float up) {
  return __fmul_rn(quotient_of_sigmoid(gate, __fadd_rn(1.0F, expf(-gate))), up);
}

__device__ __forceinline__ float never_unwritten(float value) { return value == 0.0F ? -0.0F : value; }

struct SwigluEpilogue {
  float* hidden;
  const float* gate_scales;
  const float* up_scales;
  const float* token_scales;
  const int32_t* row_tokens;
  int32_t width;

  struct RowMetadata {
    float gate_scale;
    float up_scale;
  };

  __device__ __forceinline__ RowMetadata row_metadata(const GemmTile& tile, int fragment) const {
    const int unit = unit_of(tile, fragment);
    if (unit >= width) return {0.0F, 0.0F};
    const int64_t index = int64_t{tile.tokens.expert} * width + unit;
    return {__ldg(gate_scales + index), __ldg(up_scales + index)};
  }

  __device__ __forceinline__ int32_t scale_place(const GemmTile& tile, int column) const {
    return column < tile.tokens.row_count ? __ldcg(row_tokens + tile.tokens.row_first + column) : -1;
  }

  __device__ __forceinline__ float token_scale(int32_t place) const {
    return place < 0 ? 1.0F : __ldcg(token_scales + place);
  }

  __device__ __forceinline__ void store_group(const GemmTile& tile, int fragment, int column, const float* r_sum,
                                              const RowMetadata& rows, const float2& scales) const {
    const int unit = unit_of(tile, fragment);
    const float token_scales_of_pair[2] = {scales.x, scales.y};
    float* g_unit = hidden + int64_t{tile.tokens.row_first} * width + unit;
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const float gate = __fmul_rn(__fmul_rn(r_sum[next], token_scales_of_pair[next]), rows.gate_scale);
      const float up = __fmul_rn(__fmul_rn(r_sum[2 + next], token_scales_of_pair[next]), rows.up_scale);
      const bool is_stored = unit < width && column + next < tile.tokens.row_count;
      ptx::st_relaxed_gpu_if(is_stored, g_unit + (column + next) * width, never_unwritten(swiglu(gate, up)));
    }
  }

  __device__ __forceinline__ int unit_of(const GemmTile& tile, int fragment) const {
    return tile.row_tile * (kGemmTileRows / 2) + fragment * 8 + threadIdx.x % 32 / 4;
  }
};

struct GateUpLaunch {
  const GateUpCall& call;
  const GemmInputs& inputs;
  cudaStream_t stream;

  int32_t row_tiles() const { return static_cast<int32_t>((call.width + kGemmTileRows / 2 - 1) / (kGemmTileRows / 2)); }
  int64_t max_tiles() const { return call.max_tiles * row_tiles(); }
  SwigluEpilogue epilogue() const {
    return {call.hidden,       call.gate_scales,        call.up_scales,
            call.token_scales, call.grouped.row_tokens, static_cast<int32_t>(call.width)};
  }
};

template <class Shape>
void launch_split_k(const GateUpLaunch& gate_up) {
  const GroupedTokens& grouped = gate_up.call.grouped;
  const ExpertTileScheduler scheduler = {gate_up.row_tiles(), grouped.gate_up_tiles, grouped.num_gate_up_tiles,
                                         grouped.row_tokens, gate_up.call.tiles_taken};
  launch_gemm_split_k_tiles<Shape>(gate_up.inputs, scheduler, gate_up.epilogue(), gate_up.max_tiles(), gate_up.stream);
}

template <Multiply kMultiply>
void launch_persistent(const GateUpLaunch& gate_up) {
  const GroupedTokens& grouped = gate_up.call.grouped;
  const PersistentExpertScheduler scheduler = {gate_up.row_tiles(), grouped.gate_up_tiles, grouped.num_gate_up_tiles};
  launch_gemm_persistent<PersistentShape<kMultiply, GemmElement::kE4m3, GatheredTokens, false>>(
      gate_up.inputs, GatheredTokens{}, scheduler, gate_up.epilogue(), gate_up.max_tiles(), gate_up.stream);
}

}

template <Multiply kMultiply>
void launch_expert_gate_up_with(const GateUpCall& call, cudaStream_t stream) {
  const KSplitPlan plan = plan_k_splits(call.k_bytes);
  require_argument(call.k_bytes % kGemmTileK == 0 && plan.num_splits == 8, "an expert's input of ", call.k_bytes,
                   " values does not split in 8 splits of 128; only hidden sizes that are multiples of 1024 from 3072 "
                   "run on this kernel");
  require_argument(call.tiles_taken != nullptr,
                   "gate+up without a counter of taken tiles; give it a word of device "
                   "memory that was zero before the first call");
  require_argument(call.width % 16 == 0, "an expert's width must be a multiple of 16, not ", call.width);
  const GemmInputs inputs = {call.packed_weights, call.activations, call.grouped.row_tokens,
                             call.k_bytes,        plan.split_steps, plan.num_splits};
  const GateUpLaunch gate_up = {call, inputs, stream};
  const int32_t tile_tokens = plan_tiles(call.num_tokens).gate_up_tokens;
  if (tile_tokens == 16) {
    launch_split_k<SplitKTilesShape<kMultiply, GemmElement::kE4m3, 16, kFewStages>>(gate_up);
  } else if (tile_tokens == 32) {
    launch_split_k<SplitKTilesShape<kMultiply, GemmElement::kE4m3, 32>>(gate_up);
  } else {
    launch_persistent<kMultiply>(gate_up);
  }
}

template void launch_expert_gate_up_with<Multiply::GLINT_MULTIPLY>(const GateUpCall& call, cudaStream_t stream);

}
