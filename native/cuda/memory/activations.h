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
  bool has_hopper_experts;
  bool has_shared_apart = false;
  int32_t num_ranks = 1;
  int32_t vocab_rows = 0;
  int64_t gathered_rows = 0;
  int64_t peer_rows = 0;
  bool decides = true;

  int64_t padded_tokens() const { return (max_tokens + num_ranks - 1) / num_ranks * num_ranks; }
  int64_t gathered_tokens() const { return num_ranks == 1 ? 0 : num_ranks * gathered_rows; }
  bool has_shards() const { return num_ranks > 1 && gathered_rows < max_tokens; }
  int64_t max_splits() const { return (max_context_tokens + kSplitTokens - 1) / kSplitTokens; }
  int64_t max_decode_tasks() const { return max_items * max_splits(); }
  int64_t max_pages_per_request() const { return (max_context_tokens + kPageTokens - 1) / kPageTokens; }
  int64_t max_prefill_tasks(int64_t group_heads) const {
    return (max_tokens * group_heads + kPrefillTileQueries - 1) / kPrefillTileQueries + max_items;
  }
};

struct Operand {
  uint8_t* rows = nullptr;
  float* scales = nullptr;
  int64_t stride_bytes = 0;
};

inline constexpr int kRowCount = 0;
inline constexpr int kDecodeCount = 1;
inline constexpr int kPrefillCount = 2;

struct StepPlaces {
  int32_t* counts = nullptr;
  int32_t* tokens = nullptr;
  int32_t* positions = nullptr;
  int32_t* slots = nullptr;
  int32_t* logit_rows = nullptr;
  int32_t* page_table = nullptr;
  DecodeTask* decode_tasks = nullptr;
  PrefillTask* prefill_tasks = nullptr;
};

struct SamplePlaces {
  SampleSettings* settings = nullptr;
  uint32_t* mask_words = nullptr;
  int32_t* bias_tokens = nullptr;
  float* bias_values = nullptr;
  int32_t* history = nullptr;
  SampleResult* results[kSampleSlots] = {};
};

struct ExpertActivations {
  int32_t* experts = nullptr;
  float* weights = nullptr;
  float* router_splits = nullptr;
  GroupedTokens grouped = {};
  float* hidden = nullptr;
  float* handed = nullptr;
  uint8_t* records = nullptr;
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

struct Activations {
  StepPlaces step;
  SamplePlaces sampling;
  ExpertActivations moe;
  float* hidden = nullptr;
  float* update = nullptr;
  float* received = nullptr;
  PeerSumPlaces peers = {};
  float* normed = nullptr;
  float* query_key_value = nullptr;
  uint16_t* query = nullptr;
  float* attended = nullptr;
  float* cosines = nullptr;
  float* sines = nullptr;
  float* partials = nullptr;
  int32_t* arrivals = nullptr;
  float* gate_up = nullptr;
  float* gated = nullptr;
  float* logit_hidden = nullptr;
  float* logit_normed = nullptr;
  float* rank_logits = nullptr;
  float* gathered_logits = nullptr;
  float* logits = nullptr;
  uint8_t* operand_rows = nullptr;
  float* operand_scales = nullptr;
  uint8_t* gated_rows = nullptr;
  float* gated_scales = nullptr;
  uint8_t* logit_operand = nullptr;
};

StepPlaces lay_out_step(const glint_model& model, const StepLimits& limits, Arena& arena);
SamplePlaces lay_out_sampling(const glint_model& model, const StepLimits& limits, Arena& arena);
Activations lay_out_activations(const glint_model& model, const StepLimits& limits, Arena& arena);
int64_t update_floats(const glint_model& model, const StepLimits& limits);
int64_t mask_words(const glint_model& model);
GemmElement weight_element(const glint_model& model);
int64_t operand_row_bytes(const glint_model& model, int64_t width);

}
