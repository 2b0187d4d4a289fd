#pragma once

#include <functional>
#include <span>
#include <vector>

#include "base/memory.h"
#include "model/ops.h"

namespace glint {

struct StepBatch {
  std::span<const int32_t> tokens;
  std::span<const int32_t> positions;
  std::span<const BatchRequest> requests;
};

struct ForwardOptions {
  int32_t row_slices;
  int32_t expert_layout;
  int64_t max_tokens;
  int64_t max_logit_rows;
};

int64_t max_product_calls(const glint_model& model, int32_t row_slices);

using HiddenTap = std::function<void(int64_t layer, float* hidden, int64_t count)>;

class ForwardPass {
 public:
  ForwardPass(Backend& backend, const glint_model& model, const ModelWeights& weights, const PageLayout& pages,
              const ForwardOptions& options);

  void run(const StepBatch& batch);
  float* logits(std::span<const int32_t> rows);
  uint64_t byte_count() const;
  void set_tap(HiddenTap tap) { tap_ = std::move(tap); }

 private:
  struct SlicedProduct {
    float* out;
    int64_t part_stride;
    ProductInput input;
    int64_t input_count;
    int64_t input_first;
    int64_t count;
    Weight weight;
    int32_t slices;
  };

  void attention(int64_t layer, const StepBatch& batch);
  void dense_feed_forward(int64_t layer);
  void expert_feed_forward(int64_t layer);
  void route_tokens(const LayerWeights& layer);
  void group_by_expert();
  void run_gate_and_up(const LayerWeights& layer);
  void run_down(const LayerWeights& layer);
  void combine_experts();
  ProductInput prepare(const OperandBuffer& buffer, const float* in, int64_t count, int64_t width, int32_t slices);
  void add_sliced_product(const SlicedProduct& product);
  void project_to_hidden(const float* in, int64_t width, const Weight& weight);
  void join_and_add();
  void run_calls();

  Backend& backend_;
  const glint_model& model_;
  const ModelWeights& weights_;
  const PageLayout& pages_;
  ForwardOptions options_;
  HeadShape heads_;
  HiddenTap tap_;
  bool has_codes_;
  int64_t count_ = 0;
  int64_t num_expert_rows_ = 0;
  std::vector<ProductCall> calls_;
  std::vector<int32_t> expert_first_;

  Buffer<float> hidden_;
  Buffer<float> normed_;
  Buffer<float> query_;
  Buffer<float> key_;
  Buffer<float> value_;
  Buffer<float> attended_;
  Buffer<float> cosines_;
  Buffer<float> sines_;
  Buffer<float> gate_;
  Buffer<float> up_;
  Buffer<float> shared_gate_;
  Buffer<float> shared_up_;
  Buffer<float> routed_;
  Buffer<float> shared_;
  Buffer<float> parts_;
  Buffer<float> router_logits_;
  Buffer<float> expert_weights_;
  Buffer<float> logits_;
  Buffer<int32_t> experts_;
  Buffer<int32_t> routed_rows_;
  Buffer<int32_t> expert_tokens_;
  Buffer<std::byte> operand_;
  Buffer<std::byte> float_operand_;
  Buffer<std::byte> expert_operand_;
  Buffer<std::byte> shared_operand_;
  Buffer<float> operand_scales_;
  Buffer<float> expert_scales_;
  Buffer<float> shared_scales_;
};

}
