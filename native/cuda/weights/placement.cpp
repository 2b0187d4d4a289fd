#include "cuda/weights/placement.h"

#include "base/contract.h"
#include "cuda/kernels/moe/experts.h"
#include "cuda/kernels/gemm/gemm_portable.h"
#include "model/weights.h"

namespace glint::cuda {

namespace {

int64_t tiles_over(int64_t length) { return (length + kScaleTile - 1) / kScaleTile; }

class Placer {
 public:
  Placer(const glint_model& model, const PlacementOptions& options, Arena& arena)
      : model_(model),
        arena_(arena),
        hidden_(model.hidden_size),
        vocab_rows_(options.vocab_rows),
        num_experts_(options.num_local_experts),
        num_multiprocessors_(options.num_multiprocessors),
        shares_device_(options.shares_device),
        mtp_(options.mtp),
        layer_element_(model.weight_scale_kind == GLINT_SCALE_NONE ? GemmElement::kBf16 : GemmElement::kE4m3) {
    require_argument(num_experts_ >= 0 && num_experts_ <= model.num_experts, "num_local_experts is ", num_experts_,
                     ", the model has ", model.num_experts, " experts");
  }

  PlacedWeights place() {
    PlacedWeights placed;
    placed.embedding = arena_.take<uint16_t>(int64_t{model_.vocab_size} * hidden_);
    placed.lm_head = place_matrix(vocab_rows_, hidden_, GemmElement::kBf16);
    placed.final_norm = arena_.take<float>(hidden_);
    const int32_t num_layers = model_.num_layers + (mtp_.is_placed ? 1 : 0);
    for (int32_t layer = 0; layer < num_layers; ++layer) placed.layers.push_back(place_layer(layer));
    if (mtp_.is_placed) placed.mtp = place_mtp(placed);
    return placed;
  }

 private:
  PlacedMtp place_mtp(const PlacedWeights& main) {
    PlacedMtp placed;
    placed.embedding_norm = arena_.take<float>(hidden_);
    placed.hidden_norm = arena_.take<float>(hidden_);
    placed.head_norm = arena_.take<float>(hidden_);
    placed.eh_proj = place_matrix(hidden_, 2 * hidden_, GemmElement::kBf16);
    placed.embedding =
        mtp_.has_own_embedding ? arena_.take<uint16_t>(int64_t{model_.vocab_size} * hidden_) : main.embedding;
    placed.head = mtp_.has_own_head ? place_matrix(vocab_rows_, hidden_, mtp_.head_element) : main.lm_head;
    return placed;
  }

  PlacedLayer place_layer(int32_t layer) {
    PlacedLayer placed;
    placed.input_norm = arena_.take<float>(hidden_);
    placed.post_attention_norm = arena_.take<float>(hidden_);
    if (model_.has_qk_norm != 0) {
      placed.query_norm = arena_.take<float>(model_.head_dim);
      placed.key_norm = arena_.take<float>(model_.head_dim);
    }
    const int64_t query_rows = int64_t{model_.num_heads} * model_.head_dim;
    const int64_t kv_rows = int64_t{model_.num_kv_heads} * model_.head_dim;
    placed.qkv = place_sections({query_rows, kv_rows, kv_rows}, model_.has_attention_bias != 0);
    placed.output = place_matrix(hidden_, query_rows, layer_element_);
    if (layer < model_.num_dense_layers) {
      placed.dense = place_feed_forward(model_.dense_width);
      return placed;
    }
    placed.router = arena_.take<uint16_t>(int64_t{model_.num_experts} * hidden_);
    placed.router_bias = arena_.take<float>(model_.num_experts);
    placed.experts = place_experts();
    if (!placed.experts.holds_shared) placed.shared = place_feed_forward(model_.shared_width);
    return placed;
  }

  std::vector<PlacedSection> place_sections(const std::vector<int64_t>& section_rows, bool has_bias) {
    std::vector<PlacedSection> sections;
    int64_t all_rows = 0;
    for (const int64_t rows : section_rows) all_rows += rows;
    if (is_tiled_gemm(hidden_, layer_element_)) {
      sections.push_back(place_section(all_rows, 0, has_bias));
      return sections;
    }
    int64_t out_first = 0;
    for (const int64_t rows : section_rows) {
      sections.push_back(place_section(rows, out_first, has_bias));
      out_first += rows;
    }
    return sections;
  }

