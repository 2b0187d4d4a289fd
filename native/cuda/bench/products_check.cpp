#include <cmath>
#include <cstdio>
#include <string>

#include "cuda/bench/experts_check.h"
#include "cuda/bench/measure.h"
#include "cuda/kernels/gemm/gemm.h"

namespace glint::cuda::bench {

namespace {

struct DenseShape {
  const char* name;
  int64_t rows;
  int64_t k;
  GemmElement element;
  bool has_bias;

  int64_t element_bytes() const { return element == GemmElement::kBf16 ? 2 : 1; }
  int64_t k_bytes() const { return k * element_bytes(); }
};

class DenseCase {
 public:
  DenseCase(const DenseShape& shape, int64_t max_tokens, int copies)
      : shape_(shape),
        weights_(shape.rows * shape.k_bytes()),
        packed_(packed_weight_bytes(shape.rows, shape.k_bytes()) * copies),
        activations_((max_tokens + 64) * shape.k_bytes()),
        row_scales_(shape.rows),
        token_scales_(max_tokens),
        bias_(shape.rows) {
    if (shape.element == GemmElement::kBf16) {
      fill_bf16(reinterpret_cast<uint16_t*>(weights_.data()), shape.rows * shape.k, {11, 0.02F});
      fill_bf16(reinterpret_cast<uint16_t*>(activations_.data()), max_tokens * shape.k, {12, 1.0F});
    } else {
      fill_codes(weights_.data(), shape.rows * shape.k, {11, 100.0F});
      fill_codes(activations_.data(), max_tokens * shape.k, {12, 100.0F});
    }
    fill_positive(row_scales_.data(), shape.rows, {13, 1e-4F});
    fill_positive(token_scales_.data(), max_tokens, {14, 1e-2F});
    fill_signed(bias_.data(), shape.rows, {15, 1.0F});
    for (int copy = 0; copy < copies; ++copy) pack(copy);
    synchronize();
  }

  GemmCall call(float* out, int64_t num_tokens, int copy) const {
    const bool has_scales = shape_.element == GemmElement::kE4m3;
    return {.out = out,
            .out_stride = shape_.rows,
            .packed_weights = packed_.data() + copy * packed_weight_bytes(shape_.rows, shape_.k_bytes()),
            .row_scales = has_scales ? row_scales_.data() : nullptr,
            .bias = shape_.has_bias ? bias_.data() : nullptr,
            .activations = activations_.data(),
            .token_scales = has_scales ? token_scales_.data() : nullptr,
            .rows = shape_.rows,
            .k_bytes = shape_.k_bytes(),
            .num_tokens = num_tokens,
            .element = shape_.element};
  }

  void scale_reference(std::vector<double>& sums, int64_t num_tokens) const {
    const std::vector<float> rows = row_scales_.to_host();
    const std::vector<float> tokens = token_scales_.to_host();
    const std::vector<float> bias = bias_.to_host();
    const bool has_scales = shape_.element == GemmElement::kE4m3;
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int64_t row = 0; row < shape_.rows; ++row) {
        double& sum = sums[static_cast<size_t>(token * shape_.rows + row)];
        if (has_scales) sum *= static_cast<double>(rows[row]) * static_cast<double>(tokens[token]);
        if (shape_.has_bias) sum += static_cast<double>(bias[row]);
      }
    }
  }

  double check_error(int64_t num_tokens) const {
    DeviceArray<float> out(num_tokens * shape_.rows);
    const DeviceArray<double> sums(num_tokens * shape_.rows);
    poison_shared_memory();
    launch_gemm(call(out.data(), num_tokens, 0), nullptr);
    run_reference({sums.data(), weights_.data(), activations_.data(), nullptr, shape_.rows, shape_.k, num_tokens,
                   shape_.element == GemmElement::kBf16});
    std::vector<double> reference = sums.to_host();
    scale_reference(reference, num_tokens);
    const DeviceArray<double> scaled(reference);
    const Difference difference = compare(out.data(), scaled.data(), out.count());
    return difference.num_wrong > 0 ? NAN : difference.relative_error;
  }

  int64_t count_variant_values(int64_t num_tokens, const float* expected) const {
    DeviceArray<float> out(num_tokens * shape_.rows);
    launch_gemm(call(out.data(), num_tokens, 0), nullptr);
    synchronize();
    return count_different_bits(out.data(), expected, out.count());
  }

 private:
  void pack(int copy) const {
    launch_pack_rows({.packed = packed_.data() + copy * packed_weight_bytes(shape_.rows, shape_.k_bytes()),
                      .weights = weights_.data(),
                      .up_weights = nullptr,
                      .rows = shape_.rows,
                      .k_bytes = shape_.k_bytes(),
                      .num_matrices = 1},
                     nullptr);
  }

  DenseShape shape_;
  DeviceArray<uint8_t> weights_;
  DeviceArray<uint8_t> packed_;
  DeviceArray<uint8_t> activations_;
  DeviceArray<float> row_scales_;
  DeviceArray<float> token_scales_;
  DeviceArray<float> bias_;
};

