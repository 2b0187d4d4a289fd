#pragma once

#include "cuda/backend.h"

namespace glint {

namespace cuda {

enum class AllReduce { kSingleRank, kPeerMemory, kAllGather, kSequenceParallel };

enum class Branch : int32_t { kAttention = 0, kFeedForward = 1 };

struct DeferredResidual {
  const float* parts = nullptr;
  int64_t part_stride = 0;
  int32_t num_parts = 0;
  bool is_in_peer_memory = false;
};

bool fits_fused_attention(const Backend& backend);

}

struct StepState {
  int64_t num_rows = 0;
  int64_t num_logit_rows = 0;
  int64_t num_decode_tasks = 0;
  int64_t num_prefill_tasks = 0;
  int64_t num_prefill_pages = 0;
  int32_t slot = 0;
  bool is_captured = false;
  bool samples_all_rows = false;
  bool verifies_drafts = false;
  bool has_logits = false;
  bool fuses_rope_and_attention = false;
  bool streams_gate_up = false;
  bool gathers_async = false;
  bool hides_earlier = false;
  cuda::StepRows rows;
  cuda::AllReduce all_reduce = cuda::AllReduce::kSingleRank;
  cuda::Branch branch = cuda::Branch::kAttention;
  cuda::DeferredResidual deferred;
  bool hidden_is_settled = false;
  bool is_grouped = false;
};

}
