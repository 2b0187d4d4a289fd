#include <algorithm>

#include "base/contract.h"
#include "engine/engine.h"

namespace glint {

namespace {

constexpr int32_t kDecidedByStepBefore = -1;

}

Request& Engine::checked_item(const glint_step_item& item, size_t index) {
  Request& request = requests_.find(item.request_id);
  require(!request.is_freed, GLINT_STATUS_UNKNOWN_REQUEST, "request ", item.request_id, " of item ", index,
          " was freed");
  require_argument(!request.is_finished, "request ", item.request_id, " of item ", index, " is finished");
  require_argument(request.last_step != next_step_, "request ", item.request_id, " occurs twice in the step");
  require_argument(item.advance_tokens > 0, "item ", index, " advances ", item.advance_tokens, " tokens");
  require_argument(item.draft_tokens >= 0 && item.draft_tokens <= limits_.max_draft_tokens, "item ", index, " has ",
                   item.draft_tokens, " draft tokens, expected 0 to ", limits_.max_draft_tokens,
                   " (options.max_draft_tokens)");
  require_argument(request.known_tokens() > request.computed_tokens, "request ", item.request_id, " of item ", index,
                   " has no token to compute: collect the step that samples it first");
  return request;
}

void Engine::match_prefix(Request& request, Admission& admission) {
  admission.match_first = static_cast<int32_t>(matches_.size());
  admission.match_count = 0;
  if (!request.pages.empty() || request.computed_tokens > 0 || request.settings.has_prompt_logprobs) return;
  const int32_t page_tokens = limits_.page_tokens;
  const int32_t limit = (request.known_tokens() - 1) / page_tokens;
  uint64_t parent = pool_.root(request.cache_salt);
  while (admission.match_count < limit) {
    const auto start = static_cast<size_t>(admission.match_count) * static_cast<size_t>(page_tokens);
    const std::span<const int32_t> tokens(request.tokens.data() + start, static_cast<size_t>(page_tokens));
    const std::optional<PagePool::Match> match = pool_.find(parent, tokens);
    if (!match.has_value()) break;
    matches_.push_back(*match);
    admission.has_mtp = (admission.has_mtp || admission.match_count == 0) && has_mtp_[static_cast<size_t>(match->page)];
    parent = match->serial;
    ++admission.match_count;
  }
}

Engine::Admission Engine::plan_admission(Request& request, const glint_step_item& item) {
  Admission admission{.request = &request,
                      .first_position = request.computed_tokens,
                      .draft_tokens = item.draft_tokens,
                      .follows_drafts = request.is_speculating};
  match_prefix(request, admission);
  admission.first_position += admission.match_count * limits_.page_tokens;
  const int32_t known = request.known_tokens();
  admission.count = std::min(item.advance_tokens, known + request.num_drafts - admission.first_position);
  const int32_t end = admission.first_position + admission.count;
  admission.num_drafts = std::max(0, end - known);
  const int32_t last = std::min(end + admission.draft_tokens, request.max_tokens);
  const int32_t pages_needed = (last + limits_.page_tokens - 1) / limits_.page_tokens;
  const auto pages_there = static_cast<int32_t>(request.pages.size()) + admission.match_count;
  admission.new_pages = std::max(0, pages_needed - pages_there);
  return admission;
}

int64_t Engine::plan_admissions(std::span<const glint_step_item> items) {
  admissions_.clear();
  matches_.clear();
  int64_t num_tokens = 0;
  int64_t num_rows = 0;
  int64_t new_pages = 0;
  for (size_t index = 0; index < items.size(); ++index) {
    Request& request = checked_item(items[index], index);
    const Admission& admission = admissions_.emplace_back(plan_admission(request, items[index]));
    num_tokens += admission.count;
    num_rows += 1 + admission.num_drafts;
    new_pages += admission.new_pages;
    request.last_step = next_step_;
  }
  require_argument(num_tokens <= limits_.max_step_tokens, "the step advances ", num_tokens, " tokens, at most ",
                   limits_.max_step_tokens, " fit (max_step_tokens)");
  require_argument(num_rows <= limits_.max_step_items, "the step has ", num_rows, " items and drafts, at most ",
                   limits_.max_step_items, " fit (max_step_items)");
  return new_pages;
}

int64_t Engine::cached_pages_to_hold() {
  int64_t count = 0;
  ++mark_;
  for (const PagePool::Match& match : matches_) {
    uint64_t& mark = page_marks_[static_cast<size_t>(match.page)];
    if (pool_.references(match.page) == 0 && mark != mark_) ++count;
    mark = mark_;
  }
  return count;
}

void Engine::hold_matches(const Admission& admission) {
  Request& request = *admission.request;
  for (int32_t index = 0; index < admission.match_count; ++index) {
    const PagePool::Match& match = matches_[static_cast<size_t>(admission.match_first + index)];
    pool_.hold(match.page);
    request.pages.push_back(match.page);
    request.chain = match.serial;
  }
  request.registered_pages += admission.match_count;
}

void Engine::admit(const Admission& admission) {
  Request& request = *admission.request;
  const std::span<int32_t> taken(taken_.data(), static_cast<size_t>(admission.new_pages));
  require(pool_.take(taken), GLINT_STATUS_INTERNAL, "the page pool refused ", admission.new_pages,
          " pages that were counted as available");
  request.pages.insert(request.pages.end(), taken.begin(), taken.end());
  request.computed_tokens = admission.first_position + admission.count;
  if (!request.was_admitted) request.cached_tokens = admission.match_count * limits_.page_tokens;
  request.was_admitted = true;
  ++request.steps_in_flight;
}

void Engine::add_item(Step& step, const Admission& admission) {
  Request& request = *admission.request;
  const bool samples = request.computed_tokens >= request.known_tokens();
  const auto num_given = step.given_drafts.size();
  const auto first_row = static_cast<int32_t>(step.items.size() + num_given);
  step.given_drafts.resize(num_given + static_cast<size_t>(admission.num_drafts));
  step.makes_drafts = step.makes_drafts || admission.draft_tokens > 0;
  step.verifies_drafts = step.verifies_drafts || admission.num_drafts > 0;
  step.items.push_back({.request = &request,
                        .first_position = admission.first_position,
                        .count = admission.count,
                        .max_drafts = admission.num_drafts,
                        .max_verified = admission.num_drafts,
                        .drafts = std::span(step.given_drafts).subspan(num_given),
                        .pages = request.pages,
                        .draft_tokens = admission.draft_tokens,
                        .first_row = first_row,
                        .resumes_mtp = admission.has_mtp,
                        .samples = samples,
                        .follows_drafts = admission.follows_drafts});
  step.results.push_back({.request_id = request.id,
                          .token_count = 0,
                          .finish_reason = GLINT_FINISH_NONE,
                          .failure = GLINT_FAILURE_NONE,
                          .cached_tokens = request.cached_tokens,
                          .computed_tokens = request.computed_tokens,
                          .draft_count = 0,
                          .first_position = admission.first_position,
                          .verified_count = 0,
                          .tokens = nullptr,
                          .drafts = nullptr});
  request.is_speculating = step.items.back().is_speculative();
  if (!samples) return;
  request.pending_tokens += 1 + admission.num_drafts;
  request.num_drafts = admission.draft_tokens;
}

Step& Engine::open_slot() {
  require(next_step_ - next_collect_ < GLINT_MAX_STEPS_IN_FLIGHT, GLINT_STATUS_BUSY, "already ",
          GLINT_MAX_STEPS_IN_FLIGHT, " steps are in flight: collect one first");
  return steps_[next_step_ % kStepSlots];
}

void Engine::submit_step(std::span<glint_step_item> items, glint_ticket& ticket) {
  ranks_.require_running();
  Step& step = open_slot();
  require_argument(!items.empty() && items.size() <= static_cast<size_t>(limits_.max_step_items), "a step has ",
                   items.size(), " items, expected 1 to ", limits_.max_step_items, " (max_step_items)");
  struct ForgetMarks {
    std::vector<Admission>& admissions;
    bool is_armed = true;
    ~ForgetMarks() {
      for (Admission& admission : admissions) {
        if (is_armed) admission.request->last_step = 0;
      }
    }
  } forget_marks{admissions_};
  const int64_t new_pages = plan_admissions(items);
  const int64_t missing = new_pages - (pool_.available() - cached_pages_to_hold());
  if (missing > 0) {
    ticket.missing_pages = static_cast<int32_t>(missing);
    throw Failure(GLINT_STATUS_OUT_OF_PAGES, text("the step needs ", missing, " more pages of ", limits_.page_tokens,
                                                  " tokens than are free or cached: release a request's pages"));
  }
  forget_marks.is_armed = false;
  step.clear();
  step.serial = next_step_;
  for (const Admission& admission : admissions_) hold_matches(admission);
  for (size_t index = 0; index < admissions_.size(); ++index) {
    const Admission& admission = admissions_[index];
    admit(admission);
    add_item(step, admission);
    items[index].first_position = admission.follows_drafts ? kDecidedByStepBefore : admission.first_position;
    items[index].cached_tokens = admission.match_count * limits_.page_tokens;
  }
  ticket.step = next_step_++;
  ticket.missing_pages = 0;
  runner_->submit(step);
  refresh_stats();
  const std::lock_guard lock(stats_mutex_);
  stats_.tokens_cached += matches_.size() * static_cast<uint64_t>(limits_.page_tokens);
}

Step& Engine::step_of(const glint_ticket& ticket) {
  require_argument(ticket.step >= next_collect_ && ticket.step < next_step_, "ticket.step ", ticket.step,
                   " is not in flight");
  return steps_[ticket.step % kStepSlots];
}

void Engine::sample_step(const glint_ticket& ticket, const glint_masks* masks) {
  Step& step = step_of(ticket);
  require_argument(!step.may_sample, "step ", ticket.step, " is being sampled already");
  const std::span<const glint_mask> given =
      masks == nullptr ? std::span<const glint_mask>{}
                       : std::span<const glint_mask>{masks->masks, static_cast<size_t>(masks->count)};
  const size_t num_rows = step.items.size() + step.given_drafts.size();
  require_argument(given.size() <= num_rows, "masks.count is ", given.size(), ", the step has ", num_rows,
                   " items and drafts");
  const int32_t words_needed = limits_.mask_words();
  for (const glint_mask& mask : given) {
    require_argument(mask.item >= 0 && static_cast<size_t>(mask.item) < step.items.size(), "a mask names item ",
                     mask.item, " of ", step.items.size());
    const PlannedItem& item = step.items[static_cast<size_t>(mask.item)];
    require_argument(mask.row >= 0 && mask.row <= item.max_drafts, "a mask names row ", mask.row, " of item ",
                     mask.item, ", which verifies ", item.max_drafts, " drafts");
    const bool ends_rows = mask.words == nullptr && mask.word_count == 0 && mask.row > 0;
    require_argument(ends_rows || (mask.words != nullptr && mask.word_count == words_needed), "the mask of item ",
                     mask.item, " has ", mask.word_count, " words, expected ", words_needed);
  }
  for (size_t index = 0; index < given.size(); ++index) {
    const auto is_same = [&](const glint_mask& other) {
      return other.item == given[index].item && other.row == given[index].row;
    };
    require_argument(std::ranges::none_of(given.first(index), is_same), "item ", given[index].item,
                     " has two masks of row ", given[index].row);
  }
  for (const glint_mask& mask : given) {
    PlannedItem& item = step.items[static_cast<size_t>(mask.item)];
    if (mask.words == nullptr) {
      item.max_verified = std::min(item.max_verified, mask.row - 1);
      continue;
    }
    const int32_t row = item.first_row + mask.row;
    std::copy_n(mask.words, words_needed, step.mask_words.begin() + int64_t{row} * words_needed);
    step.has_mask[static_cast<size_t>(row)] = true;
  }
  runner_->allow_sampling(step);
}

void Engine::register_pages(Request& request, int32_t computed, int32_t mtp_end) {
  const auto page_tokens = static_cast<size_t>(limits_.page_tokens);
  const int32_t full = std::min(computed, static_cast<int32_t>(request.tokens.size())) / limits_.page_tokens;
  for (; request.registered_pages < full; ++request.registered_pages) {
    const auto page = static_cast<size_t>(request.registered_pages);
    const std::span<const int32_t> tokens(request.tokens.data() + page * page_tokens, page_tokens);
    request.chain = pool_.add(request.chain, tokens, request.pages[page]);
    has_mtp_[static_cast<size_t>(request.pages[page])] = static_cast<size_t>(mtp_end) > (page + 1) * page_tokens;
  }
}

void Engine::end_speculation(Request& request, const glint_item_result& result) {
  const bool is_last = request.steps_in_flight == 0;
  if (is_last) {
    request.is_speculating = false;
    request.num_drafts = result.draft_count;
  }
  const int32_t known = request.known_tokens();
  request.computed_tokens = std::min(request.computed_tokens, known - 1);
  trim_pages(request, is_last ? known : std::min(known - 1 + request.num_drafts, request.max_tokens));
}

void Engine::collect_item(Step& step, size_t index) {
  const PlannedItem& item = step.items[index];
  Request& request = *item.request;
  glint_item_result& result = step.results[index];
  const bool was_finished = request.is_finished;
  --request.steps_in_flight;
  if (item.samples) request.pending_tokens -= 1 + item.max_drafts;
  if (step.failure.is_set()) {
    result.finish_reason = GLINT_FINISH_FAILED;
  }
  request.tokens.insert(request.tokens.end(), result.tokens, result.tokens + result.token_count);
  const auto last_known = static_cast<int32_t>(request.tokens.size()) - 1;
  result.first_position = item.is_skipped && item.follows_drafts ? last_known : item.first_position;
  result.computed_tokens = result.first_position + (item.is_skipped ? 0 : item.count);
  if (item.is_speculative()) {
    result.verified_count = item.is_skipped ? 0 : item.num_drafts();
    result.computed_tokens = std::min(result.computed_tokens, last_known);
    end_speculation(request, result);
  }
  request.is_finished = request.is_finished || result.finish_reason != GLINT_FINISH_NONE;
  if (!step.failure.is_set() && !request.is_freed && !was_finished && !item.is_skipped) {
    register_pages(request, result.computed_tokens, item.mtp_end);
  }
  if (request.is_freed && request.steps_in_flight == 0) {
    drop_pages(request);
    requests_.erase(request.id);
  }
}

void Engine::collect_step(const glint_ticket& ticket, glint_step_results& results) {
  Step& step = step_of(ticket);
  require_argument(ticket.step == next_collect_, "steps are collected in order: the next is ", next_collect_, ", not ",
                   ticket.step);
  require_argument(step.may_sample, "step ", ticket.step, " was not sampled: call glint_sample_step first");
  runner_->wait(step);
  uint64_t num_tokens = 0;
  uint64_t num_sampled = 0;
  for (size_t index = 0; index < step.items.size(); ++index) {
    const PlannedItem& item = step.items[index];
    const int32_t sampled = step.results[index].token_count;
    const int32_t num_rejected = std::max(0, item.num_drafts() + 1 - std::max(sampled, 1));
    if (!item.is_skipped) num_tokens += static_cast<uint64_t>(item.count - num_rejected);
    num_sampled += static_cast<uint64_t>(sampled);
    collect_item(step, index);
  }
  ++next_collect_;
  refresh_stats();
  {
    const std::lock_guard lock(stats_mutex_);
    ++stats_.steps_done;
    stats_.tokens_computed += num_tokens;
    stats_.tokens_sampled += num_sampled;
  }
  require(!step.failure.is_set(), step.failure.status(), "step ", step.serial, " failed: ", step.failure.words());
  results = {.struct_bytes = sizeof(glint_step_results),
             .item_count = static_cast<int32_t>(step.results.size()),
             .items = step.results.data(),
             .logprobs = step.logprobs.data(),
             .logprob_count = static_cast<int32_t>(step.logprobs.size()),
             .pages_free = static_cast<int32_t>(pool_.num_free()),
             .pages_held = static_cast<int32_t>(pool_.num_held()),
             .pages_cached = static_cast<int32_t>(pool_.num_cached())};
}

}
