#pragma once

#include <cstdint>

#include "base/memory.h"
#include "include/glint.h"
#include "model/sampling.h"
#include "model/slices.h"

namespace glint::cpu {

struct Workspace {
  Workspace(const RankSlice& slice, const glint_engine_options& options);

  Buffer<float> hidden;
  Buffer<float> normed;
  Buffer<float> query;
  Buffer<float> key;
  Buffer<float> value;
  Buffer<float> attention_output;
  Buffer<float> cosines;
  Buffer<float> sines;
  Buffer<float> gate;
  Buffer<float> up;
  Buffer<float> shared_gate;
  Buffer<float> shared_up;
  Buffer<float> routed;
  Buffer<float> shared;
  Buffer<float> parts;
  Buffer<float> branch_sum;
  Buffer<float> router_logits;
  Buffer<float> expert_weights;
  Buffer<float> logits;
  Buffer<float> rank_logits;
  Buffer<int32_t> experts;
  Buffer<int32_t> routed_rows;
  Buffer<int32_t> expert_tokens;
  Buffer<int32_t> expert_first;
  Buffer<std::byte> operand;
  Buffer<std::byte> float_operand;
  Buffer<std::byte> expert_operand;
  Buffer<std::byte> shared_operand;
  Buffer<float> operand_scales;
  Buffer<float> expert_scales;
  Buffer<float> shared_scales;
  Buffer<SampledRow> sampled;
  Buffer<int32_t> step_tokens;
  Buffer<float> mtp_input;
  Buffer<std::byte> mtp_operand;
  uint64_t byte_count = 0;
};

}
