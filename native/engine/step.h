#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/failure_record.h"
#include "engine/request.h"
#include "include/glint.h"

namespace glint {

struct PlannedItem {
  Request* request = nullptr;
  int32_t first_position = 0;
  int32_t count = 0;
  int32_t max_drafts = 0;
  int32_t max_verified = 0;
  std::span<int32_t> drafts;
  std::span<const int32_t> pages;
  int32_t draft_tokens = 0;
  int32_t first_row = 0;
  int32_t sampled_row = 0;
  int32_t mtp_end = 0;
  bool resumes_mtp = false;
  bool samples = false;
  bool follows_drafts = false;
  bool is_skipped = false;

  int32_t num_drafts() const { return static_cast<int32_t>(drafts.size()); }
  bool is_speculative() const { return samples && max_drafts + draft_tokens > 0; }
};

struct Step {
  explicit Step(const EngineLimits& limits);
  void clear();

  int32_t slot() const { return static_cast<int32_t>(serial % GLINT_MAX_STEPS_IN_FLIGHT); }

  uint64_t serial = 0;
  bool may_sample = false;
  bool is_awaited = false;
  bool is_done = false;
  FailureRecord failure;

  std::vector<PlannedItem> items;
  std::vector<int32_t> logit_items;
  std::vector<int32_t> sampled_items;
  std::vector<int32_t> sampled_tokens;
  std::vector<int32_t> given_drafts;
  std::vector<int32_t> new_drafts;
  std::vector<glint_item_result> results;
  std::vector<glint_logprob> logprobs;
  std::vector<uint32_t> mask_words;
  std::vector<bool> has_mask;
  bool makes_drafts = false;
  bool verifies_drafts = false;
};

}
