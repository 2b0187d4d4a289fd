#pragma once

#include <cstdint>

#include "include/glint.h"
#include "model/weights.h"

namespace glint {

inline constexpr int32_t kMaxRanks = 64;

struct RankSlice {
  glint_model model;
  int32_t rank = 0;
  int32_t num_ranks = 1;
  int32_t row_slices = 1;
  int32_t kv_head_first = 0;
  int32_t expert_first = 0;
  int32_t expert_last = 0;
  int32_t vocab_first = 0;
  int32_t vocab_last = 0;

  bool is_first() const { return rank == 0; }
  int32_t num_experts() const { return expert_last - expert_first; }
  int32_t vocab_size() const { return vocab_last - vocab_first; }
  int32_t mtp_vocab_share() const { return (model.mtp_vocab_size + num_ranks - 1) / num_ranks; }
};

void check_slices(const glint_model& model, const glint_engine_options& options);
RankSlice rank_slice(const glint_model& model, const glint_engine_options& options, int32_t rank);
ModelWeights slice_weights(const ModelWeights& whole, const RankSlice& slice);

}
