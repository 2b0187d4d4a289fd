#include <algorithm>

#include "cuda/check.h"
#include "cuda/kernels/gemm/quantise.h"
#include "model/weights.h"
#include "testing/cuda/experts.h"

namespace {

using glint::cuda::GemmElement;
using glint::cuda::PortableWeight;
using glint::testing::DeviceArray;
using glint::testing::fp8_values;
using glint::testing::Grouping;
using glint::testing::guarded;
using glint::testing::Operand;
using glint::testing::Runner;
using glint::testing::TestExperts;

int64_t tiles_over(int64_t length) { return (length + glint::kScaleTile - 1) / glint::kScaleTile; }

GemmElement element_of(const TestExperts& test) { return test.has_fp8() ? GemmElement::kE4m3 : GemmElement::kBf16; }

class Matrices {
 public:
  Matrices(const TestExperts& test, const std::byte* weights, const float* scales, int64_t rows, int64_t cols)
      : rows_(rows),
        cols_(cols),
        element_(element_of(test)),
        scale_kind_(test.scale_kind),
        matrix_bytes_(glint::cuda::portable_weight_bytes(rows, cols, element_)),
        packed_(test.num_matrices() * matrix_bytes_),
        scales_(scales, test.num_matrices() * matrix_scales()) {
    const DeviceArray<std::byte> plain(weights, test.num_matrices() * test.matrix_bytes());
    for (int64_t matrix = 0; matrix < test.num_matrices(); ++matrix) {
      glint::cuda::launch_portable_pack(
          {.packed = packed_.data() + matrix * matrix_bytes_,
           .weights = reinterpret_cast<const uint8_t*>(plain.data() + matrix * test.matrix_bytes()),
           .rows = rows,
           .cols = cols,
           .weight_stride_bytes = 0,
           .element = element_},
          nullptr);
    }
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  }

  int64_t rows() const { return rows_; }

  PortableWeight weight() const {
    return {.packed = packed_.data(),
            .scales = scales_.data(),
            .rows = rows_,
            .cols = cols_,
            .element = element_,
            .scale_kind = scale_kind_,
            .scale_stride = has_tiles() ? tiles_over(cols_) : 0,
            .matrix_bytes = matrix_bytes_,
            .matrix_scales = matrix_scales()};
  }

 private:
  bool has_tiles() const { return scale_kind_ == GLINT_SCALE_TILE; }
  int64_t matrix_scales() const { return has_tiles() ? tiles_over(rows_) * tiles_over(cols_) : rows_; }

  int64_t rows_;
  int64_t cols_;
  GemmElement element_;
  int32_t scale_kind_;
  int64_t matrix_bytes_;
  DeviceArray<uint8_t> packed_;
  DeviceArray<float> scales_;
};

class PortableExperts {
 public:
  explicit PortableExperts(const TestExperts& test)
      : test_(test),
        grouping_(*test.grouping),
        operand_({.out = nullptr,
                  .scales = nullptr,
                  .in = test.in,
                  .count = test.num_tokens(),
                  .width = test.hidden_size,
                  .row_slices = 1,
                  .has_fp8 = test.has_fp8() ? 1 : 0}),
        gate_weights_(test, test.gate_weights, test.gate_scales, test.width, test.hidden_size),
        up_weights_(test, test.up_weights, test.up_scales, test.width, test.hidden_size),
        down_weights_(test, test.down_weights, test.down_scales, test.hidden_size, test.width),
        gate_(test.num_pairs() * test.width),
        up_(test.num_pairs() * test.width),
        gated_bytes_(glint::cuda::portable_row_bytes(test.width, element_of(test))),
        gated_(test.num_pairs() * gated_bytes_),
        gated_scales_(test.num_pairs()),
        routed_(test.num_pairs() * test.hidden_size),
        token_rows_(glint::cuda::token_rows_count(test.num_tokens(), test.grouping->experts_per_token)),
        shared_(test.shared, test.num_tokens() * test.hidden_size),
        out_(test.num_tokens() * test.hidden_size) {
    operand_.launch();
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  }

  void launch(int64_t num_tokens) const {
    grouping_.launch(num_tokens);
    const int32_t* row_tokens = grouping_.grouped().row_tokens;
    const auto* rows = operand_.row_data();
    launch_grouped(num_tokens, gate_weights_, {rows, operand_.scale_data(), operand_.row_bytes()}, row_tokens, gate_);
    launch_grouped(num_tokens, up_weights_, {rows, operand_.scale_data(), operand_.row_bytes()}, row_tokens, up_);
    launch_swiglu(num_tokens);
    const float* scales = test_.has_fp8() ? gated_scales_.data() : nullptr;
    launch_grouped(num_tokens, down_weights_, {gated_.data(), scales, gated_bytes_}, nullptr, routed_);
    launch_combine(num_tokens);
  }