  PlacedSection place_section(int64_t rows, int64_t out_first, bool has_bias) {
    PlacedSection section;
    section.weight = place_matrix(rows, hidden_, layer_element_);
    section.bias = has_bias ? arena_.take<float>(rows) : nullptr;
    section.out_first = out_first;
    return section;
  }

  PlacedFeedForward place_feed_forward(int64_t width) {
    PlacedFeedForward placed;
    placed.gate_up = place_sections({width, width}, false);
    placed.down = place_matrix(hidden_, width, layer_element_);
    placed.width = width;
    return placed;
  }

  PlacedExperts place_experts() {
    const int64_t width = model_.expert_width;
    PlacedExperts placed;
    placed.num_experts = num_experts_;
    placed.is_tiled = is_tiled_expert();
    if (!placed.is_tiled) {
      placed.gate = place_matrices(width, hidden_, layer_element_, num_experts_, false);
      placed.up = place_matrices(width, hidden_, layer_element_, num_experts_, false);
      placed.down = place_matrices(hidden_, width, layer_element_, num_experts_, false);
      return placed;
    }
    placed.holds_shared = model_.shared_width == width;
    const int64_t num_matrices = num_experts_ + (placed.holds_shared ? 1 : 0);
    placed.packed_gate_up = arena_.take<uint8_t>(num_matrices * packed_gate_up_bytes(width, hidden_));
    placed.packed_down = arena_.take<uint8_t>(num_matrices * packed_down_bytes(hidden_, width));
    placed.gate_scales = arena_.take<float>(num_matrices * width);
    placed.up_scales = arena_.take<float>(num_matrices * width);
    placed.down_scales = arena_.take<float>(num_matrices * hidden_);
    return placed;
  }

  PlacedWeight place_matrix(int64_t rows, int64_t cols, GemmElement element) {
    return place_matrices(rows, cols, element, 1, is_tiled_gemm(cols, element));
  }

  PlacedWeight place_matrices(int64_t rows, int64_t cols, GemmElement element, int64_t num_matrices, bool is_tiled) {
    PlacedWeight placed;
    placed.rows = rows;
    placed.cols = cols;
    placed.num_matrices = num_matrices;
    placed.element = element;
    placed.is_tiled = is_tiled;
    placed.matrix_bytes = is_tiled ? packed_weight_bytes(rows, cols * element_bytes(element))
                                   : portable_weight_bytes(rows, cols, element);
    placed.packed = arena_.take<uint8_t>(num_matrices * placed.matrix_bytes);
    if (element == GemmElement::kBf16) return placed;
    const bool has_tiles = model_.weight_scale_kind == GLINT_SCALE_TILE;
    placed.scale_kind = has_tiles ? GLINT_SCALE_TILE : GLINT_SCALE_CHANNEL;
    placed.scale_stride = has_tiles ? tiles_over(cols) : 0;
    placed.matrix_scales = has_tiles ? tiles_over(rows) * placed.scale_stride : rows;
    placed.scales = arena_.take<float>(num_matrices * placed.matrix_scales);
    return placed;
  }

  bool is_tiled_gemm(int64_t cols, GemmElement element) const {
    const bool has_tiles = element == GemmElement::kE4m3 && model_.weight_scale_kind == GLINT_SCALE_TILE;
    return !has_tiles && is_tiled_k(cols * element_bytes(element));
  }

  bool is_tiled_expert() const {
    const int64_t width = model_.expert_width;
    return !shares_device_ && layer_element_ == GemmElement::kE4m3 && is_tiled_gemm(hidden_, layer_element_) &&
           hidden_ % kGemmTileK == 0 && plan_k_splits(hidden_).num_splits == kClusterSplits &&
           is_down_shape(hidden_, width) && hidden_ / plan_down_tile(width).rows <= num_multiprocessors_ &&
           num_experts_ + 1 <= kMaxLocalExperts;
  }

  const glint_model& model_;
  Arena& arena_;
  int64_t hidden_;
  int64_t vocab_rows_;
  int64_t num_experts_;
  int64_t num_multiprocessors_;
  bool shares_device_;
  MtpPlacement mtp_;
  GemmElement layer_element_;
};

}

PlacedWeights place_weights(const glint_model& model, const PlacementOptions& options, Arena& arena) {
  return Placer(model, options, arena).place();
}

}
