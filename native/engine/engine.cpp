#include "engine/engine.h"

#include <algorithm>
#include <string_view>

#include "base/contract.h"
#include "model/slices.h"

namespace glint {

namespace {

constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kMaxPages = 1 << 26;
constexpr int32_t kMaxStepTokens = 1 << 17;
constexpr int32_t kMaxItems = 1 << 14;
constexpr int32_t kMaxRequests = 1 << 20;

void check_range(int32_t value, int32_t low, int32_t high, const char* name) {
  require_argument(value >= low && value <= high, "options.", name, " is ", value, ", expected ", low, " to ", high);
}

glint_model checked_model(const glint_engine_options& options) {
  require_struct(options.model, "options.model");
  check_model(*options.model);
  check_slices(*options.model, options);
  require(options.model->input_group_size == 0 || std::string_view(backend_name()) == "cpu", GLINT_STATUS_UNSUPPORTED,
          "model.input_group_size is ", options.model->input_group_size, ": the ", backend_name(),
          " library quantises inputs with one scale per token; use the CPU library, or a checkpoint with scales per ",
          "channel and token");
  check_range(options.max_draft_tokens, 0, GLINT_MAX_DRAFT_TOKENS, "max_draft_tokens");
  if (options.max_draft_tokens == 0) return *options.model;
  require_argument(options.model->num_dense_layers < options.model->num_layers, "options.max_draft_tokens is ",
                   options.max_draft_tokens,
                   ": the MTP layer has experts, and no other layer of this model has; use 0");
  return *options.model;
}

void check_drafts(const glint_engine_options& options) {
  const auto has_room = [&options](int32_t room, const char* name) {
    require_argument(options.max_draft_tokens < room, "options.max_draft_tokens is ", options.max_draft_tokens,
                     " and options.", name, " is ", room, ": a request verifies its drafts and one token in one step; ",
                     "set options.max_draft_tokens to ", room - 1, " or less, or raise options.", name);
  };
  has_room(options.max_step_items, "max_step_items");
  has_room(options.max_step_tokens, "max_step_tokens");
}

EngineLimits checked_limits(const glint_engine_options& options) {
  check_range(options.num_threads, 1, kMaxThreads, "num_threads");
  check_range(options.page_tokens, 1, kSplitPositions, "page_tokens");
  require_argument(kSplitPositions % options.page_tokens == 0, "options.page_tokens is ", options.page_tokens,
                   ", expected a power of two up to ", kSplitPositions);
  check_range(options.num_pages, 0, kMaxPages, "num_pages");
  check_range(options.max_step_tokens, 1, kMaxStepTokens, "max_step_tokens");
  check_range(options.max_step_items, 1, kMaxItems, "max_step_items");
  check_drafts(options);
  check_range(options.max_requests, 1, kMaxRequests, "max_requests");
  check_range(options.max_context_tokens, 2, options.model->max_positions, "max_context_tokens");
  return {.vocab_size = options.model->vocab_size,
          .page_tokens = options.page_tokens,
          .max_step_tokens = options.max_step_tokens,
          .max_step_items = options.max_step_items,
          .max_requests = options.max_requests,
          .max_context_tokens = options.max_context_tokens,
          .max_draft_tokens = options.max_draft_tokens};
}

std::span<const glint_file> checked_files(const glint_engine_options& options, size_t tensor_count) {
  if (options.synthetic_seed != 0) {
    require_argument(options.file_count == 0 && tensor_count == 0, "options.synthetic_seed is ", options.synthetic_seed,
                     ", so the weights are random: give no files and no tensors, not ", options.file_count, " and ",
                     tensor_count);
    return {};
  }
  require_argument(options.file_count <= 0 || static_cast<size_t>(options.file_count) <= tensor_count,
                   "options.file_count is ", options.file_count, ", more than the ", tensor_count,
                   " tensors that lie in the files");
  require_argument(options.file_count > 0 && options.files != nullptr, "options.files is empty: ", options.file_count,
                   " files given");
  return {options.files, static_cast<size_t>(options.file_count)};
}

void forget_drafts(Request& request) {
  request.num_drafts = 0;
  request.progress.drafts.clear();
}

}

Step::Step(const EngineLimits& limits) {
  const auto max_items = static_cast<size_t>(limits.max_step_items);
  const auto max_tokens = static_cast<size_t>(limits.max_step_tokens);
  items.reserve(max_items);
  logit_items.reserve(max_items);
  sampled_items.reserve(max_items);
  sampled_tokens.resize(max_items);
  given_drafts.reserve(max_items);
  new_drafts.resize(max_items * static_cast<size_t>(limits.max_draft_tokens));
  results.reserve(max_items);
  mask_words.resize(max_items * static_cast<size_t>(limits.mask_words()));
  has_mask.resize(max_items);
  logprobs.reserve((max_items + max_tokens) * (GLINT_MAX_LOGPROBS + 1));
}

void Step::clear() {
  may_sample = false;
  is_awaited = false;
  is_done = false;
  failure.clear();
  items.clear();
  logit_items.clear();
  sampled_items.clear();
  given_drafts.clear();
  has_mask.assign(has_mask.size(), false);
  makes_drafts = false;
  verifies_drafts = false;
  results.clear();
  logprobs.clear();
}

glint_engine_plan plan_engine(const glint_engine_options& options) {
  const glint_model model = checked_model(options);
  checked_limits(options);
  return plan_backend(model, options);
}

Engine::Engine(const glint_engine_options& options, std::span<const glint_tensor> tensors)
    : model_(checked_model(options)),
      limits_(checked_limits(options)),
      store_(model_, checked_files(options, tensors.size()), tensors, options.max_draft_tokens > 0,
             !backend_checks_fp8_values()),
      ranks_(model_, options, store_.weights()),
      pool_(options.num_pages, options.page_tokens),
      requests_(limits_) {
  steps_.reserve(kStepSlots);
  for (size_t slot = 0; slot < kStepSlots; ++slot) steps_.emplace_back(limits_);
  admissions_.reserve(static_cast<size_t>(options.max_step_items));
  matches_.reserve(static_cast<size_t>(options.num_pages) + static_cast<size_t>(options.max_step_items));
  page_marks_.resize(static_cast<size_t>(options.num_pages));
  has_mtp_.resize(static_cast<size_t>(options.num_pages));
  taken_.resize(static_cast<size_t>(options.max_context_tokens / options.page_tokens) + 1);
  stats_.struct_bytes = sizeof(glint_engine_stats);
  stats_.num_pages = options.num_pages;
  stats_.weight_bytes_mapped = store_.bytes_mapped();
  stats_.weight_bytes_copied = store_.bytes_copied();
  runner_ = std::make_unique<StepRunner>(ranks_, limits_);
  refresh_stats();
}

Engine::~Engine() = default;

uint64_t Engine::add_request(const glint_request& source) {
  const uint64_t id = requests_.add(source);
  requests_.find(id).chain = pool_.root(source.cache_salt);
  refresh_stats();
  return id;
}

void Engine::free_request(uint64_t id) {
  Request& request = requests_.find(id);
  require(!request.is_freed, GLINT_STATUS_UNKNOWN_REQUEST, "request ", id, " was freed before");
  request.is_freed = true;
  if (request.steps_in_flight > 0) return;
  drop_pages(request);
  requests_.erase(id);
  refresh_stats();
}

void Engine::release_pages(uint64_t id) {
  Request& request = requests_.find(id);
  require(!request.is_freed, GLINT_STATUS_UNKNOWN_REQUEST, "request ", id, " was freed before");
  require(request.steps_in_flight == 0, GLINT_STATUS_BUSY, "request ", id,
          " is part of a step in flight: collect the step first");
  drop_pages(request);
  refresh_stats();
}

void Engine::limit_reuse(uint64_t id, int32_t reusable_tokens) {
  Request& request = requests_.find(id);
  require(!request.is_freed, GLINT_STATUS_UNKNOWN_REQUEST, "request ", id, " was freed before");
  require_argument(reusable_tokens >= 0, "reusable_tokens is ", reusable_tokens, ", expected 0 or more");
  request.reusable_tokens = reusable_tokens;
}

void Engine::trim_pages(Request& request, int32_t num_tokens) {
  const auto kept = static_cast<size_t>((num_tokens + limits_.page_tokens - 1) / limits_.page_tokens);
  const auto reusable = static_cast<size_t>(request.reusable_tokens / limits_.page_tokens);
  for (; request.pages.size() > kept; request.pages.pop_back()) {
    pool_.release(request.pages.back(), request.pages.size() <= reusable);
  }
}

void Engine::drop_pages(Request& request) {
  trim_pages(request, 0);
  forget_drafts(request);
  request.progress.mtp_end = 0;
  request.computed_tokens = 0;
  request.registered_pages = 0;
  request.chain = pool_.root(request.cache_salt);
}

void Engine::require_pages_for(Request& request) {
  matches_.clear();
  Admission admission{.request = &request};
  match_prefix(request, admission);
  const int32_t needed = (request.known_tokens() + limits_.page_tokens - 1) / limits_.page_tokens;
  const int64_t there = static_cast<int64_t>(request.pages.size()) + admission.match_count;
  const int64_t missing = needed - there - (pool_.available() - cached_pages_to_hold());
  require(missing <= 0, GLINT_STATUS_OUT_OF_PAGES, "request ", request.id, " needs ", missing, " more pages of ",
          limits_.page_tokens, " tokens than are free or cached: release a request's pages");
}

void Engine::run_alone(uint64_t id, bool is_prefill, glint_step_results& results) {
  Request& request = requests_.find(id);
  require(next_step_ == next_collect_, GLINT_STATUS_BUSY, "a step is in flight: collect it first");
  const int32_t left = request.known_tokens() - request.computed_tokens;
  require_argument(!request.is_finished, "request ", id, " is finished");
  require_argument(is_prefill || left == 1, "request ", id, " has ", left,
                   " tokens to compute: call glint_prefill before glint_decode_step");
  require_argument(!request.settings.has_prompt_logprobs || left <= limits_.max_step_tokens, "request ", id,
                   " asks for prompt logprobs over ", left, " tokens, one step takes ", limits_.max_step_tokens,
                   ": use glint_submit_step");
  forget_drafts(request);
  require_pages_for(request);
  do {
    glint_step_item item{};
    item.request_id = id;
    item.advance_tokens = limits_.max_step_tokens;
    glint_ticket ticket{.struct_bytes = sizeof(glint_ticket), .missing_pages = 0, .step = 0};
    submit_step({&item, 1}, ticket);
    sample_step(ticket, nullptr);
    collect_step(ticket, results);
  } while (results.items[0].token_count == 0 && results.items[0].finish_reason == GLINT_FINISH_NONE);
}

glint_engine_stats Engine::stats() const {
  const std::lock_guard lock(stats_mutex_);
  return stats_;
}

void Engine::check() const {
  std::string why;
  require(pool_.check(&why), GLINT_STATUS_INTERNAL, "page pool: ", why);
}

double Engine::measure_read(uint64_t byte_count) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 36;
  require_argument(byte_count > 0 && byte_count <= kMaxBytes, "byte_count is ", byte_count, ", expected 1 to ",
                   kMaxBytes);
  require(next_step_ == next_collect_, GLINT_STATUS_BUSY, "a step is in flight: collect it first");
  return ops::read_bytes_per_second(ranks_.first_backend(), byte_count);
}

void Engine::measure_arithmetic(glint_arithmetic& arithmetic) {
  require(next_step_ == next_collect_, GLINT_STATUS_BUSY, "a step is in flight: collect it first");
  ops::measure_arithmetic(ranks_.first_backend(), arithmetic);
}

void Engine::refresh_stats() {
  const std::lock_guard lock(stats_mutex_);
  stats_.pages_free = static_cast<int32_t>(pool_.num_free());
  stats_.pages_held = static_cast<int32_t>(pool_.num_held());
  stats_.pages_cached = static_cast<int32_t>(pool_.num_cached());
  stats_.num_requests = requests_.count();
  stats_.steps_in_flight = static_cast<int32_t>(next_step_ - next_collect_);
  ranks_.fill_stats(stats_);
}

}
