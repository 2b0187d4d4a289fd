#include "base/contract.h"
#include "cuda/check.h"
#include "cuda/kernels/gemm/gemm_portable.h"
#include "cuda/kernels/gemm/gemm.h"
#include "model/weights.h"
#include "testing/cuda/operand.h"

namespace {

using glint::cuda::GemmElement;
using glint::testing::DeviceArray;
using glint::testing::guarded;
using glint::testing::Operand;
using glint::testing::Runner;
using glint::testing::TestGemm;

int64_t tiles_over(int64_t length) { return (length + glint::kScaleTile - 1) / glint::kScaleTile; }

const TestGemm& checked(const TestGemm& test) {
  glint::require_argument(test.input_rows == nullptr && test.input_count == test.count &&
                              test.row_count == test.weight_rows && test.col_count == test.weight_cols,
                          "a CUDA GEMM takes all rows of its input and the whole weight; give neither input_rows "
                          "nor slices");
  return test;
}

bool runs_tiled(const Runner& runner, const TestGemm& test) {
  const int64_t element_bytes = test.dtype == GLINT_DTYPE_BF16 ? 2 : 1;
  const bool is_taken =
      test.scale_kind != GLINT_SCALE_TILE && glint::cuda::is_tiled_k(test.weight_cols * element_bytes);
  glint::require_argument(is_taken || runner.is_fallback(), "the tiled GEMM refuses ", test.weight_cols,
                          " columns with scales of kind ", test.scale_kind, "; run the fallback");
  return !runner.is_fallback();
}

std::vector<float> device_scales(const TestGemm& test) {
  const auto rows = static_cast<size_t>(test.weight_rows);
  const int64_t tiles = tiles_over(test.weight_rows) * tiles_over(test.weight_cols);
  if (test.scale_kind == GLINT_SCALE_NONE) return {};
  if (test.scale_kind == GLINT_SCALE_TENSOR) return std::vector<float>(rows, *test.scales);
  return {test.scales, test.scales + (test.scale_kind == GLINT_SCALE_TILE ? tiles : test.weight_rows)};
}

class Gemm {
 public:
  Gemm(const Runner& runner, const TestGemm& test)
      : test_(checked(test)),
        element_(test.dtype == GLINT_DTYPE_BF16 ? GemmElement::kBf16 : GemmElement::kE4m3),
        multiply_(runner.multiply()),
        is_tiled_(runs_tiled(runner, test)),
        row_bytes_(test.weight_cols * (test.dtype == GLINT_DTYPE_BF16 ? 2 : 1)),
        operand_({.out = nullptr,
                  .scales = nullptr,
                  .in = test.in,
                  .count = test.count,
                  .width = test.weight_cols,
                  .row_slices = 1,
                  .has_fp8 = test.dtype == GLINT_DTYPE_BF16 ? 0 : 1}),
        packed_(is_tiled_ ? glint::cuda::packed_weight_bytes(test.weight_rows, row_bytes_)
                          : glint::cuda::portable_weight_bytes(test.weight_rows, test.weight_cols, element_)),
        scales_(device_scales(test)),
        bias_(test.bias, test.weight_rows),
        out_(test.count * test.out_stride) {
    const DeviceArray<std::byte> weight(test.weight, test.weight_rows * row_bytes_);
    const auto* bytes = reinterpret_cast<const uint8_t*>(weight.data());
    if (is_tiled_) {
      glint::cuda::launch_pack_rows({.packed = packed_.data(),
                                     .weights = bytes,
                                     .up_weights = nullptr,
                                     .rows = test.weight_rows,
                                     .k_bytes = row_bytes_,
                                     .num_matrices = 1},
                                    nullptr);
    } else {
      glint::cuda::launch_portable_pack({.packed = packed_.data(),
                                         .weights = bytes,
                                         .rows = test.weight_rows,
                                         .cols = test.weight_cols,
                                         .weight_stride_bytes = 0,
                                         .element = element_},
                                        nullptr);
    }
    operand_.launch();
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  }

  void launch(int64_t num_tokens) const { is_tiled_ ? launch_tiled(num_tokens) : launch_portable(num_tokens); }
  const DeviceArray<float>& out() const { return out_; }

 private:
  const float* scale_data() const { return test_.scale_kind == GLINT_SCALE_NONE ? nullptr : scales_.data(); }

  void launch_tiled(int64_t num_tokens) const {
    glint::cuda::launch_gemm({.out = out_.data(),
                              .out_stride = test_.out_stride,
                              .packed_weights = packed_.data(),
                              .row_scales = scale_data(),
                              .bias = bias_.data(),
                              .activations = operand_.row_data(),
                              .token_scales = operand_.scale_data(),
                              .rows = test_.weight_rows,
                              .k_bytes = glint::cuda::padded_k_bytes(row_bytes_),
                              .num_tokens = num_tokens,
                              .element = element_,
                              .multiply = multiply_},
                             nullptr);
  }

  glint::cuda::PortableWeight portable_weight() const {
    const bool has_tiles = test_.scale_kind == GLINT_SCALE_TILE;
    const bool has_scales = test_.scale_kind != GLINT_SCALE_NONE;
    return {.packed = packed_.data(),
            .scales = scale_data(),
            .rows = test_.weight_rows,
            .cols = test_.weight_cols,
            .element = element_,
            .scale_kind = has_tiles    ? GLINT_SCALE_TILE
                          : has_scales ? GLINT_SCALE_CHANNEL
                                       : GLINT_SCALE_NONE,
            .scale_stride = has_tiles ? tiles_over(test_.weight_cols) : 0,
            .matrix_bytes = packed_.count(),
            .matrix_scales = scales_.count()};
  }

  void launch_portable(int64_t num_tokens) const {
    glint::cuda::launch_gemm_portable({.out = out_.data(),
                                       .out_stride = test_.out_stride,
                                       .weight = portable_weight(),
                                       .bias = bias_.data(),
                                       .activations = operand_.row_data(),
                                       .activation_stride_bytes = operand_.row_bytes(),
                                       .token_scales = operand_.scale_data(),
                                       .num_tokens = num_tokens,
                                       .row_tokens = nullptr,
                                       .tiles = nullptr,
                                       .num_tiles = nullptr,
                                       .max_tiles = 0,
                                       .tile_tokens = 0},
                                      nullptr);
  }

  const TestGemm& test_;
  GemmElement element_;
  glint::cuda::Multiply multiply_;
  bool is_tiled_;
  int64_t row_bytes_;
  Operand operand_;
  DeviceArray<uint8_t> packed_;
  DeviceArray<float> scales_;
  DeviceArray<float> bias_;
  DeviceArray<float> out_;
};

}

extern "C" {

GLINT_API int32_t glint_testing_gemms(Runner* runner, const TestGemm* gemms, int32_t count) {
  return guarded([&] {
    for (int32_t index = 0; index < count; ++index) {
      const Gemm gemm(*runner, gemms[index]);
      runner->run([&] { gemm.launch(gemms[index].count); }, {&gemm.out()});
      gemm.out().download(gemms[index].out);
    }
  });
}

GLINT_API int32_t glint_testing_gemm_row_counts(Runner* runner, const TestGemm* test) {
  return guarded([&] {
    const Gemm gemm(*runner, *test);
    runner->run_row_counts([&](int64_t count) { gemm.launch(count); }, gemm.out(), test->count);
  });
}
}
