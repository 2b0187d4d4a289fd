#include "model/slices.h"

#include <algorithm>
#include <bit>

#include "base/contract.h"

namespace glint {

namespace {

void check_layout(const glint_engine_options& options) {
  require_argument(options.num_ranks >= 1 && options.num_ranks <= kMaxRanks, "options.num_ranks is ", options.num_ranks,
                   ", expected 1 to ", kMaxRanks);
  require_argument(options.row_slices >= 1 && options.row_slices <= kMaxRanks, "options.row_slices is ",
                   options.row_slices, ", expected 1 to ", kMaxRanks);
  require_argument(options.expert_layout == GLINT_EXPERT_LAYOUT_TP || options.expert_layout == GLINT_EXPERT_LAYOUT_EP,
                   "options.expert_layout is ", options.expert_layout, ", expected ", GLINT_EXPERT_LAYOUT_TP, " or ",
                   GLINT_EXPERT_LAYOUT_EP);
  require_argument(options.sequence_parallel >= GLINT_SEQUENCE_PARALLEL_AUTO &&
                       options.sequence_parallel <= GLINT_SEQUENCE_PARALLEL_ON,
                   "options.sequence_parallel is ", options.sequence_parallel, ", expected 0 to ",
                   GLINT_SEQUENCE_PARALLEL_ON);
  require_argument(options.all_reduce >= GLINT_ALL_REDUCE_AUTO && options.all_reduce <= GLINT_ALL_REDUCE_CUSTOM,
                   "options.all_reduce is ", options.all_reduce, ", expected 0 to ", GLINT_ALL_REDUCE_CUSTOM);
  const int32_t slices_per_rank = options.row_slices / options.num_ranks;
  const bool is_whole_tree = options.num_ranks == 1 || std::has_single_bit(static_cast<uint32_t>(slices_per_rank));
  require_argument(options.row_slices % options.num_ranks == 0 && is_whole_tree, "options.num_ranks is ",
                   options.num_ranks, " and options.row_slices is ", options.row_slices,
                   ": every rank needs 1, 2, 4 or another power of two of the slices; choose row_slices ",
                   options.num_ranks, " or ", 2 * options.num_ranks);
}

void check_heads(const glint_model& model, int32_t num_ranks) {
  require_argument(model.num_heads % num_ranks == 0, "num_attention_heads ", model.num_heads, " cannot be split over ",
                   num_ranks, " ranks; choose another options.num_ranks");
  require_argument(model.num_kv_heads % num_ranks == 0 || num_ranks % model.num_kv_heads == 0, "num_key_value_heads ",
                   model.num_kv_heads, " can neither be split over ", num_ranks,
                   " ranks nor be duplicated evenly; choose another options.num_ranks");
}

void check_tiles(const glint_model& model, const glint_engine_options& options, int64_t share, const char* name) {
  require_argument(model.weight_scale_kind != GLINT_SCALE_TILE || options.num_ranks == 1 || share % kScaleTile == 0,
                   "a rank's share of the ", name, " is ", share, ", and the scales are for tiles of ", kScaleTile,
                   ": a slice must begin where a tile begins; choose another options.num_ranks or ",
                   "options.expert_layout");
}

void check_groups(const glint_model& model, const glint_engine_options& options, int64_t width, const char* name) {
  const int64_t slice_width = width / options.row_slices;
  require_argument(model.input_group_size == 0 || options.row_slices == 1 || slice_width % model.input_group_size == 0,
                   "options.row_slices is ", options.row_slices, ": slices of the ", name, " are ", slice_width,
                   " wide, and ", model.input_group_size,
                   " inputs share a scale: a slice must begin where a group begins; choose another ",
                   "options.num_ranks or options.row_slices");
}

Weight row_share(const Weight& weight, int64_t index, int64_t shares) {
  const int64_t count = weight.rows / shares;
  return weight.row_slice(index * count, count);
}

Weight col_share(const Weight& weight, int64_t index, int64_t shares) {
  const int64_t count = weight.cols / shares;
  return weight.col_slice(index * count, count);
}

Weight mtp_head_share(const Weight& head, const RankSlice& slice) {
  const int64_t first = std::min(slice.rank * slice.mtp_vocab_share(), slice.model.mtp_vocab_size);
  const int64_t last = std::min((slice.rank + 1) * slice.mtp_vocab_share(), slice.model.mtp_vocab_size);
  return head.row_slice(first, last - first);
}

const float* from(const float* values, int64_t first) { return values == nullptr ? nullptr : values + first; }

FeedForwardWeights split(const FeedForwardWeights& whole, const RankSlice& slice) {
  if (whole.gate.data == nullptr) return whole;
  return {.gate = row_share(whole.gate, slice.rank, slice.num_ranks),
          .up = row_share(whole.up, slice.rank, slice.num_ranks),
          .down = col_share(whole.down, slice.rank, slice.num_ranks)};
}

void slice_attention(LayerWeights& layer, const RankSlice& slice) {
  const int64_t kv_first = int64_t{slice.kv_head_first} * slice.model.head_dim;
  const int64_t kv_count = int64_t{slice.model.num_kv_heads} * slice.model.head_dim;
  layer.query = row_share(layer.query, slice.rank, slice.num_ranks);
  layer.query_bias = from(layer.query_bias, slice.rank * layer.query.rows);
  layer.key = layer.key.row_slice(kv_first, kv_count);
  layer.key_bias = from(layer.key_bias, kv_first);
  layer.value = layer.value.row_slice(kv_first, kv_count);
  layer.value_bias = from(layer.value_bias, kv_first);
  layer.output = col_share(layer.output, slice.rank, slice.num_ranks);
}

void slice_experts(LayerWeights& layer, const RankSlice& slice, bool are_whole) {
  layer.shared = split(layer.shared, slice);
  if (layer.experts.empty()) return;
  layer.experts = {layer.experts.begin() + slice.expert_first, layer.experts.begin() + slice.expert_last};
  if (are_whole) return;
  for (FeedForwardWeights& expert : layer.experts) expert = split(expert, slice);
}

}

void check_slices(const glint_model& model, const glint_engine_options& options) {
  check_layout(options);
  check_heads(model, options.num_ranks);
  require_argument(model.vocab_size % options.num_ranks == 0, "options.num_ranks is ", options.num_ranks,
                   ": the vocabulary of ", model.vocab_size, " cannot be cut into ", options.num_ranks,
                   " equal slices; choose another options.num_ranks");
  const auto divides = [&](int64_t size, const char* name, bool is_width = true) {
    require_argument(size % options.row_slices == 0, "options.row_slices is ", options.row_slices, ": the ", name, " ",
                     size, " cannot be cut into ", options.row_slices,
                     " equal slices; choose another options.num_ranks or options.row_slices");
    if (is_width) check_groups(model, options, size, name);
  };
  divides(int64_t{model.num_heads} * model.head_dim, "attention width");
  check_tiles(model, options, int64_t{model.num_heads} / options.num_ranks * model.head_dim, "attention width");
  if (model.num_kv_heads > 1) {
    check_tiles(model, options, std::max(model.num_kv_heads / options.num_ranks, 1) * int64_t{model.head_dim},
                "key and value width");
  }
  if (model.num_dense_layers > 0) {
    divides(model.dense_width, "dense width");
    check_tiles(model, options, model.dense_width / options.num_ranks, "dense width");
  }
  if (model.num_dense_layers == model.num_layers) return;
  divides(model.shared_width, "shared expert width");
  check_tiles(model, options, model.shared_width / options.num_ranks, "shared expert width");
  const bool is_tp = options.expert_layout == GLINT_EXPERT_LAYOUT_TP;
  divides(is_tp ? model.expert_width : model.num_experts, is_tp ? "expert width" : "number of experts", is_tp);
  if (is_tp) check_tiles(model, options, model.expert_width / options.num_ranks, "expert width");
}

RankSlice rank_slice(const glint_model& model, const glint_engine_options& options, int32_t rank) {
  const int32_t num_ranks = options.num_ranks;
  const bool is_tp = options.expert_layout == GLINT_EXPERT_LAYOUT_TP;
  RankSlice slice{.model = model, .rank = rank, .num_ranks = num_ranks};
  slice.row_slices = options.row_slices / num_ranks;
  slice.kv_head_first = rank * model.num_kv_heads / num_ranks;
  slice.expert_first = is_tp ? 0 : rank * (model.num_experts / num_ranks);
  slice.expert_last = is_tp ? model.num_experts : (rank + 1) * (model.num_experts / num_ranks);
  slice.vocab_first = rank * (model.vocab_size / num_ranks);
  slice.vocab_last = (rank + 1) * (model.vocab_size / num_ranks);
  slice.model.num_heads = model.num_heads / num_ranks;
  slice.model.num_kv_heads = std::max(model.num_kv_heads / num_ranks, 1);
  slice.model.dense_width = model.dense_width / num_ranks;
  slice.model.shared_width = model.shared_width / num_ranks;
  if (is_tp) slice.model.expert_width = model.expert_width / num_ranks;
  return slice;
}

ModelWeights slice_weights(const ModelWeights& whole, const RankSlice& slice) {
  ModelWeights weights = whole;
  if (weights.mtp.head.data != nullptr) weights.mtp.head = mtp_head_share(whole.mtp.head, slice);
  if (slice.num_ranks == 1) return weights;
  if (weights.lm_head.data != nullptr) weights.lm_head = row_share(whole.lm_head, slice.rank, slice.num_ranks);
  const bool has_whole_experts = slice.num_experts() < slice.model.num_experts;
  for (LayerWeights& layer : weights.layers) {
    slice_attention(layer, slice);
    layer.dense = split(layer.dense, slice);
    slice_experts(layer, slice, has_whole_experts);
  }
  return weights;
}

}
