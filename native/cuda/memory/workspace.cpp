#include "cuda/memory/workspace.h"

#include <algorithm>

#include "cuda/comm/collectives.h"
#include "cuda/kernels/gemm/gemm_portable.h"
#include "cuda/kernels/router/router.h"

namespace glint::cuda {

namespace {

int64_t widest_operand(const glint_model& model) {
  const int64_t attention_width = int64_t{model.num_heads} * model.head_dim;
  return std::max(int64_t{model.hidden_size}, attention_width);
}

struct GroupSizes {
  int64_t tiles = 0;
  int64_t packed_tile_bytes = 0;
};

GroupSizes largest_group(const glint_model& model, const StepLimits& limits) {
  GroupSizes sizes;
  const int64_t packed_width = plan_down_tile(model.expert_width).packed_width(model.expert_width);
  for (int64_t tokens = 1; tokens <= limits.max_tokens; ++tokens) {
    const int64_t tiles = max_token_tiles(tokens, model.experts_per_token, limits.num_local_experts);
    const PackedTileShape shape = {plan_tiles(tokens).down_tokens, packed_width};
    sizes.tiles = std::max(sizes.tiles, tiles);
    sizes.packed_tile_bytes = std::max(sizes.packed_tile_bytes, tiles * shape.bytes());
  }
  return sizes;
}

void lay_out_portable_experts(const glint_model& model, const StepLimits& limits, ExpertBuffers& moe, Arena& arena) {
  const int64_t rows = limits.max_tokens * model.experts_per_token;
  moe.gate = arena.take<float>(rows * model.expert_width);
  moe.up = arena.take<float>(rows * model.expert_width);
  moe.operand.stride_bytes = operand_row_bytes(model, model.expert_width);
  moe.operand.rows = arena.take<uint8_t>(rows * moe.operand.stride_bytes);
  moe.operand.scales = arena.take<float>(rows);
  moe.routed = arena.take<float>(rows * model.hidden_size);
  moe.token_rows = arena.take<int32_t>(token_rows_count(limits.max_tokens, model.experts_per_token));
}

ExpertBuffers lay_out_experts(const glint_model& model, const StepLimits& limits, Arena& arena) {
  ExpertBuffers moe;
  moe.experts_touched = arena.take<uint64_t>(1);
  if (model.num_dense_layers == model.num_layers) return moe;
  const int64_t pairs = limits.padded_tokens() * model.experts_per_token;
  const int64_t rows = pairs + limits.max_tokens;
  const int64_t streamed_rows = max_streamed_rows(limits.max_tokens, model.experts_per_token);
  const GroupSizes sizes = largest_group(model, limits);
  moe.experts = arena.take<int32_t>(pairs);
  moe.weights = arena.take<float>(pairs);
  moe.router_splits = arena.take<float>(router_split_floats(limits.max_tokens, model.hidden_size, model.num_experts));
  moe.grouped.row_tokens = arena.take<int32_t>(rows);
  moe.grouped.row_weights = arena.take<float>(rows);
  moe.grouped.gate_up_tiles = arena.take<TokenTile>(sizes.tiles);
  moe.grouped.num_gate_up_tiles = arena.take<int32_t>(1);
  moe.grouped.down_tiles = arena.take<TokenTile>(sizes.tiles);
  moe.grouped.down_tile_ends = arena.take<int32_t>(limits.max_tokens + 1);
  moe.grouped.row_places = arena.take<RowPlace>(streamed_rows);
  moe.grouped.rows_packed = arena.take<uint32_t>(sizes.tiles);
  moe.grouped.num_rows = arena.take<int32_t>(1);
  if (limits.has_separate_shared) moe.shared = arena.take<float>(limits.max_tokens * model.hidden_size);
  if (!limits.has_tiled_experts) {
    lay_out_portable_experts(model, limits, moe, arena);
    return moe;
  }
  moe.hidden = arena.take<float>(rows * model.expert_width);
  moe.streamed = arena.take<float>(streamed_rows * model.expert_width);
  moe.packed_tiles = arena.take<uint8_t>(sizes.packed_tile_bytes);
  moe.arrivals = arena.take<uint32_t>(1);
  moe.tiles_taken = arena.take<uint32_t>(1);
  if (!limits.stores_down_rows || limits.max_tokens <= kSplitKTokens) return moe;
  moe.routed = arena.take<float>(rows * model.hidden_size);
  moe.grouped.token_rows = arena.take<int32_t>(token_rows_count(limits.max_tokens, model.experts_per_token));
  return moe;
}

}

StepRows StepBuffers::rows(int64_t count) const {
  int32_t* first = counts + kCounts;
  return {.tokens = first,
          .sampled_rows = first + count,
          .positions = first + 2 * count,
          .slots = first + 3 * count,
          .count = count};
}

StepBuffers lay_out_step(const glint_model& model, const StepLimits& limits, Arena& arena) {
  StepBuffers buffers;
  buffers.counts = arena.take<int32_t>(StepBuffers::words(limits.max_tokens));
  buffers.logit_rows = arena.take<int32_t>(limits.max_items);
  buffers.hidden_rows = arena.take<int32_t>(limits.mtp_rows());
  buffers.page_states = arena.take<PageState>(limits.mtp_rows());
  buffers.page_table = arena.take<int32_t>(limits.max_items * limits.max_pages_per_request());
  buffers.decode_tasks = arena.take<DecodeTask>(limits.max_decode_tasks());
  buffers.prefill_tasks = arena.take<PrefillTask>(limits.max_prefill_tasks(model.num_heads / model.num_kv_heads));
  return buffers;
}

SampleBuffers lay_out_sampling(const glint_model& model, const StepLimits& limits, Arena& arena) {
  SampleBuffers buffers;
  buffers.settings = arena.take<SampleSettings>(limits.max_items);
  buffers.mask_words = arena.take<uint32_t>(limits.max_items * mask_words(model));
  buffers.bias_tokens = arena.take<int32_t>(limits.max_items * kMaxBiasCount);
  buffers.bias_values = arena.take<float>(limits.max_items * kMaxBiasCount);
  buffers.history = arena.take<int32_t>(limits.max_items * limits.max_context_tokens);
  for (SampleResult*& results : buffers.results) results = arena.take<SampleResult>(limits.max_items);
  return buffers;
}

int64_t branch_output_floats(const glint_model& model, const StepLimits& limits) {
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

Workspace lay_out_workspace(const glint_model& model, const StepLimits& limits, Arena& arena) {
  const int64_t tokens = limits.padded_tokens();
  const int64_t hidden = model.hidden_size;
  const int64_t query_width = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_width = int64_t{model.num_kv_heads} * model.head_dim;
  const int64_t page_head_dim = padded_head_dim(model.head_dim);
  Workspace workspace;
  workspace.step = lay_out_step(model, limits, arena);
  workspace.sampling = lay_out_sampling(model, limits, arena);
  workspace.moe = lay_out_experts(model, limits, arena);
  workspace.hidden = arena.take<float>(tokens * hidden);
  workspace.branch_output = arena.take<float>(branch_output_floats(model, limits));
  workspace.received_parts = arena.take<float>(limits.is_sequence_parallel() ? tokens * hidden : 0);
  if (limits.peer_rows > 0) workspace.peers = PeerSum::take_buffers(arena, limits.num_ranks, limits.peer_rows, hidden);
  workspace.normed = arena.take<float>(tokens * hidden);
  workspace.qkv = arena.take<float>(tokens * (query_width + 2 * kv_width));
  workspace.query = arena.take<uint16_t>(tokens * model.num_heads * page_head_dim);
  workspace.attention_output = arena.take<float>(tokens * query_width);
  workspace.attention_magnitudes = arena.take<float>(tokens * model.num_kv_heads);
  workspace.cosines = arena.take<float>(tokens * model.rotary_dim / 2);
  workspace.sines = arena.take<float>(tokens * model.rotary_dim / 2);
  workspace.partials =
      arena.take<float>(limits.max_decode_tasks() * model.num_kv_heads * partial_floats(model.head_dim));
  workspace.arrivals = arena.take<int32_t>(tokens * model.num_kv_heads);
  const int64_t gated_width = std::max(model.dense_width, model.shared_width);
  workspace.gate_up = arena.take<float>(tokens * 2 * gated_width);
  workspace.gated = arena.take<float>(weight_element(model) == GemmElement::kBf16 ? tokens * gated_width : 0);
  workspace.logit_normed = arena.take<float>(limits.max_items * hidden);
  const int64_t sampled_items = limits.samples ? limits.max_items : 0;
  workspace.rank_logits = arena.take<float>(limits.num_ranks > 1 ? limits.max_items * limits.vocab_rows : 0);
  workspace.gathered_logits = arena.take<float>(limits.num_ranks > 1 ? sampled_items * model.vocab_size : 0);
  workspace.logits = arena.take<float>(sampled_items * model.vocab_size);
  workspace.operand_rows = arena.take<uint8_t>(tokens * operand_row_bytes(model, widest_operand(model)));
  workspace.operand_scales = arena.take<float>(tokens);
  workspace.gated_rows = arena.take<uint8_t>(tokens * operand_row_bytes(model, gated_width));
  workspace.gated_scales = arena.take<float>(tokens);
  workspace.logit_operand = arena.take<uint8_t>(limits.max_items * portable_row_bytes(hidden, GemmElement::kBf16));
  workspace.mtp_hidden = arena.take<float>(limits.mtp_rows() * hidden);
  workspace.mtp_operand = arena.take<uint8_t>(limits.mtp_rows() * portable_row_bytes(2 * hidden, GemmElement::kBf16));
  return workspace;
}

}
