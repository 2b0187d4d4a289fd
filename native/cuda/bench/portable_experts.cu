#include <cmath>
#include <cstdio>
#include <random>

#include "cuda/bench/portable_check.h"
#include "cuda/kernels/moe/experts.h"
#include "cuda/kernels/gemm/quantise.h"

namespace glint::cuda::bench {

namespace {

struct ExpertShape {
  const char* name;
  int64_t hidden;
  int64_t width;
  int32_t num_experts;
  int32_t experts_per_token;
  int32_t expert_first;
  int32_t expert_last;
  bool has_shared;
  GemmElement element;
  int32_t scale_kind;

  int64_t num_local() const { return expert_last - expert_first + (has_shared ? 1 : 0); }
  MatrixShape up_shape() const { return {width, hidden, element, scale_kind}; }
  MatrixShape down_shape() const { return {hidden, width, element, scale_kind}; }
};

struct Choices {
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

Choices choose_experts(const ExpertShape& shape, int64_t num_tokens) {
  std::mt19937 random(static_cast<unsigned>(num_tokens));
  std::vector<int32_t> order(static_cast<size_t>(shape.num_experts));
  for (size_t index = 0; index < order.size(); ++index) order[index] = static_cast<int32_t>(index);
  Choices choices;
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::shuffle(order.begin(), order.end(), random);
    for (int32_t kept = 0; kept < shape.experts_per_token; ++kept) {
      choices.experts.push_back(order[static_cast<size_t>(kept)]);
      choices.weights.push_back(0.05F + static_cast<float>(random() % 1000) / 1000.0F);
    }
  }
  return choices;
}

class ExpertsCase {
 public:
  ExpertsCase(const ExpertShape& shape, int64_t num_tokens)
      : shape_(shape),
        num_tokens_(num_tokens),
        max_rows_(num_tokens * (shape.experts_per_token + 1)),
        max_tiles_(std::min(max_rows_, max_token_tiles(num_tokens, shape.experts_per_token,
                                                       static_cast<int32_t>(shape.num_local())))),
        in_stride_(portable_row_bytes(shape.hidden, shape.element)),
        mid_stride_(portable_row_bytes(shape.width, shape.element)),
        choices_(choose_experts(shape, num_tokens)),
        gate_(shape.up_shape(), shape.num_local(), 41),
        up_(shape.up_shape(), shape.num_local(), 43),
        down_(shape.down_shape(), shape.num_local(), 45),
        experts_(choices_.experts),
        weights_(choices_.weights),
        row_tokens_(max_rows_),
        row_weights_(max_rows_),
        gate_up_tiles_(max_tiles_),
        down_tiles_(max_tiles_),
        row_places_(max_rows_),
        rows_packed_(max_tiles_),
        counts_(8 + num_tokens),
        token_rows_(token_rows_count(num_tokens, shape.experts_per_token)),
        activations_(num_tokens * in_stride_),
        token_scales_(num_tokens),
        gate_out_(max_rows_ * shape.width),
        up_out_(max_rows_ * shape.width),
        mid_floats_(max_rows_ * shape.width),
        mid_(max_rows_ * mid_stride_),
        mid_scales_(max_rows_),
        routed_(max_rows_ * shape.hidden),
        shared_(num_tokens * shape.hidden),
        out_(num_tokens * shape.hidden) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      if (token > 64) break;
      fill_elements(activations_.data() + token * in_stride_, shape.hidden, shape.element,
                    {static_cast<uint64_t>(50 + token), 1.0F});
    }
    for (int64_t token = 65; token < num_tokens; ++token) {
      GLINT_CHECK_CUDA(cudaMemcpyAsync(activations_.data() + token * in_stride_,
                                       activations_.data() + (token - 64) * in_stride_,
                                       static_cast<size_t>(in_stride_), cudaMemcpyDeviceToDevice));
    }
    fill_positive(token_scales_.data(), num_tokens, {47, 1e-2F});
    fill_signed(shared_.data(), shared_.count(), {48, 1.0F});
  }

