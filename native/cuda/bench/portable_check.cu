#include "cuda/bench/portable_check.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdio>
#include <string>

namespace glint::cuda::bench {

namespace {

constexpr int64_t kGuardBytes = 1024;
constexpr int64_t kGuardColumns = 3;
constexpr int64_t kGuardRows = 2;
constexpr int64_t kMostTokens = 4096;
constexpr int64_t kReferenceTokens = 513;
constexpr double kErrorBound = 5e-6;

__device__ double element_value(const uint8_t* values, int64_t index, GemmElement element) {
  if (element == GemmElement::kBf16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(values)[index]);
  __nv_fp8_e4m3 code;
  code.__x = values[index];
  return static_cast<float>(code);
}

__global__ void portable_reference_kernel(double* out, const PortableGemmCall call, const uint8_t* source) {
  const PortableWeight& weight = call.weight;
  const int64_t output = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (output >= weight.rows * call.num_tokens) return;
  const int64_t row = output % weight.rows;
  const int64_t token = output / weight.rows;
  const uint8_t* g_token = call.activations + token * call.activation_stride_bytes;
  double sum = 0.0;
  for (int64_t k = threadIdx.x % 32; k < weight.cols; k += 32) {
    const bool has_tiles = weight.scale_kind == GLINT_SCALE_TILE;
    const int64_t tile = row / kPortableScaleTile * weight.scale_stride + k / kPortableScaleTile;
    const double product =
        element_value(source, row * weight.cols + k, weight.element) * element_value(g_token, k, weight.element);
    sum += has_tiles ? product * weight.scales[tile] : product;
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0U, sum, distance);
  if (call.token_scales != nullptr) sum *= call.token_scales[token];
  if (weight.scale_kind == GLINT_SCALE_CHANNEL) sum *= weight.scales[row];
  if (weight.scale_kind == GLINT_SCALE_TENSOR) sum *= weight.scales[0];
  if (call.bias != nullptr) sum += call.bias[row];
  if (threadIdx.x % 32 == 0) out[output] = sum;
}

struct GuardedOut {
  const uint32_t* out;
  const uint32_t* expected;
  int64_t rows;
  int64_t stride;
  int64_t num_tokens;
  int64_t count;
};

__global__ void count_wrong_kernel(unsigned long long* wrong, const GuardedOut check) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= check.count) return;
  const bool is_inside = index % check.stride < check.rows && index / check.stride < check.num_tokens;
  const uint32_t expected = is_inside ? check.expected[index] : 0xffffffffU;
  if (check.out[index] != expected) atomicAdd(wrong, 1ULL);
}

unsigned thread_blocks_for(int64_t count) { return static_cast<unsigned>((count + 255) / 256); }

}

void fill_elements(uint8_t* out, int64_t count, GemmElement element, RandomFill fill) {
  if (element == GemmElement::kBf16) return fill_bf16(reinterpret_cast<uint16_t*>(out), count, fill);
  fill_codes(out, count, {fill.seed, fill.spread * 100.0F});
}

PackedMatrices::PackedMatrices(const MatrixShape& shape, int64_t count, uint64_t seed)
    : shape_(shape),
      count_(count),
      source_(shape.rows * shape.row_bytes() * count + kGuardBytes),
      packed_(portable_weight_bytes(shape.rows, shape.cols, shape.element) * count + kGuardBytes),
      scales_(shape.num_scales() * count) {
  fill_elements(source_.data(), shape.rows * shape.cols * count, shape.element, {seed, 1.0F});
  fill_positive(scales_.data(), scales_.count(), {seed + 1, 1e-2F});
  for (int64_t matrix = 0; matrix < count; ++matrix) {
    launch_portable_pack({.packed = packed_.data() + matrix * weight(0).matrix_bytes,
                          .weights = source_.data() + matrix * shape.rows * shape.row_bytes(),
                          .rows = shape.rows,
                          .cols = shape.cols,
                          .weight_stride_bytes = 0,
                          .element = shape.element},
                         nullptr);
  }
  synchronize();
}

