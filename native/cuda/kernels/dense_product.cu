#include "cuda/kernels/launch_product.cuh"

namespace glint::cuda {

namespace {

struct DenseFinish {
  float* out;
  int64_t out_stride;
  const float* token_scales;
  const float* row_scales;
  const float* bias;
  int32_t num_rows;

  struct RowFacts {
    float scales[2];
    float shifts[2];
  };

  __device__ __forceinline__ RowFacts row_facts(const ProductTile& tile, int fragment) const {
    RowFacts facts = {{1.0F, 1.0F}, {0.0F, 0.0F}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(tile, fragment, half);
      if (row >= num_rows) continue;
      if (row_scales != nullptr) facts.scales[half] = __ldg(row_scales + row);
      if (bias != nullptr) facts.shifts[half] = __ldg(bias + row);
    }
    return facts;
  }

  __device__ __forceinline__ float token_scale(const ProductTile& tile, int column) const {
    if (token_scales == nullptr || column >= tile.tokens.row_count) return 1.0F;
    return __ldg(token_scales + tile.tokens.row_first + column);
  }

  __device__ __forceinline__ void store_group(const ProductTile& tile, int fragment, int column, const float* r_sum,
                                              const RowFacts& rows, const float2& scales) const {
    const float token_scales_of_pair[2] = {scales.x, scales.y};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(tile, fragment, half);
      if (row >= num_rows) continue;
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        if (column + next >= tile.tokens.row_count) continue;
        const float by_token = __fmul_rn(r_sum[half * 2 + next], token_scales_of_pair[next]);
        const float scaled = __fmul_rn(by_token, rows.scales[half]);
        out[(tile.tokens.row_first + column + next) * out_stride + row] = __fadd_rn(scaled, rows.shifts[half]);
      }
    }
  }

  __device__ __forceinline__ int row_of(const ProductTile& tile, int fragment, int half) const {
    return tile.row_tile * kProductTileRows + fragment * kFragmentRows + threadIdx.x % 32 / 4 + half * 8;
  }
};

template <hopper::Element kElement, int kMaxTokens, int kCluster>
void launch_shape(const DenseProductCall& call, const ProductInputs& inputs, cudaStream_t stream) {
  const auto row_tiles = static_cast<int32_t>((call.rows + kProductTileRows - 1) / kProductTileRows);
  const int64_t token_tiles = (call.num_tokens + kMaxTokens - 1) / kMaxTokens;
  const DenseWalk walk = {row_tiles, static_cast<int32_t>(call.num_tokens), kMaxTokens};
  const DenseFinish finish = {call.out,  call.out_stride, call.token_scales, call.row_scales,
                              call.bias, static_cast<int32_t>(call.rows)};
  launch_tile_product<ProductShape<kElement, kMaxTokens, kCluster>>(inputs, walk, finish, row_tiles * token_tiles,
                                                                    stream);
}

template <hopper::Element kElement, int kCluster>
void launch_spread(const DenseProductCall& call, const ProductInputs& inputs, cudaStream_t stream) {
  if (call.num_tokens <= 16) {
    launch_shape<kElement, 16, kCluster>(call, inputs, stream);
  } else if (call.num_tokens <= 64 && call.rows < 8192) {
    launch_shape<kElement, 32, kCluster>(call, inputs, stream);
  } else {
    launch_shape<kElement, 64, kCluster>(call, inputs, stream);
  }
}

bool has_enough_tiles(const DenseProductCall& call) {
  const int64_t tiles = ((call.rows + kProductTileRows - 1) / kProductTileRows) * ((call.num_tokens + 127) / 128);
  return call.num_tokens > 64 && tiles * 10 >= int64_t{device_multiprocessors()} * 9;
}

template <hopper::Element kElement>
void launch_element(const DenseProductCall& call, const ProductInputs& inputs, cudaStream_t stream) {
  if (has_enough_tiles(call) || inputs.num_pieces == 1) {
    launch_shape<kElement, 128, 1>(call, inputs, stream);
  } else if (inputs.num_pieces == 8) {
    launch_spread<kElement, 8>(call, inputs, stream);
  } else {
    launch_spread<kElement, 3>(call, inputs, stream);
  }
}

}

PiecePlan plan_pieces(int64_t k_bytes) {
  const auto steps = static_cast<int32_t>(k_bytes / kProductTileK);
  if (steps % 8 == 0 && steps >= 24) return {8, steps / 8};
  if (steps % 3 == 0 && steps >= 6) return {3, steps / 3};
  return {1, steps};
}

void launch_dense_product(const DenseProductCall& call, cudaStream_t stream) {
  require_argument(call.k_bytes % kProductTileK == 0, "a product's row must be a multiple of ", kProductTileK,
                   " bytes, not ", call.k_bytes, "; pad the weight with zeros");
  if (call.num_tokens == 0) return;
  const PiecePlan plan = plan_pieces(call.k_bytes);
  const ProductInputs inputs = {call.packed_weights, call.activations, nullptr,
                                call.k_bytes,        plan.piece_steps, plan.num_pieces};
  if (call.element == ProductElement::kE4m3) {
    launch_element<hopper::Element::kE4m3>(call, inputs, stream);
  } else {
    launch_element<hopper::Element::kBf16>(call, inputs, stream);
  }
}

}
