#pragma once

#include <cstdint>

#include "cuda/kernels/attention/attention.h"
#include "cuda/memory/device_memory.h"
#include "cuda/kernels/moe/experts.h"
#include "cuda/comm/peer_sum.h"
#include "cuda/kernels/sampling/sampling.h"
#include "include/glint.h"
#include "model/ops.h"

namespace glint::cuda {

struct StepLimits {
  int64_t max_tokens;
  int64_t max_items;
  int64_t max_context_tokens;
  int32_t num_local_experts;
  bool has_tiled_experts;
  bool stores_down_rows = false;
  bool has_separate_shared = false;
  int32_t num_ranks = 1;
  int32_t vocab_rows = 0;
  int64_t gathered_rows = 0;
  int64_t peer_rows = 0;
  bool samples = true;
  int32_t max_drafts = 0;

  bool has_mtp() const { return max_drafts > 0; }
  int64_t mtp_rows() const { return has_mtp() ? max_tokens : 0; }
  int64_t padded_tokens() const { return (max_tokens + num_ranks - 1) / num_ranks * num_ranks; }
  int64_t gathered_tokens() const { return num_ranks == 1 ? 0 : num_ranks * gathered_rows; }
  bool is_sequence_parallel() const { return num_ranks > 1 && gathered_rows < max_tokens; }
  int64_t max_splits() const { return (max_context_tokens + kSplitTokens - 1) / kSplitTokens; }
  int64_t max_decode_tasks() const { return max_items * max_splits(); }
  int64_t max_pages_per_request() const { return (max_context_tokens + kPageTokens - 1) / kPageTokens; }
  int64_t max_prefill_tasks(int64_t group_heads) const {
    return (max_tokens * group_heads + kPrefillTileQueries - 1) / kPrefillTileQueries + max_items;
  }
};

struct Operand {
  Operand from_row(int64_t row) const {
    return {rows + row * stride_bytes, scales == nullptr ? nullptr : scales + row, stride_bytes};
  }

  uint8_t* rows = nullptr;
  float* scales = nullptr;
  int64_t stride_bytes = 0;
};

inline constexpr int kRowCount = 0;
inline constexpr int kDecodeCount = 1;
inline constexpr int kPrefillCount = 2;

struct StepRows {
  int32_t* tokens = nullptr;
  int32_t* sampled_rows = nullptr;
  int32_t* positions = nullptr;
  int32_t* slots = nullptr;
  int64_t count = 0;
};

struct StepBuffers {
  static constexpr int64_t kCounts = 16;
  static constexpr int64_t kRowFields = 4;

  StepRows rows(int64_t count) const;
  static constexpr int64_t words(int64_t num_rows) { return kCounts + kRowFields * num_rows; }

  int32_t* counts = nullptr;
  int32_t* logit_rows = nullptr;
  int32_t* hidden_rows = nullptr;
  PageState* page_states = nullptr;
  int32_t* page_table = nullptr;
  DecodeTask* decode_tasks = nullptr;
  PrefillTask* prefill_tasks = nullptr;
};

struct SampleBuffers {
  SampleSettings* settings = nullptr;
  uint32_t* mask_words = nullptr;
  int32_t* bias_tokens = nullptr;
  float* bias_values = nullptr;
  int32_t* history = nullptr;
  SampleResult* results[kSampleSlots] = {};
};

struct ExpertBuffers {
  int32_t* experts = nullptr;
  float* weights = nullptr;
  float* router_splits = nullptr;
  GroupedTokens grouped = {};
  float* hidden = nullptr;
  float* streamed = nullptr;
  uint8_t* packed_tiles = nullptr;
  uint32_t* arrivals = nullptr;
  uint32_t* tiles_taken = nullptr;
  float* gate = nullptr;
  float* up = nullptr;
  Operand operand;
  float* routed = nullptr;
  int32_t* token_rows = nullptr;
  float* shared = nullptr;
  uint64_t* experts_touched = nullptr;
};

struct Workspace {
  StepBuffers step;
  SampleBuffers sampling;
  ExpertBuffers moe;
  float* hidden = nullptr;
  float* branch_output = nullptr;
  float* received_parts = nullptr;
  PeerSumBuffers peers = {};
  float* normed = nullptr;
  float* qkv = nullptr;
  uint16_t* query = nullptr;
  float* attention_output = nullptr;
  float* attention_magnitudes = nullptr;
  float* cosines = nullptr;
  float* sines = nullptr;
  float* partials = nullptr;
  int32_t* arrivals = nullptr;
  float* gate_up = nullptr;
  float* gated = nullptr;
  float* logit_normed = nullptr;
  float* rank_logits = nullptr;
  float* gathered_logits = nullptr;
  float* logits = nullptr;
  uint8_t* operand_rows = nullptr;
  float* operand_scales = nullptr;
  uint8_t* gated_rows = nullptr;
  float* gated_scales = nullptr;
  uint8_t* logit_operand = nullptr;
  float* mtp_hidden = nullptr;
  uint8_t* mtp_operand = nullptr;
};

StepBuffers lay_out_step(const glint_model& model, const StepLimits& limits, Arena& arena);
SampleBuffers lay_out_sampling(const glint_model& model, const StepLimits& limits, Arena& arena);
Workspace lay_out_workspace(const glint_model& model, const StepLimits& limits, Arena& arena);
int64_t branch_output_floats(const glint_model& model, const StepLimits& limits);
int64_t mask_words(const glint_model& model);
GemmElement weight_element(const glint_model& model);
int64_t operand_row_bytes(const glint_model& model, int64_t width);

}
