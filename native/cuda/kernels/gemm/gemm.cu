#include <limits>

#include "cuda/kernels/gemm/gemm_cluster_split_k.cuh"
#include "cuda/kernels/gemm/gemm_persistent.cuh"
#include "cuda/kernels/gemm/gemm_resident.cuh"
#include "cuda/kernels/gemm/gemm_split_k_tiles.cuh"

namespace glint::cuda {

namespace {

struct GemmEpilogue {
  float* out;
  int64_t out_stride;
  const float* token_scales;
  const float* row_scales;
  const float* bias;
  int32_t num_rows;
  bool has_vector_rows;

  struct RowMetadata {
    float scales[2];
    float shifts[2];
  };

  __device__ __forceinline__ RowMetadata row_metadata(const GemmTile& tile, int fragment) const {
    return metadata_of_rows(row_of(tile, fragment, 0), 8);
  }

  __device__ __forceinline__ RowMetadata metadata_of_rows(int first, int distance) const {
    RowMetadata metadata = {{1.0F, 1.0F}, {0.0F, 0.0F}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + half * distance;
      if (row >= num_rows) continue;
      if (row_scales != nullptr) metadata.scales[half] = __ldg(row_scales + row);
      if (bias != nullptr) metadata.shifts[half] = __ldg(bias + row);
    }
    return metadata;
  }

  __device__ __forceinline__ int32_t scale_place(const GemmTile& tile, int column) const {
    return column < tile.tokens.row_count ? tile.tokens.row_first + column : -1;
  }

  __device__ __forceinline__ float token_scale(int32_t place) const {
    return token_scales == nullptr || place < 0 ? 1.0F : __ldcg(token_scales + place);
  }

  __device__ __forceinline__ void store_group(const GemmTile& tile, int fragment, int column, const float* r_sum,
                                              const RowMetadata& rows, const float2& scales) const {
    const float token_scales_of_pair[2] = {scales.x, scales.y};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(tile, fragment, half);
      if (row >= num_rows) continue;
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        if (column + next >= tile.tokens.row_count) continue;
        out[(tile.tokens.row_first + column + next) * out_stride + row] =
            value(r_sum[half * 2 + next], token_scales_of_pair[next], rows, half);
      }
    }
  }

  __device__ __forceinline__ void store_rows(int64_t token, int row, const float4& values) const {
    float* g_row = out + token * out_stride + row;
    if (has_vector_rows && row + 4 <= num_rows) {
      *reinterpret_cast<float4*>(g_row) = values;
      return;
    }
    if (row < num_rows) g_row[0] = values.x;
    if (row + 1 < num_rows) g_row[1] = values.y;
    if (row + 2 < num_rows) g_row[2] = values.z;
    if (row + 3 < num_rows) g_row[3] = values.w;
  }

  __device__ __forceinline__ float value(float sum, float token_scale, const RowMetadata& rows, int half) const {
    return __fadd_rn(__fmul_rn(__fmul_rn(sum, token_scale), rows.scales[half]), rows.shifts[half]);
  }

  __device__ __forceinline__ int row_of(const GemmTile& tile, int fragment, int half) const {
    return tile.row_tile * kGemmTileRows + fragment * kFragmentRows + threadIdx.x % 32 / 4 + half * 8;
  }
};

CUtensorMap tensor_out(const GemmCall& call, int32_t tile_tokens) {
  return make_tensor_map(call.out, {.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                    .columns = static_cast<cuuint64_t>(call.rows),
                                    .rows = static_cast<cuuint64_t>(call.num_tokens),
                                    .row_bytes = static_cast<cuuint64_t>(call.out_stride) * sizeof(float),
                                    .box_columns = kStagedRows,
                                    .box_rows = static_cast<cuuint32_t>(tile_tokens)});
}

struct StagedEpilogue : GemmEpilogue {
  CUtensorMap out_map;
};

struct DenseLaunch {
  const GemmCall& call;
  const GemmInputs& inputs;
  cudaStream_t stream;

  int32_t row_tiles() const { return static_cast<int32_t>((call.rows + kGemmTileRows - 1) / kGemmTileRows); }
  bool has_vector_rows() const { return call.out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(call.out) % 16 == 0; }
  DenseTileScheduler scheduler(int32_t max_tokens) const {
    return {row_tiles(), static_cast<int32_t>(call.num_tokens), max_tokens};
  }
  GemmEpilogue epilogue() const {
    return {call.out,         call.out_stride, call.token_scales,
            call.row_scales,  call.bias,       static_cast<int32_t>(call.rows),
            has_vector_rows()};
  }
};

template <class Shape>
void launch_shape(const DenseLaunch& dense) {
  const DenseTileScheduler scheduler = dense.scheduler(Shape::kMaxTokens);
  launch_gemm_split_k_tiles<Shape>(dense.inputs, scheduler, dense.epilogue(), scheduler.num_tiles(), dense.stream);
}

template <class Shape>
bool launch_cluster_split_k_if_it_fits(const DenseLaunch& dense) {
  const auto tokens = static_cast<int32_t>(dense.call.num_tokens);
  if (tokens > Shape::kTokens || !Shape::fits(dense.inputs.split_steps)) return false;
  launch_gemm_cluster_split_k<Shape>(dense.inputs, dense.epilogue(), tokens, dense.row_tiles(), dense.stream);
  return true;
}