PortableWeight PackedMatrices::weight(int64_t first) const {
  const int64_t bytes = portable_weight_bytes(shape_.rows, shape_.cols, shape_.element);
  const bool has_scales = shape_.scale_kind != GLINT_SCALE_NONE;
  return {.packed = packed_.data() + first * bytes,
          .scales = has_scales ? scales_.data() + first * shape_.num_scales() : nullptr,
          .rows = shape_.rows,
          .cols = shape_.cols,
          .element = shape_.element,
          .scale_kind = shape_.scale_kind,
          .scale_stride = shape_.scale_tiles(),
          .matrix_bytes = bytes,
          .matrix_scales = has_scales ? shape_.num_scales() : 0};
}

bool PackedMatrices::has_guards_untouched() const {
  std::vector<uint8_t> guard(kGuardBytes);
  const uint8_t* end = packed_.data() + packed_.count() - kGuardBytes;
  GLINT_CHECK_CUDA(cudaMemcpy(guard.data(), end, guard.size(), cudaMemcpyDeviceToHost));
  return std::all_of(guard.begin(), guard.end(), [](uint8_t byte) { return byte == 0xff; });
}

namespace {

class DenseCase {
 public:
  DenseCase(const MatrixShape& shape, int64_t tokens, int64_t copies)
      : matrices_(shape, copies, 21),
        stride_bytes_(portable_row_bytes(shape.cols, shape.element)),
        activations_(tokens * stride_bytes_),
        token_scales_(tokens),
        bias_(shape.rows) {
    DeviceArray<uint8_t> dense(tokens * shape.row_bytes());
    fill_elements(dense.data(), tokens * shape.cols, shape.element, {31, 1.0F});
    copy_rows(activations_.data(), dense.data(), shape.row_bytes(), tokens);
    fill_positive(token_scales_.data(), tokens, {32, 1e-2F});
    fill_signed(bias_.data(), shape.rows, {33, 1.0F});
  }

  PortableGemmCall call(float* out, int64_t out_stride, int64_t num_tokens, int64_t copy) const {
    PortableGemmCall product{};
    product.out = out;
    product.out_stride = out_stride;
    product.weight = matrices_.weight(copy);
    product.bias = matrices_.shape().rows % 2 == 1 ? bias_.data() : nullptr;
    product.activations = activations_.data();
    product.activation_stride_bytes = stride_bytes_;
    product.token_scales = matrices_.shape().element == GemmElement::kE4m3 ? token_scales_.data() : nullptr;
    product.num_tokens = num_tokens;
    return product;
  }

  double error() const {
    const int64_t rows = matrices_.shape().rows;
    const int64_t count = rows * kReferenceTokens;
    const DeviceArray<float> out(count);
    const DeviceArray<double> reference(count);
    const PortableGemmCall product = call(out.data(), rows, kReferenceTokens, 0);
    launch_gemm_portable(product, nullptr);
    portable_reference_kernel<<<thread_blocks_for(count * 32), 256>>>(reference.data(), product, matrices_.source());
    synchronize();
    const Difference difference = compare(out.data(), reference.data(), count);
    return difference.num_wrong > 0 || !matrices_.has_guards_untouched() ? NAN : difference.relative_error;
  }

  int64_t count_wrong(int64_t num_tokens, const float* expected) const {
    const int64_t rows = matrices_.shape().rows;
    const int64_t stride = rows + kGuardColumns;
    const DeviceArray<uint8_t> activations((num_tokens + 64) * stride_bytes_);
    const DeviceArray<float> token_scales(num_tokens + 64);
    const DeviceArray<float> out(stride * (num_tokens + kGuardRows));
    copy_rows(activations.data(), activations_.data(), stride_bytes_, num_tokens);
    GLINT_CHECK_CUDA(cudaMemcpy(token_scales.data(), token_scales_.data(), static_cast<size_t>(num_tokens) * 4,
                                cudaMemcpyDeviceToDevice));
    PortableGemmCall product = call(out.data(), stride, num_tokens, 0);
    product.activations = activations.data();
    if (product.token_scales != nullptr) product.token_scales = token_scales.data();
    poison_shared_memory();
    launch_gemm_portable(product, nullptr);
    DeviceArray<unsigned long long> wrong(1);
    wrong.fill_bytes(0);
    const GuardedOut check = {reinterpret_cast<const uint32_t*>(out.data()),
                              reinterpret_cast<const uint32_t*>(expected), rows, stride, num_tokens, out.count()};
    count_wrong_kernel<<<thread_blocks_for(out.count()), 256>>>(wrong.data(), check);
    synchronize();
    return static_cast<int64_t>(wrong.to_host()[0]);
  }

