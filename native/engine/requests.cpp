#include <algorithm>

#include "base/contract.h"
#include "engine/pages.h"
#include "engine/request.h"

namespace glint {

namespace {

constexpr int32_t kMaxStopTokens = 1024;
constexpr int32_t kMaxStopSequences = 256;
constexpr int32_t kMaxStopSequenceTokens = 256;

void check_tokens(const int32_t* tokens, int32_t count, int32_t vocab_size, const char* name) {
  require_argument(count == 0 || tokens != nullptr, "request.", name, " is null, its count is ", count);
  for (int32_t index = 0; index < count; ++index) {
    require_argument(tokens[index] >= 0 && tokens[index] < vocab_size, "request.", name, "[", index, "] is ",
                     tokens[index], ", the vocabulary has the ids 0 to ", vocab_size - 1);
  }
}

void check_stops(const glint_request& source, const EngineLimits& limits) {
  require_argument(source.stop_token_count >= 0 && source.stop_token_count <= kMaxStopTokens,
                   "request.stop_token_count is ", source.stop_token_count, ", expected 0 to ", kMaxStopTokens);
  check_tokens(source.stop_tokens, source.stop_token_count, limits.vocab_size, "stop_tokens");
  require_argument(source.stop_sequence_count >= 0 && source.stop_sequence_count <= kMaxStopSequences,
                   "request.stop_sequence_count is ", source.stop_sequence_count, ", expected 0 to ",
                   kMaxStopSequences);
  require_argument(source.stop_sequence_count == 0 || source.stop_sequence_lengths != nullptr,
                   "request.stop_sequence_lengths is null, stop_sequence_count is ", source.stop_sequence_count);
  int32_t total = 0;
  for (int32_t index = 0; index < source.stop_sequence_count; ++index) {
    const int32_t length = source.stop_sequence_lengths[index];
    require_argument(length > 0 && length <= kMaxStopSequenceTokens, "request.stop_sequence_lengths[", index, "] is ",
                     length, ", expected 1 to ", kMaxStopSequenceTokens);
    total += length;
  }
  check_tokens(source.stop_sequence_tokens, total, limits.vocab_size, "stop_sequence_tokens");
}

std::vector<std::vector<int32_t>> copy_sequences(const glint_request& source) {
  std::vector<std::vector<int32_t>> sequences;
  const int32_t* next = source.stop_sequence_tokens;
  for (int32_t index = 0; index < source.stop_sequence_count; ++index) {
    sequences.emplace_back(next, next + source.stop_sequence_lengths[index]);
    next += source.stop_sequence_lengths[index];
  }
  return sequences;
}

Request copy_request(const glint_request& source, const EngineLimits& limits) {
  Request request;
  request.settings = sampling_settings(*source.sampling);
  request.stop_tokens.assign(source.stop_tokens, source.stop_tokens + source.stop_token_count);
  request.stop_sequences = copy_sequences(source);
  request.prompt_count = source.prompt_count;
  request.max_tokens = static_cast<int32_t>(
      std::min<int64_t>(limits.max_context_tokens, int64_t{source.prompt_count} + source.max_new_tokens));
  request.cache_salt = source.cache_salt;
  request.tokens.reserve(static_cast<size_t>(request.max_tokens) + 1);
  request.tokens.assign(source.prompt_tokens, source.prompt_tokens + source.prompt_count);
  request.progress.history = request.tokens;
  request.progress.history.reserve(static_cast<size_t>(request.max_tokens) + 1);
  request.progress.drafts.reserve(static_cast<size_t>(limits.max_draft_tokens));
  request.pages.reserve(static_cast<size_t>(request.max_tokens / limits.page_tokens) + 1);
  return request;
}

}

void check_request(const glint_request& source, const EngineLimits& limits) {
  require_argument(source.prompt_count > 0 && source.prompt_count < limits.max_context_tokens,
                   "request.prompt_count is ", source.prompt_count, ", expected 1 to ", limits.max_context_tokens - 1,
                   " (the context of ", limits.max_context_tokens, " tokens less one to generate)");
  require_argument(source.max_new_tokens > 0, "request.max_new_tokens is ", source.max_new_tokens,
                   ", expected at least 1");
  require_argument(source.cache_salt < PagePool::kSaltLimit, "request.cache_salt is ", source.cache_salt,
                   ", expected less than 2^63");
  check_tokens(source.prompt_tokens, source.prompt_count, limits.vocab_size, "prompt_tokens");
  check_stops(source, limits);
  require_argument(source.sampling != nullptr, "request.sampling is null");
  const std::string problem = sampling_problem(*source.sampling, limits.vocab_size);
  require_argument(problem.empty(), "request.sampling: ", problem);
}

RequestTable::RequestTable(const EngineLimits& limits)
    : limits_(limits), slots_(static_cast<size_t>(limits.max_requests)) {
  free_slots_.reserve(slots_.size());
  for (int32_t slot = limits.max_requests - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

uint64_t RequestTable::add(const glint_request& source) {
  check_request(source, limits_);
  require(!free_slots_.empty(), GLINT_STATUS_BUSY, "all ", limits_.max_requests,
          " request slots are taken: free finished requests or raise max_requests");
  Request request = copy_request(source, limits_);
  const int32_t index = free_slots_.back();
  Slot& slot = slots_[static_cast<size_t>(index)];
  request.id = uint64_t{slot.generation + 1} << 32U | static_cast<uint32_t>(index);
  free_slots_.pop_back();
  ++slot.generation;
  slot.request = std::move(request);
  slot.is_used = true;
  ++count_;
  return slot.request.id;
}

Request& RequestTable::find(uint64_t id) {
  const auto index = static_cast<uint32_t>(id);
  const auto generation = static_cast<uint32_t>(id >> 32U);
  const bool is_known = index < slots_.size() && slots_[index].is_used && slots_[index].generation == generation;
  require(is_known, GLINT_STATUS_UNKNOWN_REQUEST, "no request has the id ", id);
  return slots_[index].request;
}

void RequestTable::erase(uint64_t id) {
  find(id);
  Slot& slot = slots_[static_cast<uint32_t>(id)];
  slot.request = Request{};
  slot.is_used = false;
  free_slots_.push_back(static_cast<int32_t>(static_cast<uint32_t>(id)));
  --count_;
}

}