template <Multiply kMultiply, GemmElement kElement>
bool launch_cluster_split_k(const DenseLaunch& dense) {
  return launch_cluster_split_k_if_it_fits<ClusterSplitKShape<kMultiply, kElement, 8>>(dense) ||
         launch_cluster_split_k_if_it_fits<ClusterSplitKShape<kMultiply, kElement, 16>>(dense) ||
         launch_cluster_split_k_if_it_fits<ClusterSplitKShape<kMultiply, kElement, 32>>(dense) ||
         launch_cluster_split_k_if_it_fits<ClusterSplitKShape<kMultiply, kElement, 64>>(dense);
}

template <Multiply kMultiply, GemmElement kElement>
void launch_split_k(const DenseLaunch& dense) {
  const int64_t tokens = dense.call.num_tokens;
  const bool is_one_round = dense.row_tiles() * kClusterSplits <= device_multiprocessors();
  if (is_one_round && launch_cluster_split_k<kMultiply, kElement>(dense)) return;
  const bool takes_all_tokens = tokens > 32 && is_one_round;
  if (tokens <= 16) {
    launch_shape<SplitKTilesShape<kMultiply, kElement, 16>>(dense);
  } else if (tokens <= 64 && dense.call.rows < 8192 && !takes_all_tokens) {
    launch_shape<SplitKTilesShape<kMultiply, kElement, 32>>(dense);
  } else {
    launch_shape<SplitKTilesShape<kMultiply, kElement, 64>>(dense);
  }
}

template <class Shape>
bool launch_resident_if_it_fits(const DenseLaunch& dense) {
  const auto tokens = static_cast<int32_t>(dense.call.num_tokens);
  if (tokens > Shape::kTokens || !Shape::fits(dense.inputs.split_steps)) return false;
  launch_gemm_resident<Shape>(dense.inputs, dense.epilogue(), tokens, dense.stream);
  return true;
}

template <Multiply kMultiply, GemmElement kElement>
bool launch_resident(const DenseLaunch& dense) {
  return launch_resident_if_it_fits<ResidentShape<kMultiply, kElement, 8>>(dense) ||
         launch_resident_if_it_fits<ResidentShape<kMultiply, kElement, 16>>(dense) ||
         launch_resident_if_it_fits<ResidentShape<kMultiply, kElement, 32>>(dense) ||
         launch_resident_if_it_fits<ResidentShape<kMultiply, kElement, 64>>(dense);
}

int32_t persistent_tile_tokens(const DenseLaunch& dense, int64_t fixed_cost_tokens) {
  const int64_t blocks = device_multiprocessors();
  int32_t best = kPersistentTokens;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int32_t tokens : {kPersistentTokens, 112, 96, 64, 32}) {
    const int64_t rounds = (dense.scheduler(tokens).num_tiles() + blocks - 1) / blocks;
    const int64_t cost = rounds * (fixed_cost_tokens + tokens);
    if (cost < least) {
      least = cost;
      best = tokens;
    }
  }
  return best;
}

template <Multiply kMultiply, GemmElement kElement>
void launch_persistent(const DenseLaunch& dense) {
  constexpr int64_t kFixedCostTokens = PersistentTeams<kMultiply>::kFixedCostTokens;
  const DenseTileScheduler scheduler = dense.scheduler(persistent_tile_tokens(dense, kFixedCostTokens));
  const TensorTokens tokens = {token_map(dense.inputs, dense.call.num_tokens, scheduler.max_tokens)};
  if (kElement == GemmElement::kE4m3 && dense.has_vector_rows() && dense.call.rows % 4 == 0) {
    const StagedEpilogue epilogue = {dense.epilogue(), tensor_out(dense.call, scheduler.max_tokens)};
    launch_gemm_persistent<PersistentShape<kMultiply, GemmElement::kE4m3, TensorTokens, true>>(
        dense.inputs, tokens, scheduler, epilogue, scheduler.num_tiles(), dense.stream);
  } else {
    launch_gemm_persistent<PersistentShape<kMultiply, kElement, TensorTokens, false>>(
        dense.inputs, tokens, scheduler, dense.epilogue(), scheduler.num_tiles(), dense.stream);
  }
}

bool is_split_k(const DenseLaunch& dense) {
  constexpr int64_t kFewestRowTileTokens = 2560;
  const int64_t tokens = dense.call.num_tokens;
  const bool has_few_tokens = tokens <= 64 || dense.row_tiles() * tokens < kFewestRowTileTokens;
  return dense.inputs.num_splits == kClusterSplits && has_few_tokens;
}

template <Multiply kMultiply, GemmElement kElement>
void launch_element(const DenseLaunch& dense) {
  if (is_split_k(dense)) {
    launch_split_k<kMultiply, kElement>(dense);
  } else if (dense.inputs.num_splits != kResidentSplits || !launch_resident<kMultiply, kElement>(dense)) {
    launch_persistent<kMultiply, kElement>(dense);
  }
}

}

template <Multiply kMultiply>
void launch_gemm_with(const GemmCall& call, cudaStream_t stream) {
  require_argument(call.k_bytes % kGemmTileK == 0, "a GEMM's row must be a multiple of ", kGemmTileK, " bytes, not ",
                   call.k_bytes, "; pad the weight with zeros");
  if (call.num_tokens == 0) return;
  const KSplitPlan plan = plan_k_splits(call.k_bytes);
  const GemmInputs inputs = {call.packed_weights, call.activations, nullptr,
                             call.k_bytes,        plan.split_steps, plan.num_splits};
  if (call.element == GemmElement::kE4m3) {
    launch_element<kMultiply, GemmElement::kE4m3>({call, inputs, stream});
  } else {
    launch_element<kMultiply, GemmElement::kBf16>({call, inputs, stream});
  }
}

template void launch_gemm_with<Multiply::GLINT_MULTIPLY>(const GemmCall& call, cudaStream_t stream);

}