  void run(cudaStream_t stream) const {
    group(stream);
    gate_up(stream);
    prepare_mid(stream);
    launch_gemm_portable(down_call(), stream);
    combine(stream);
  }

  void group(cudaStream_t stream) const {
    launch_group_tokens({.grouped = grouped(),
                         .experts = experts_.data(),
                         .weights = weights_.data(),
                         .num_tokens = static_cast<int32_t>(num_tokens_),
                         .experts_per_token = shape_.experts_per_token,
                         .expert_first = shape_.expert_first,
                         .expert_last = shape_.expert_last,
                         .has_shared = shape_.has_shared ? 1 : 0},
                        stream);
  }

  void gate_up(cudaStream_t stream) const {
    launch_gemm_portable(up_call(gate_, gate_out_.data()), stream);
    launch_gemm_portable(up_call(up_, up_out_.data()), stream);
  }

  PortableGemmCall up_call(const PackedMatrices& matrices, float* out) const {
    PortableGemmCall call = down_call();
    call.out = out;
    call.out_stride = shape_.width;
    call.weight = matrices.weight(0);
    call.activations = activations_.data();
    call.activation_stride_bytes = in_stride_;
    if (has_codes()) call.token_scales = token_scales_.data();
    call.row_tokens = row_tokens_.data();
    return call;
  }

  PortableGemmCall down_call() const {
    PortableGemmCall call{};
    call.out = routed_.data();
    call.out_stride = shape_.hidden;
    call.weight = down_.weight(0);
    call.activations = mid_.data();
    call.activation_stride_bytes = mid_stride_;
    call.token_scales = has_codes() ? mid_scales_.data() : nullptr;
    call.num_tokens = num_tokens_;
    call.tiles = gate_up_tiles_.data();
    call.num_tiles = counts_.data() + 1;
    call.max_tiles = max_tiles_;
    call.tile_tokens = plan_tiles(num_tokens_).gate_up_tokens;
    return call;
  }

  void prepare_mid(cudaStream_t stream) const {
    SwigluCall call{};
    call.gate = gate_out_.data();
    call.up = up_out_.data();
    call.in_stride = shape_.width;
    call.count = max_rows_;
    call.width = shape_.width;
    call.row_slices = 1;
    call.slice_stride = mid_stride_;
    if (has_codes()) {
      call.fp8 = mid_.data();
      call.scales = mid_scales_.data();
    } else {
      call.out = mid_floats_.data();
    }
    launch_swiglu(call, stream);
    if (has_codes()) return;
    launch_to_bf16({mid_.data(), mid_floats_.data(), shape_.width, max_rows_, shape_.width, mid_stride_}, stream);
  }

  void combine(cudaStream_t stream) const {
    launch_place_rows({.token_rows = token_rows_.data(),
                       .row_tokens = row_tokens_.data(),
                       .tiles = gate_up_tiles_.data(),
                       .num_tiles = counts_.data() + 1,
                       .max_tiles = max_tiles_,
                       .experts = experts_.data(),
                       .experts_per_token = shape_.experts_per_token,
                       .expert_first = shape_.expert_first,
                       .expert_last = shape_.expert_last},
                      stream);
    launch_combine_rows({.out = out_.data(),
                         .routed = routed_.data(),
                         .row_weights = row_weights_.data(),
                         .token_rows = token_rows_.data(),
                         .experts = experts_.data(),
                         .shared = shape_.has_shared ? nullptr : shared_.data(),
                         .num_tokens = num_tokens_,
                         .hidden_size = shape_.hidden,
                         .experts_per_token = shape_.experts_per_token,
                         .expert_first = shape_.expert_first,
                         .expert_last = shape_.expert_last,
                         .has_shared = shape_.has_shared ? 1 : 0},
                        stream);
  }

