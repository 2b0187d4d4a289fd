#include "cuda/memory/activations.h"

#include <algorithm>

#include "cuda/comm/collectives.h"
#include "cuda/kernels/gemm/gemm_portable.h"
#include "cuda/kernels/router/router.h"

namespace glint::cuda {

namespace {

constexpr int64_t kCounts = 16;

int64_t widest_operand(const glint_model& model) {
  const int64_t attention_width = int64_t{model.num_heads} * model.head_dim;
  return std::max(int64_t{model.hidden_size}, attention_width);
}

struct GroupSizes {
  int64_t tiles = 0;
  int64_t record_bytes = 0;
};

GroupSizes largest_group(const glint_model& model, const StepLimits& limits) {
  GroupSizes sizes;
  for (int64_t tokens = 1; tokens <= limits.max_tokens; ++tokens) {
    const int64_t tiles = max_token_tiles(tokens, model.experts_per_token, limits.num_local_experts);
    const PackedTileShape shape = {plan_tiles(tokens).down_tokens, model.expert_width};
    sizes.tiles = std::max(sizes.tiles, tiles);
    sizes.record_bytes = std::max(sizes.record_bytes, tiles * shape.bytes());
  }
  return sizes;
}

void lay_out_portable_experts(const glint_model& model, const StepLimits& limits, ExpertActivations& moe,
                              Arena& arena) {
  const int64_t rows = limits.max_tokens * model.experts_per_token;
  moe.gate = arena.take<float>(rows * model.expert_width);
  moe.up = arena.take<float>(rows * model.expert_width);
  moe.operand.stride_bytes = operand_row_bytes(model, model.expert_width);
  moe.operand.rows = arena.take<uint8_t>(rows * moe.operand.stride_bytes);
  moe.operand.scales = arena.take<float>(rows);
  moe.routed = arena.take<float>(rows * model.hidden_size);
  moe.token_rows = arena.take<int32_t>(token_rows_count(limits.max_tokens, model.experts_per_token));
}

ExpertActivations lay_out_experts(const glint_model& model, const StepLimits& limits, Arena& arena) {
  ExpertActivations moe;
  moe.experts_touched = arena.take<uint64_t>(1);
  if (model.num_dense_layers == model.num_layers) return moe;
  const int64_t pairs = limits.padded_tokens() * model.experts_per_token;
  const int64_t rows = pairs + limits.max_tokens;
  const int64_t handed_rows = max_streamed_rows(limits.max_tokens, model.experts_per_token);
  const GroupSizes sizes = largest_group(model, limits);
  moe.experts = arena.take<int32_t>(pairs);
  moe.weights = arena.take<float>(pairs);
  moe.router_splits =
      arena.take<float>(router_split_floats(limits.max_tokens, model.hidden_size, model.num_experts));
  moe.grouped.row_tokens = arena.take<int32_t>(rows);
  moe.grouped.row_weights = arena.take<float>(rows);
  moe.grouped.gate_up_tiles = arena.take<TokenTile>(sizes.tiles);
  moe.grouped.num_gate_up_tiles = arena.take<int32_t>(1);
  moe.grouped.down_tiles = arena.take<TokenTile>(sizes.tiles);
  moe.grouped.down_tile_ends = arena.take<int32_t>(limits.max_tokens + 1);
  moe.grouped.row_places = arena.take<RowPlace>(handed_rows);
  moe.grouped.rows_packed = arena.take<uint32_t>(sizes.tiles);
  moe.grouped.num_rows = arena.take<int32_t>(1);
  if (limits.has_shared_apart) moe.shared = arena.take<float>(limits.max_tokens * model.hidden_size);
  if (!limits.has_hopper_experts) {
    lay_out_portable_experts(model, limits, moe, arena);
    return moe;
  }
  moe.hidden = arena.take<float>(rows * model.expert_width);
  moe.handed = arena.take<float>(handed_rows * model.expert_width);
  moe.records = arena.take<uint8_t>(sizes.record_bytes);
  moe.arrivals = arena.take<uint32_t>(1);
  moe.tiles_taken = arena.take<uint32_t>(1);
  return moe;
}

}

StepPlaces lay_out_step(const glint_model& model, const StepLimits& limits, Arena& arena) {
  StepPlaces places;
  places.counts = arena.take<int32_t>(kCounts + 3 * limits.max_tokens);
  places.tokens = places.counts + kCounts;
  places.positions = places.tokens + limits.max_tokens;
  places.slots = places.positions + limits.max_tokens;
  places.logit_rows = arena.take<int32_t>(limits.max_items);
  places.page_table = arena.take<int32_t>(limits.max_items * limits.max_pages_per_request());
  places.decode_tasks = arena.take<DecodeTask>(limits.max_decode_tasks());
  places.prefill_tasks = arena.take<PrefillTask>(limits.max_prefill_tasks(model.num_heads / model.num_kv_heads));
  return places;
}

SamplePlaces lay_out_sampling(const glint_model& model, const StepLimits& limits, Arena& arena) {
  SamplePlaces places;
  places.settings = arena.take<SampleSettings>(limits.max_items);
  places.mask_words = arena.take<uint32_t>(limits.max_items * mask_words(model));
  places.bias_tokens = arena.take<int32_t>(limits.max_items * kMaxBiasCount);
  places.bias_values = arena.take<float>(limits.max_items * kMaxBiasCount);
  places.history = arena.take<int32_t>(limits.max_items * limits.max_context_tokens);
  for (SampleResult*& results : places.results) results = arena.take<SampleResult>(limits.max_items);
  return places;
}

int64_t update_floats(const glint_model& model, const StepLimits& limits) {
  const int64_t rows = std::max(limits.padded_tokens(), limits.gathered_tokens());
  const int64_t first_use = limits.num_ranks > 1 ? Collectives::scratch_floats(limits.num_ranks) : 0;
  return std::max(rows * model.hidden_size, first_use);
}

int64_t mask_words(const glint_model& model) { return (int64_t{model.vocab_size} + 31) / 32; }

GemmElement weight_element(const glint_model& model) {
  return model.weight_scale_kind == GLINT_SCALE_NONE ? GemmElement::kBf16 : GemmElement::kE4m3;
}

int64_t operand_row_bytes(const glint_model& model, int64_t width) {
  return portable_row_bytes(width, weight_element(model));
}

Activations lay_out_activations(const glint_model& model, const StepLimits& limits, Arena& arena) {
  const int64_t tokens = limits.padded_tokens();
  const int64_t hidden = model.hidden_size;
  const int64_t query_width = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_width = int64_t{model.num_kv_heads} * model.head_dim;
  const int64_t page_head_dim = padded_head_dim(model.head_dim);
  Activations places;
  places.step = lay_out_step(model, limits, arena);
  places.sampling = lay_out_sampling(model, limits, arena);
  places.moe = lay_out_experts(model, limits, arena);
  places.hidden = arena.take<float>(tokens * hidden);
  places.update = arena.take<float>(update_floats(model, limits));
  places.received = arena.take<float>(limits.has_shards() ? tokens * hidden : 0);
  if (limits.peer_rows > 0) places.peers = PeerSum::take_places(arena, limits.num_ranks, limits.peer_rows, hidden);
  places.normed = arena.take<float>(tokens * hidden);
  places.query_key_value = arena.take<float>(tokens * (query_width + 2 * kv_width));
  places.query = arena.take<uint16_t>(tokens * model.num_heads * page_head_dim);
  places.attended = arena.take<float>(tokens * query_width);
  places.cosines = arena.take<float>(tokens * model.rotary_dim / 2);
  places.sines = arena.take<float>(tokens * model.rotary_dim / 2);
  places.partials = arena.take<float>(limits.max_decode_tasks() * model.num_kv_heads * partial_floats(model.head_dim));
  places.arrivals = arena.take<int32_t>(tokens * model.num_kv_heads);
  const int64_t gated_width = std::max(model.dense_width, model.shared_width);
  places.gate_up = arena.take<float>(tokens * 2 * gated_width);
  places.gated = arena.take<float>(weight_element(model) == GemmElement::kBf16 ? tokens * gated_width : 0);
  places.logit_hidden = arena.take<float>(limits.max_items * hidden);
  places.logit_normed = arena.take<float>(limits.max_items * hidden);
  const int64_t deciding_items = limits.decides ? limits.max_items : 0;
  places.rank_logits = arena.take<float>(limits.num_ranks > 1 ? limits.max_items * limits.vocab_rows : 0);
  places.gathered_logits = arena.take<float>(limits.num_ranks > 1 ? deciding_items * model.vocab_size : 0);
  places.logits = arena.take<float>(deciding_items * model.vocab_size);
  places.operand_rows = arena.take<uint8_t>(tokens * operand_row_bytes(model, widest_operand(model)));
  places.operand_scales = arena.take<float>(tokens);
  places.gated_rows = arena.take<uint8_t>(tokens * operand_row_bytes(model, gated_width));
  places.gated_scales = arena.take<float>(tokens);
  places.logit_operand = arena.take<uint8_t>(limits.max_items * portable_row_bytes(hidden, GemmElement::kBf16));
  return places;
}

}