 private:
  void copy_rows(uint8_t* out, const uint8_t* in, int64_t in_stride, int64_t rows) const {
    GLINT_CHECK_CUDA(cudaMemcpy2D(out, static_cast<size_t>(stride_bytes_), in, static_cast<size_t>(in_stride),
                                  static_cast<size_t>(matrices_.shape().row_bytes()), static_cast<size_t>(rows),
                                  cudaMemcpyDeviceToDevice));
  }

  PackedMatrices matrices_;
  int64_t stride_bytes_;
  DeviceArray<uint8_t> activations_;
  DeviceArray<float> token_scales_;
  DeviceArray<float> bias_;
};

bool check_shape(const MatrixShape& shape, double& worst) {
  const DenseCase dense(shape, kMostTokens, 1);
  const int64_t stride = shape.rows + kGuardColumns;
  const DeviceArray<float> expected(stride * kMostTokens);
  launch_gemm_portable(dense.call(expected.data(), stride, kMostTokens, 0), nullptr);
  synchronize();
  const double error = dense.error();
  worst = std::max(worst, error);
  int64_t wrong = 0;
  for (const int64_t tokens : {1, 2, 7, 8, 9, 16, 24, 33, 64, 130, 513, 4096}) {
    wrong += dense.count_wrong(tokens, expected.data());
  }
  const bool holds = error < kErrorBound && wrong == 0;
  if (!holds) {
    std::printf("WRONG %lld x %lld element %d scales %d: error %g, %lld values differ or guards touched\n",
                static_cast<long long>(shape.rows), static_cast<long long>(shape.cols),
                static_cast<int>(shape.element), shape.scale_kind, error, static_cast<long long>(wrong));
  }
  return holds;
}

struct Kind {
  const char* name;
  GemmElement element;
  int32_t scale_kind;
};

bool check_dense(const std::vector<int64_t>& row_counts, const std::vector<int64_t>& col_counts) {
  const std::vector<Kind> kinds = {{"E4M3, scales by channel", GemmElement::kE4m3, GLINT_SCALE_CHANNEL},
                                   {"E4M3, one scale", GemmElement::kE4m3, GLINT_SCALE_TENSOR},
                                   {"E4M3, scales by tile", GemmElement::kE4m3, GLINT_SCALE_TILE},
                                   {"BF16", GemmElement::kBf16, GLINT_SCALE_NONE}};
  bool is_right = true;
  for (const Kind& kind : kinds) {
    double worst = 0.0;
    for (const int64_t rows : row_counts) {
      for (const int64_t cols : col_counts) {
        is_right = check_shape({rows, cols, kind.element, kind.scale_kind}, worst) && is_right;
      }
    }
    std::printf("portable %-24s %zu shapes, 12 token counts: worst relative error against FP64 %.2e (bound %.0e)\n",
                kind.name, row_counts.size() * col_counts.size(), worst, kErrorBound);
    std::fflush(stdout);
  }
  return is_right;
}

bool check_bf16_rows() {
  constexpr int64_t kRows = 5;
  bool is_right = true;
  for (const int64_t width : {1, 16, 63, 64, 161, 5120}) {
    const int64_t stride = portable_row_bytes(width, GemmElement::kBf16);
    const DeviceArray<float> in(kRows * (width + 1));
    for (int64_t row = 0; row < kRows; ++row) {
      fill_signed(in.data() + row * (width + 1), width, {static_cast<uint64_t>(row), 3.0F});
    }
    const DeviceArray<uint16_t> out(kRows * stride / 2);
    launch_to_bf16({reinterpret_cast<uint8_t*>(out.data()), in.data(), width + 1, kRows, width, stride}, nullptr);
    synchronize();
    const std::vector<float> values = in.to_host();
    const std::vector<uint16_t> rounded = out.to_host();
    for (int64_t index = 0; index < out.count(); ++index) {
      const int64_t column = index % (stride / 2);
      const float value = column < width ? values[index / (stride / 2) * (width + 1) + column] : 0.0F;
      is_right = is_right && rounded[index] == __bfloat16_as_ushort(__float2bfloat16_rn(value));
    }
  }
  std::printf("rows to BF16: %s\n", is_right ? "equal" : "WRONG");
  return is_right;
}

struct NamedShape {
  const char* name;
  MatrixShape shape;
};

void measure_dense(double ceiling) {
  const std::vector<NamedShape> shapes = {
      {"qkv", {1792, 5120, GemmElement::kE4m3, GLINT_SCALE_CHANNEL}},
      {"o", {5120, 1536, GemmElement::kE4m3, GLINT_SCALE_CHANNEL}},
      {"dense gate+up", {3072, 5120, GemmElement::kE4m3, GLINT_SCALE_CHANNEL}},
      {"gate+up by tile", {3072, 5120, GemmElement::kE4m3, GLINT_SCALE_TILE}},
      {"lm_head", {18944, 5120, GemmElement::kBf16, GLINT_SCALE_NONE}}};
  cudaStream_t stream = nullptr;
  GLINT_CHECK_CUDA(cudaStreamCreate(&stream));
  for (const NamedShape& named : shapes) {
    const int64_t bytes = named.shape.rows * named.shape.row_bytes();
    const int64_t copies = std::max<int64_t>(2, 200'000'000 / bytes);
    const DenseCase dense(named.shape, kMostTokens, copies);
    const DeviceArray<float> out(kMostTokens * named.shape.rows);
    for (const int64_t tokens : {1, 16, 32, 64, 128, 256, 4096}) {
      const double time = median_microseconds(stream, static_cast<int>(std::min<int64_t>(copies, 20)), [&](int index) {
        launch_gemm_portable(dense.call(out.data(), named.shape.rows, tokens, index % copies), stream);
      });
      const double flops = 2.0 * static_cast<double>(tokens * named.shape.rows * named.shape.cols);
      std::printf("%-16s %5lld tokens %9.2f us  %6.0f GB/s %5.1f%% of ceiling  %6.1f TFLOP/s\n", named.name,
                  static_cast<long long>(tokens), time, static_cast<double>(bytes) / time / 1e3,
                  100.0 * static_cast<double>(bytes) / time * 1e6 / ceiling, flops / time / 1e6);
    }
    std::fflush(stdout);
  }
  GLINT_CHECK_CUDA(cudaStreamDestroy(stream));
}

bool run(const std::string& part) {
  bool is_right = true;
  if (part != "speed") {
    is_right = check_bf16_rows() && is_right;
    is_right = check_portable_experts() && is_right;
  }
  if (part == "all" || part == "check") {
    is_right = check_dense({1, 7, 192, 1003}, {16, 80, 96, 160, 192, 320, 576, 1536, 5120}) && is_right;
  }
  if (part == "quick") is_right = check_dense({7, 200}, {80, 576}) && is_right;
  if (part == "all" || part == "speed") {
    const double ceiling = read_ceiling_bytes_per_second();
    std::printf("read ceiling %.0f GB/s\n", ceiling / 1e9);
    measure_dense(ceiling);
    measure_portable_experts();
  }
  std::printf("portable %s: %s\n", part.c_str(), is_right ? "PASS" : "FAIL");
  return is_right;
}

}

}

int main(int count, char** arguments) {
  try {
    return glint::cuda::bench::run(count > 1 ? arguments[1] : "all") ? 0 : 1;
  } catch (const std::exception& failure) {
    std::printf("%s\n", failure.what());
    return 2;
  }
}
