#include "cuda/weights/synthetic.h"

#include <cmath>
#include <vector>

#include "base/fp8.h"
#include "base/rng.h"
#include "cuda/check.h"
#include "cuda/memory/device_memory.h"
#include "cuda/weights/load_tasks.h"
#include "cuda/weights/loader.h"
#include "model/load_progress.h"

namespace glint::cuda {

namespace {

constexpr double kFp8Deviation = 128.0;
constexpr float kScaleSpread = 0.1F;
constexpr float kNormSpread = 0.05F;
constexpr float kBiasSpread = 0.02F;
constexpr float kRouterBiasSpread = 0.001F;

double normal_quantile(double probability) {
  double low = -8.0;
  double high = 8.0;
  for (int step = 0; step < 64; ++step) {
    const double middle = 0.5 * (low + high);
    (0.5 * std::erfc(-middle * std::sqrt(0.5)) < probability ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

Fp8Table normal_fp8() {
  Fp8Table table{};
  for (size_t index = 0; index < table.values.size(); ++index) {
    const double quantile = normal_quantile((static_cast<double>(index) + 0.5) / kFp8TableSize);
    table.values[index] = e4m3_from_float(static_cast<float>(kFp8Deviation * quantile));
  }
  return table;
}

float fp8_magnitude(const Fp8Table& table) {
  double sum = 0.0;
  for (const uint8_t value : table.values) sum += std::pow(double{float_from_e4m3(value)}, 2);
  return static_cast<float>(std::sqrt(sum / kFp8TableSize));
}

struct Distribution {
  float mean;
  float deviation;
};

class SyntheticSource {
 public:
  explicit SyntheticSource(uint64_t seed) : seed_(seed), table_(normal_fp8()), magnitude_(fp8_magnitude(table_)) {}

  void fill(const SourcePiece& piece, uint8_t* g_target, cudaStream_t stream) const {
    const uint64_t key = key_of(piece.name);
    const auto first = static_cast<int64_t>(piece.first_byte);
    const auto count = static_cast<int64_t>(piece.byte_count);
    if (piece.dtype == GLINT_DTYPE_F8_E4M3) {
      launch_fill_fp8({g_target, first, count, key, table_}, stream);
      return;
    }
    const bool is_bf16 = piece.dtype == GLINT_DTYPE_BF16;
    const int64_t value_bytes = is_bf16 ? 2 : 4;
    const Distribution wanted = distribution_of(piece);
    launch_fill_normal(
        {g_target, first / value_bytes, count / value_bytes, key, wanted.mean, wanted.deviation, is_bf16}, stream);
  }

 private:
  uint64_t key_of(const TensorName& name) const {
    const uint64_t kind = static_cast<uint64_t>(name.role) << 8U | static_cast<uint64_t>(name.part);
    return row_key(mix_bits(seed_) + kind, static_cast<uint32_t>(name.layer + 1), name.expert);
  }

  Distribution distribution_of(const SourcePiece& piece) const {
    const float unit = 1.0F / std::sqrt(static_cast<float>(piece.cols));
    if (piece.name.part == GLINT_PART_SCALE) return {unit / magnitude_, kScaleSpread * unit / magnitude_};
    if (piece.name.part == GLINT_PART_BIAS) {
      return {0.0F, piece.name.role == GLINT_ROLE_ROUTER ? kRouterBiasSpread : kBiasSpread};
    }
    if (piece.dtype == GLINT_DTYPE_F32) return {1.0F, kNormSpread};
    return {0.0F, piece.name.role == GLINT_ROLE_EMBEDDING ? 1.0F : unit};
  }

  uint64_t seed_;
  Fp8Table table_;
  float magnitude_;
};

Weight shape_of(int64_t rows, int64_t cols, int32_t scale_kind) {
  Weight weight;
  weight.rows = rows;
  weight.cols = cols;
  weight.stride = cols;
  weight.scale_stride = (cols + kScaleTile - 1) / kScaleTile;
  weight.dtype = scale_kind == GLINT_SCALE_NONE ? GLINT_DTYPE_BF16 : GLINT_DTYPE_F8_E4M3;
  weight.scale_kind = scale_kind;
  return weight;
}

FeedForwardWeights feed_forward_shape(const glint_model& model, int64_t width) {
  const Weight inward = shape_of(width, model.hidden_size, model.weight_scale_kind);
  return {.gate = inward, .up = inward, .down = shape_of(model.hidden_size, width, model.weight_scale_kind)};
}

LayerWeights layer_shape(const glint_model& model, int32_t layer) {
  const int64_t hidden = model.hidden_size;
  const int64_t query_rows = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_rows = int64_t{model.num_kv_heads} * model.head_dim;
  LayerWeights weights;
  weights.query = shape_of(query_rows, hidden, model.weight_scale_kind);
  weights.key = shape_of(kv_rows, hidden, model.weight_scale_kind);
  weights.value = weights.key;
  weights.output = shape_of(hidden, query_rows, model.weight_scale_kind);
  if (layer < model.num_dense_layers) {
    weights.dense = feed_forward_shape(model, model.dense_width);
    return weights;
  }
  weights.router = shape_of(model.num_experts, hidden, GLINT_SCALE_NONE);
  weights.shared = feed_forward_shape(model, model.shared_width);
  weights.experts.assign(static_cast<size_t>(model.num_experts), feed_forward_shape(model, model.expert_width));
  return weights;
}

ModelWeights model_shape(const glint_model& model, int32_t num_layers) {
  ModelWeights weights;
  weights.embedding = shape_of(model.vocab_size, model.hidden_size, GLINT_SCALE_NONE);
  weights.lm_head = weights.embedding;
  for (int32_t layer = 0; layer < num_layers; ++layer) weights.layers.push_back(layer_shape(model, layer));
  weights.mtp.eh_proj = shape_of(model.hidden_size, int64_t{2} * model.hidden_size, GLINT_SCALE_NONE);
  return weights;
}

}

void fill_synthetic_weights(const PlacedWeights& placed, const glint_model& model, uint64_t seed) {
  const auto num_layers = static_cast<int32_t>(placed.layers.size());
  const std::vector<LoadTask> tasks = plan_load_tasks(placed, model, model_shape(model, num_layers), 0);
  load_progress().expect(total_task_bytes(tasks));
  const DeviceMemory stage(kStageBytes, "a staging buffer for synthetic weights");
  auto* g_stage = reinterpret_cast<uint8_t*>(stage.data());
  const SyntheticSource source(seed);
  cudaStream_t stream = nullptr;
  for (const LoadTask& task : tasks) {
    uint8_t* g_target = staging_target(task, g_stage);
    for (const SourcePiece& piece : task.pieces) {
      source.fill(piece, g_target, stream);
      g_target += piece.byte_count;
    }
    launch_pack_task(task, g_stage, stream);
    load_progress().bytes_done += task.byte_count;
  }
  GLINT_CHECK_CUDA(cudaStreamSynchronize(stream));
}

}