  void run(Runner& runner) const {
    runner.run([&] { launch(test_.num_tokens()); }, {&gate_, &up_, &gated_, &gated_scales_, &routed_, &out_});
    gate_.download(test_.gate);
    up_.download(test_.up);
    routed_.download(test_.routed);
    out_.download(test_.out);
    if (!test_.has_fp8()) return;
    std::ranges::copy(fp8_values(gated_), test_.fp8);
    gated_scales_.download(test_.fp8_scales);
  }

  void run_row_counts(Runner& runner) const {
    runner.run_row_counts([&](int64_t count) { launch(count); }, out_, test_.num_tokens());
  }

 private:
  struct Rows {
    const uint8_t* data;
    const float* scales;
    int64_t stride_bytes;
  };

  void launch_grouped(int64_t num_tokens, const Matrices& matrices, const Rows& rows, const int32_t* row_tokens,
                      const DeviceArray<float>& out) const {
    const glint::cuda::GroupedTokens grouped = grouping_.grouped();
    glint::cuda::launch_gemm_portable({.out = out.data(),
                                       .out_stride = matrices.rows(),
                                       .weight = matrices.weight(),
                                       .bias = nullptr,
                                       .activations = rows.data,
                                       .activation_stride_bytes = rows.stride_bytes,
                                       .token_scales = rows.scales,
                                       .num_tokens = num_tokens,
                                       .row_tokens = row_tokens,
                                       .tiles = grouped.gate_up_tiles,
                                       .num_tiles = grouped.num_gate_up_tiles,
                                       .max_tiles = grouping_.max_tiles(num_tokens),
                                       .tile_tokens = glint::cuda::plan_tiles(num_tokens).gate_up_tokens},
                                      nullptr);
  }

  void launch_swiglu(int64_t num_tokens) const {
    const int64_t rows = num_tokens * test_.grouping->experts_per_token;
    const bool has_fp8 = test_.has_fp8();
    glint::cuda::launch_swiglu({.out = has_fp8 ? nullptr : gate_.data(),
                                .fp8 = has_fp8 ? gated_.data() : nullptr,
                                .scales = gated_scales_.data(),
                                .gate = gate_.data(),
                                .up = up_.data(),
                                .in_stride = test_.width,
                                .count = rows,
                                .width = test_.width,
                                .row_slices = 1,
                                .slice_stride = gated_bytes_},
                               nullptr);
    if (has_fp8) return;
    glint::cuda::launch_to_bf16({.out = gated_.data(),
                                 .in = gate_.data(),
                                 .in_stride = test_.width,
                                 .count = rows,
                                 .width = test_.width,
                                 .out_stride_bytes = gated_bytes_},
                                nullptr);
  }

  void launch_combine(int64_t num_tokens) const {
    const glint::cuda::GroupedTokens grouped = grouping_.grouped();
    glint::cuda::launch_place_rows({.token_rows = token_rows_.data(),
                                    .row_tokens = grouped.row_tokens,
                                    .tiles = grouped.gate_up_tiles,
                                    .num_tiles = grouped.num_gate_up_tiles,
                                    .max_tiles = grouping_.max_tiles(num_tokens),
                                    .experts = grouping_.experts(),
                                    .experts_per_token = test_.grouping->experts_per_token,
                                    .expert_first = test_.grouping->expert_first,
                                    .expert_last = test_.grouping->expert_last},
                                   nullptr);
    glint::cuda::launch_combine_rows({.out = out_.data(),
                                      .routed = routed_.data(),
                                      .row_weights = grouped.row_weights,
                                      .token_rows = token_rows_.data(),
                                      .experts = grouping_.experts(),
                                      .shared = shared_.data(),
                                      .num_tokens = num_tokens,
                                      .hidden_size = test_.hidden_size,
                                      .experts_per_token = test_.grouping->experts_per_token,
                                      .expert_first = test_.grouping->expert_first,
                                      .expert_last = test_.grouping->expert_last,
                                      .has_shared = 0},
                                     nullptr);
  }

  const TestExperts& test_;
  Grouping grouping_;
  Operand operand_;
  Matrices gate_weights_;
  Matrices up_weights_;
  Matrices down_weights_;
  DeviceArray<float> gate_;
  DeviceArray<float> up_;
  int64_t gated_bytes_;
  DeviceArray<uint8_t> gated_;
  DeviceArray<float> gated_scales_;
  DeviceArray<float> routed_;
  DeviceArray<int32_t> token_rows_;
  DeviceArray<float> shared_;
  DeviceArray<float> out_;
};

}

extern "C" {

GLINT_API int32_t glint_testing_portable_experts(Runner* runner, const TestExperts* test) {
  return guarded([&] { PortableExperts(*test).run(*runner); });
}

GLINT_API int32_t glint_testing_portable_expert_row_counts(Runner* runner, const TestExperts* test) {
  return guarded([&] { PortableExperts(*test).run_row_counts(*runner); });
}
}