  int64_t count_wrong() const {
    return count_wrong_products(gate_, up_call(gate_, gate_out_.data()), num_tokens_, true) +
           count_wrong_products(down_, down_call(), num_rows(), false) + count_wrong_sums();
  }

 private:
  bool has_codes() const { return shape_.element == GemmElement::kE4m3; }

  GroupedTokens grouped() const {
    return {.row_tokens = row_tokens_.data(),
            .row_weights = row_weights_.data(),
            .gate_up_tiles = gate_up_tiles_.data(),
            .num_gate_up_tiles = counts_.data() + 1,
            .down_tiles = down_tiles_.data(),
            .down_tile_ends = counts_.data() + 2,
            .num_rows = counts_.data(),
            .row_places = row_places_.data(),
            .rows_packed = rows_packed_.data()};
  }

  bool is_chosen(int64_t token, int64_t local) const {
    if (local == shape_.expert_last - shape_.expert_first) return true;
    const int32_t* first = choices_.experts.data() + token * shape_.experts_per_token;
    return std::find(first, first + shape_.experts_per_token, shape_.expert_first + local) !=
           first + shape_.experts_per_token;
  }

  int64_t num_rows() const { return counts_.to_host()[0]; }

  int64_t count_wrong_products(const PackedMatrices& matrices, const PortableGemmCall& grouped_call,
                               int64_t input_rows, bool gathers) const {
    const int64_t rows = matrices.shape().rows;
    const DeviceArray<float> dense(std::max<int64_t>(input_rows, 1) * rows);
    const std::vector<float> found = (gathers ? gate_out_ : routed_).to_host();
    int64_t wrong = 0;
    int64_t row = 0;
    for (int64_t local = 0; local < shape_.num_local(); ++local) {
      PortableGemmCall call = grouped_call;
      call.out = dense.data();
      call.weight = matrices.weight(local);
      call.num_tokens = input_rows;
      call.row_tokens = nullptr;
      call.tiles = nullptr;
      launch_gemm_portable(call, nullptr);
      synchronize();
      const std::vector<float> expected = dense.to_host();
      for (int64_t token = 0; token < num_tokens_; ++token) {
        if (!is_chosen(token, local)) continue;
        const float* right = expected.data() + (gathers ? token : row) * rows;
        for (int64_t index = 0; index < rows; ++index) wrong += found[row * rows + index] == right[index] ? 0 : 1;
        ++row;
      }
    }
    return wrong + (row == num_rows() ? 0 : 1);
  }

  int64_t count_wrong_sums() const {
    const std::vector<float> routed = routed_.to_host();
    const std::vector<float> shared = shared_.to_host();
    const std::vector<float> out = out_.to_host();
    std::vector<double> sums(out.size(), 0.0);
    int64_t row = 0;
    for (int64_t local = 0; local < shape_.num_local(); ++local) {
      for (int64_t token = 0; token < num_tokens_; ++token) {
        if (!is_chosen(token, local)) continue;
        const double weight = weight_of(token, local);
        for (int64_t dim = 0; dim < shape_.hidden; ++dim) {
          sums[token * shape_.hidden + dim] += weight * static_cast<double>(routed[row * shape_.hidden + dim]);
        }
        ++row;
      }
    }
    int64_t wrong = 0;
    for (size_t index = 0; index < out.size(); ++index) {
      const double added = shape_.has_shared ? 0.0 : static_cast<double>(shared[index]);
      wrong += out[index] == static_cast<float>(sums[index] + added) ? 0 : 1;
    }
    return wrong;
  }

  double weight_of(int64_t token, int64_t local) const {
    for (int32_t kept = 0; kept < shape_.experts_per_token; ++kept) {
      const int64_t index = token * shape_.experts_per_token + kept;
      if (choices_.experts[index] == shape_.expert_first + local && local < shape_.expert_last - shape_.expert_first) {
        return static_cast<double>(choices_.weights[index]);
      }
    }
    return 1.0;
  }

