#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "include/glint.h"
#include "model/sampling.h"

namespace glint {

struct EngineLimits {
  int32_t vocab_size;
  int32_t page_tokens;
  int32_t max_step_tokens;
  int32_t max_step_items;
  int32_t max_requests;
  int32_t max_context_tokens;
  int32_t max_draft_tokens;

  int32_t mask_words() const { return (vocab_size + 31) / 32; }
};

struct RankProgress {
  std::vector<int32_t> history;
  std::vector<int32_t> drafts;
  int32_t mtp_first = 0;
  int32_t mtp_end = 0;
  int32_t prompt_logprobs_end = 1;
  int32_t sampled_row = 0;
  int32_t finish_reason = GLINT_FINISH_NONE;
};

struct Request {
  uint64_t id = 0;
  SamplingSettings settings;
  std::vector<int32_t> stop_tokens;
  std::vector<std::vector<int32_t>> stop_sequences;
  int32_t prompt_count = 0;
  int32_t max_tokens = 0;
  uint64_t cache_salt = 0;
  int32_t reusable_tokens = std::numeric_limits<int32_t>::max();

  std::vector<int32_t> tokens;
  std::vector<int32_t> pages;
  int32_t computed_tokens = 0;
  int32_t pending_tokens = 0;
  int32_t num_drafts = 0;
  int32_t cached_tokens = 0;
  int32_t registered_pages = 0;
  uint64_t chain = 0;
  uint64_t last_step = 0;
  int32_t steps_in_flight = 0;
  bool is_speculating = false;
  bool was_admitted = false;
  bool is_finished = false;
  bool is_freed = false;

  RankProgress progress;

  int32_t known_tokens() const { return static_cast<int32_t>(tokens.size()) + pending_tokens; }
};

class RequestTable {
 public:
  explicit RequestTable(const EngineLimits& limits);

  uint64_t add(const glint_request& source);
  Request& find(uint64_t id);
  void erase(uint64_t id);
  int32_t count() const { return count_; }

 private:
  struct Slot {
    Request request;
    uint32_t generation = 0;
    bool is_used = false;
  };

  EngineLimits limits_;
  std::vector<Slot> slots_;
  std::vector<int32_t> free_slots_;
  int32_t count_ = 0;
};

void check_request(const glint_request& source, const EngineLimits& limits);

}