const std::vector<DenseShape>& model_shapes() {
  static const std::vector<DenseShape> shapes = {{"qkv", 1792, 5120, GemmElement::kE4m3, true},
                                                 {"o", 5120, 1536, GemmElement::kE4m3, false},
                                                 {"dense gate+up", 3072, 5120, GemmElement::kE4m3, false},
                                                 {"shared gate+up", 384, 5120, GemmElement::kE4m3, false},
                                                 {"lm_head", 18944, 5120, GemmElement::kBf16, false}};
  return shapes;
}

bool check_errors() {
  std::vector<DenseShape> shapes = model_shapes();
  shapes.push_back({"odd 200x1152", 200, 1152, GemmElement::kE4m3, true});
  shapes.push_back({"odd 200x1920", 200, 1920, GemmElement::kE4m3, true});
  shapes.push_back({"odd 77x640", 77, 640, GemmElement::kE4m3, true});
  bool is_right = true;
  for (const DenseShape& shape : shapes) {
    const DenseCase dense(shape, 512, 1);
    double worst = 0.0;
    for (const int64_t tokens : {1, 7, 8, 9, 16, 17, 33, 64, 65, 100, 256, 300}) {
      if (shape.rows > 10000 && tokens > 65) continue;
      const double error = dense.check_error(tokens);
      const bool holds = error < 1e-3;
      if (!holds) std::printf("WRONG %s at %lld tokens: error %g\n", shape.name, static_cast<long long>(tokens), error);
      is_right = is_right && holds;
      worst = std::max(worst, error);
    }
    std::printf("dense %-16s worst relative error against FP64 %.2e\n", shape.name, worst);
  }
  return is_right;
}

bool check_invariance(const DenseShape& shape) {
  constexpr int64_t kMost = 4096;
  const DenseCase dense(shape, kMost, 1);
  DeviceArray<float> expected(kMost * shape.rows);
  launch_gemm(dense.call(expected.data(), kMost, 0), nullptr);
  synchronize();
  int64_t different = 0;
  int64_t runs = 0;
  const int64_t step = shape.rows > 10000 ? 15 : 1;
  for (int64_t tokens = 1; tokens <= 256; tokens += step, ++runs) {
    different += dense.count_variant_values(tokens, expected.data());
  }
  for (int repeat = 0; repeat < 20; ++repeat) different += dense.count_variant_values(64, expected.data());
  for (int repeat = 0; repeat < 3; ++repeat) different += dense.count_variant_values(kMost, expected.data());
  std::printf("dense %-16s %lld row counts against 4096 rows and 23 repeats: %lld values differ\n", shape.name,
              static_cast<long long>(runs), static_cast<long long>(different));
  return different == 0;
}

void measure_shape(const DenseShape& shape, double ceiling, cudaStream_t stream) {
  const int64_t bytes = shape.rows * shape.k_bytes();
  const int copies = static_cast<int>(std::max<int64_t>(2, 200'000'000 / bytes));
  const DenseCase dense(shape, 4096, copies);
  const DeviceArray<float> out(4096 * shape.rows);
  for (const int64_t tokens : {1, 16, 64, 128, 256, 4096}) {
    const double time = median_microseconds(stream, std::max(copies, 10), [&](int index) {
      launch_gemm(dense.call(out.data(), tokens, index % copies), stream);
    });
    const double flops = 2.0 * static_cast<double>(tokens * shape.rows * shape.k);
    const double rate = static_cast<double>(bytes) / time * 1e6;
    std::printf("%-16s %5lld tokens %9.2f us  %7.0f GB/s  %5.1f%% of ceiling  %7.1f TFLOP/s  floor %.2f us\n",
                shape.name, static_cast<long long>(tokens), time, rate / 1e9, 100.0 * rate / ceiling,
                flops / time / 1e6, static_cast<double>(bytes) / ceiling * 1e6);
    std::fflush(stdout);
  }
}

bool check_dense() {
  bool is_right = check_errors();
  for (const DenseShape& shape : model_shapes()) is_right = check_invariance(shape) && is_right;
  return is_right;
}

void measure_dense(double ceiling) {
  cudaStream_t stream = nullptr;
  GLINT_CHECK_CUDA(cudaStreamCreate(&stream));
  for (const DenseShape& shape : model_shapes()) measure_shape(shape, ceiling, stream);
  GLINT_CHECK_CUDA(cudaStreamDestroy(stream));
}

bool run(const std::string& part) {
  const bool runs_all = part == "all";
  const double ceiling = read_ceiling_bytes_per_second();
  std::printf("read ceiling %.0f GB/s\n", ceiling / 1e9);
  bool is_right = true;
  if (runs_all || part == "dense_check") is_right = check_dense() && is_right;
  if (runs_all || part == "dense_speed") measure_dense(ceiling);
  if (runs_all || part == "experts_check") is_right = check_experts() && is_right;
  if (runs_all || part == "experts_speed") measure_experts(ceiling);
  std::printf("%s: %s\n", part.c_str(), is_right ? "PASS" : "FAIL");
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