  ExpertShape shape_;
  int64_t num_tokens_;
  int64_t max_rows_;
  int64_t max_tiles_;
  int64_t in_stride_;
  int64_t mid_stride_;
  Choices choices_;
  PackedMatrices gate_;
  PackedMatrices up_;
  PackedMatrices down_;
  DeviceArray<int32_t> experts_;
  DeviceArray<float> weights_;
  DeviceArray<int32_t> row_tokens_;
  DeviceArray<float> row_weights_;
  DeviceArray<TokenTile> gate_up_tiles_;
  DeviceArray<TokenTile> down_tiles_;
  DeviceArray<RowPlace> row_places_;
  DeviceArray<uint32_t> rows_packed_;
  DeviceArray<int32_t> counts_;
  DeviceArray<int32_t> token_rows_;
  DeviceArray<uint8_t> activations_;
  DeviceArray<float> token_scales_;
  DeviceArray<float> gate_out_;
  DeviceArray<float> up_out_;
  DeviceArray<float> mid_floats_;
  DeviceArray<uint8_t> mid_;
  DeviceArray<float> mid_scales_;
  DeviceArray<float> routed_;
  DeviceArray<float> shared_;
  DeviceArray<float> out_;
};

}

bool check_portable_experts() {
  const auto e4m3 = GemmElement::kE4m3;
  const std::vector<ExpertShape> shapes = {
      {"tp, shared as last expert", 320, 96, 16, 4, 0, 16, true, e4m3, GLINT_SCALE_CHANNEL},
      {"ep, shared apart", 320, 96, 16, 4, 4, 12, false, e4m3, GLINT_SCALE_CHANNEL},
      {"ep, few experts here", 160, 16, 32, 8, 31, 32, false, e4m3, GLINT_SCALE_TENSOR},
      {"scales by tile", 576, 192, 16, 4, 0, 16, true, e4m3, GLINT_SCALE_TILE},
      {"BF16", 192, 48, 16, 4, 0, 16, false, GemmElement::kBf16, GLINT_SCALE_NONE}};
  bool is_right = true;
  for (const ExpertShape& shape : shapes) {
    int64_t wrong = 0;
    for (const int64_t tokens : {1, 5, 33, 100, 300}) {
      const ExpertsCase experts(shape, tokens);
      poison_shared_memory();
      experts.run(nullptr);
      synchronize();
      wrong += experts.count_wrong();
    }
    std::printf("portable experts, %-26s against dense products and FP64 sums: %lld values differ\n", shape.name,
                static_cast<long long>(wrong));
    std::fflush(stdout);
    is_right = is_right && wrong == 0;
  }
  return is_right;
}

void measure_portable_experts() {
  const ExpertShape shape = {"tp", 5120, 192, 160, 8, 0, 160, true, GemmElement::kE4m3, GLINT_SCALE_CHANNEL};
  cudaStream_t stream = nullptr;
  GLINT_CHECK_CUDA(cudaStreamCreate(&stream));
  for (const int64_t tokens : {1, 8, 64, 256, 4096}) {
    const ExpertsCase experts(shape, tokens);
    const auto time = [&](const auto& launch) {
      return median_microseconds(stream, 2, [&](int) { launch(); });
    };
    experts.group(stream);
    const double both = time([&] { experts.gate_up(stream); });
    const double mid = time([&] { experts.prepare_mid(stream); });
    const double down = time([&] { launch_gemm_portable(experts.down_call(), stream); });
    const double sum = time([&] { experts.combine(stream); });
    const double all = time([&] { experts.run(stream); });
    std::printf("experts tp 160x192 %5lld tokens: gate, up %.1f  swiglu %.1f  down %.1f  combine %.1f  all %.1f us\n",
                static_cast<long long>(tokens), both, mid, down, sum, all);
    std::fflush(stdout);
  }
  GLINT_CHECK_CUDA(cudaStreamDestroy(stream));
}

}
