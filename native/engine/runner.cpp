#include "engine/runner.h"

#include <algorithm>
#include <cfenv>
#include <new>
#include <numeric>

#include "base/contract.h"
#include "base/faults.h"

namespace glint {

namespace {

bool ends_with_sequence(const Request& request) {
  const std::vector<int32_t>& history = request.progress.history;
  const size_t generated = history.size() - static_cast<size_t>(request.prompt_count);
  return std::any_of(request.stop_sequences.begin(), request.stop_sequences.end(), [&](const auto& sequence) {
    return sequence.size() <= generated && std::equal(sequence.rbegin(), sequence.rend(), history.rbegin());
  });
}

int32_t finish_reason(const Request& request, int32_t token) {
  const bool is_stop =
      std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) != request.stop_tokens.end();
  if (is_stop || ends_with_sequence(request)) return GLINT_FINISH_STOP;
  const bool is_full = request.progress.history.size() >= static_cast<size_t>(request.max_tokens);
  return is_full ? GLINT_FINISH_LENGTH : GLINT_FINISH_NONE;
}

void add_logprobs(std::vector<glint_logprob>& out, int32_t item, int32_t position, const SampledRow& row) {
  out.push_back({item, position, row.token, row.logprob});
  for (int32_t rank = 0; rank < row.top_count; ++rank) {
    out.push_back(
        {item, position, row.top_tokens[static_cast<size_t>(rank)], row.top_logprobs[static_cast<size_t>(rank)]});
  }
}

}

StepRunner::StepRunner(Ranks& ranks, const EngineLimits& limits)
    : ranks_(ranks), limits_(limits), overlaps_steps_(ops::keeps_sampled_tokens(ranks.first_backend())) {
  const auto max_items = static_cast<size_t>(limits.max_step_items);
  const auto max_tokens = static_cast<size_t>(limits.max_step_tokens) + max_items;
  queue_.reserve(GLINT_MAX_STEPS_IN_FLIGHT);
  tokens_.reserve(max_tokens);
  token_rows_.reserve(max_tokens);
  positions_.reserve(max_tokens);
  requests_.reserve(max_items);
  row_firsts_.reserve(max_items);
  logit_rows_.reserve(max_items);
  prompt_rows_.reserve(max_items);
  hidden_rows_.reserve(max_tokens);
  page_states_.reserve(max_tokens);
  drafting_items_.reserve(max_items);
  sampling_rows_.reserve(max_items);
  sampled_rows_.resize(max_items);
  thread_ = std::thread([this] { loop(); });
}

StepRunner::~StepRunner() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StepRunner::submit(Step& step) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(&step);
  }
  changed_.notify_all();
}

void StepRunner::allow_sampling(Step& step) {
  {
    const std::lock_guard lock(mutex_);
    step.may_sample = true;
  }
  changed_.notify_all();
}

void StepRunner::wait(Step& step) {
  std::unique_lock lock(mutex_);
  step.is_awaited = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return step.is_done; });
}

void StepRunner::loop() {
  std::fesetenv(FE_DFL_ENV);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock,
                  [&] { return is_stopping_ || !queue_.empty() || (sampled_ != nullptr && sampled_->is_awaited); });
    if (is_stopping_) return;
    if (queue_.empty()) {
      finish(lock);
    } else if (!launch(lock)) {
      return;
    }
  }
}

bool StepRunner::launch(std::unique_lock<std::mutex>& lock) {
  Step& step = *queue_.front();
  run_part(lock, step, &StepRunner::run_forward);
  finish(lock);
  changed_.wait(lock, [&] { return is_stopping_ || step.may_sample; });
  if (is_stopping_) return false;
  run_part(lock, step, &StepRunner::run_sampling);
  queue_.erase(queue_.begin());
  sampled_ = &step;
  const bool decides_the_next = step.makes_drafts || step.verifies_drafts;
  if (!overlaps_steps_ || decides_the_next || step.failure.is_set()) finish(lock);
  return true;
}

void StepRunner::finish(std::unique_lock<std::mutex>& lock) {
  if (sampled_ == nullptr) return;
  Step& step = *sampled_;
  run_part(lock, step, &StepRunner::take_rows);
  if (step.failure.is_set()) {
    for (const PlannedItem& item : step.items) item.request->progress.finish_reason = GLINT_FINISH_FAILED;
  }
  sampled_ = nullptr;
  step.is_done = true;
  changed_.notify_all();
}

void StepRunner::run_part(std::unique_lock<std::mutex>& lock, Step& step, void (StepRunner::*part)(Step&)) {
  if (step.failure.is_set()) return;
  lock.unlock();
  try {
    (this->*part)(step);
  } catch (const Failure& failure) {
    step.failure.set(failure.status(), failure.what());
  } catch (const std::bad_alloc&) {
    step.failure.set(GLINT_STATUS_OUT_OF_MEMORY, "the machine is out of memory");
  } catch (const std::exception& failure) {
    step.failure.set(GLINT_STATUS_INTERNAL, failure.what());
  } catch (...) {
    step.failure.set(GLINT_STATUS_INTERNAL, "an unknown failure");
  }
  lock.lock();
}

void StepRunner::begin_item(PlannedItem& item) {
  RankProgress& progress = item.request->progress;
  if (item.follows_drafts) item.first_position = static_cast<int32_t>(progress.history.size()) - 1;
  if (!item.samples) return;
  keep_drafts(item, static_cast<int32_t>(progress.drafts.size()));
  std::copy_n(progress.drafts.begin(), item.drafts.size(), item.drafts.begin());
  progress.drafts.clear();
}

void StepRunner::keep_drafts(PlannedItem& item, int32_t count) {
  const int32_t kept = std::min(item.num_drafts(), count);
  item.count -= item.num_drafts() - kept;
  item.drafts = item.drafts.first(static_cast<size_t>(kept));
}

void StepRunner::add_to_batch(const PlannedItem& item) {
  const RankProgress& progress = item.request->progress;
  requests_.push_back({.row_first = static_cast<int32_t>(tokens_.size()),
                       .row_count = item.count,
                       .first_position = item.first_position,
                       .pages = item.pages.data()});
  for (int32_t position = item.first_position; position < item.first_position + item.count; ++position) {
    const auto index = static_cast<size_t>(position);
    const int32_t draft = position - (item.first_position + item.count - item.num_drafts());
    const bool is_known = draft >= 0 || index < progress.history.size();
    const int32_t known = draft >= 0 ? item.drafts[static_cast<size_t>(draft)] : is_known ? progress.history[index] : 0;
    tokens_.push_back(known);
    token_rows_.push_back(is_known ? kNoSampledRow : progress.sampled_row);
    positions_.push_back(position);
  }
}

void StepRunner::clear_batch() {
  tokens_.clear();
  token_rows_.clear();
  positions_.clear();
  requests_.clear();
  hidden_rows_.clear();
  page_states_.clear();
}

void StepRunner::run_forward(Step& step) {
  clear_batch();
  row_firsts_.clear();
  logit_rows_.clear();
  for (size_t index = 0; index < step.items.size(); ++index) {
    PlannedItem& item = step.items[index];
    row_firsts_.push_back(static_cast<int32_t>(tokens_.size()));
    item.is_skipped = item.request->progress.finish_reason != GLINT_FINISH_NONE;
    if (item.is_skipped) continue;
    begin_item(item);
    add_to_batch(item);
    if (!item.samples) continue;
    for (int32_t draft = 0; draft <= item.num_drafts(); ++draft) {
      logit_rows_.push_back(static_cast<int32_t>(tokens_.size()) - 1 - item.num_drafts() + draft);
      step.logit_items.push_back(static_cast<int32_t>(index));
    }
  }
  if (tokens_.empty()) return;
  const StepBatch batch{.tokens = tokens_,
                        .sampled_rows = token_rows_,
                        .positions = positions_,
                        .requests = requests_,
                        .logit_rows = logit_rows_};
  ranks_.run([&](Rank& rank) {
    pass_fault_point(FaultPoint::kStep, rank.index);
    rank.forward->run(batch, step.slot());
  });
  report_prompt_logprobs(step);
  if (!logit_rows_.empty()) compute_logits(logit_rows_);
}

void StepRunner::compute_logits(std::span<const int32_t> rows) {
  ranks_.run([&](Rank& rank) { rank.forward->compute_logits(rows); });
}

void StepRunner::sample_rows(int32_t slot) {
  ranks_.run([&](Rank& rank) { ops::sample_rows(*rank.backend, slot, sampling_rows_); });
}

void StepRunner::collect_rows(int32_t slot, std::span<SampledRow> out) {
  ranks_.run(
      [&](Rank& rank) { ops::collect_rows(*rank.backend, slot, rank.index == 0 ? out : std::span<SampledRow>{}); });
}

void StepRunner::report_prompt_logprobs(Step& step) {
  for (size_t index = 0; index < step.items.size(); ++index) {
    const PlannedItem& item = step.items[index];
    if (!item.is_skipped && item.request->settings.has_prompt_logprobs) {
      report_prompt_rows(step, static_cast<int32_t>(index), row_firsts_[index]);
    }
  }
}

void StepRunner::report_prompt_rows(Step& step, int32_t item_index, int32_t row_first) {
  const PlannedItem& item = step.items[static_cast<size_t>(item_index)];
  RankProgress& progress = item.request->progress;
  const int32_t last = std::min(item.first_position + item.count, item.request->prompt_count - 1);
  int32_t position = std::max(item.first_position, progress.prompt_logprobs_end - 1);
  while (position < last) {
    const int32_t count = std::min(last - position, limits_.max_step_items);
    prompt_rows_.clear();
    sampling_rows_.clear();
    for (int32_t offset = 0; offset < count; ++offset) {
      const int32_t predicted = position + offset + 1;
      prompt_rows_.push_back(row_first + position - item.first_position + offset);
      sampling_rows_.push_back({.logit_row = offset,
                                .settings = &item.request->settings,
                                .position = predicted,
                                .has_given_token = true,
                                .given_token = progress.history[static_cast<size_t>(predicted)]});
    }
    compute_logits(prompt_rows_);
    sample_rows(kPromptSlot);
    collect_rows(kPromptSlot, {sampled_rows_.data(), static_cast<size_t>(count)});
    for (int32_t offset = 0; offset < count; ++offset) {
      const SampledRow& row = sampled_rows_[static_cast<size_t>(offset)];
      if (row.failure != GLINT_FAILURE_NONE) {
        fail_row(step, item_index, row.failure);
        return;
      }
      add_logprobs(step.logprobs, item_index, position + offset + 1, row);
    }
    position += count;
  }
  progress.prompt_logprobs_end = std::max(progress.prompt_logprobs_end, last + 1);
}

const uint32_t* StepRunner::mask_of(const Step& step, int32_t row) const {
  if (!step.has_mask[static_cast<size_t>(row)]) return nullptr;
  return step.mask_words.data() + int64_t{row} * limits_.mask_words();
}

void StepRunner::run_sampling(Step& step) {
  sampling_rows_.clear();
  for (size_t row = 0; row < step.logit_items.size(); ++row) {
    const int32_t item_index = step.logit_items[row];
    PlannedItem& item = step.items[static_cast<size_t>(item_index)];
    Request& request = *item.request;
    if (request.progress.finish_reason != GLINT_FINISH_NONE) {
      item.is_skipped = step.results[static_cast<size_t>(item_index)].finish_reason == GLINT_FINISH_NONE;
      continue;
    }
    std::vector<int32_t>& history = request.progress.history;
    const auto sampled_row = static_cast<int32_t>(sampling_rows_.size());
    const bool is_first = step.sampled_items.empty() || step.sampled_items.back() != item_index;
    if (is_first) {
      item.sampled_row = request.progress.sampled_row = sampled_row;
      keep_drafts(item, item.max_verified);
    }
    const int32_t place = sampled_row - item.sampled_row;
    if (place > item.num_drafts()) continue;
    if (place > 0) history.push_back(item.drafts[static_cast<size_t>(place) - 1]);
    step.sampled_items.push_back(item_index);
    sampling_rows_.push_back({.logit_row = static_cast<int32_t>(row),
                              .settings = &request.settings,
                              .history = history,
                              .prompt_count = request.prompt_count,
                              .allowed_words = mask_of(step, item.first_row + place),
                              .position = static_cast<int32_t>(history.size())});
  }
  sample_rows(step.slot());
}

void StepRunner::take_rows(Step& step) {
  const std::span<SampledRow> rows(sampled_rows_.data(), step.sampled_items.size());
  collect_rows(step.slot(), rows);
  for (size_t row = 0; row < rows.size(); ++row) {
    finish_row(step, step.sampled_items[row], static_cast<int32_t>(row), rows[row]);
  }
  if (step.makes_drafts) make_drafts(step);
}

void StepRunner::add_mtp_rows(Step& step, int32_t item_index) {
  PlannedItem& item = step.items[static_cast<size_t>(item_index)];
  Request& request = *item.request;
  RankProgress& progress = request.progress;
  const auto known = static_cast<int32_t>(progress.history.size());
  const int32_t first = item.first_position + (item.resumes_mtp ? 0 : 1);
  const int32_t end = item.samples ? known : item.first_position + item.count + 1;
  if (item.resumes_mtp) {
    progress.mtp_first = 1;
  } else if (progress.mtp_end != first) {
    progress.mtp_first = first;
  }
  progress.mtp_end = end;
  item.mtp_end = progress.mtp_first == 1 ? end : 0;
  requests_.push_back({.row_first = static_cast<int32_t>(tokens_.size()),
                       .row_count = end - first,
                       .first_position = first,
                       .context_first = progress.mtp_first,
                       .pages = item.pages.data()});
  for (int32_t position = first; position < end; ++position) {
    const int32_t row = std::max(position - item.first_position - 1, 0);
    if (position % limits_.page_tokens == 0) {
      const int32_t page = item.pages[static_cast<size_t>(position / limits_.page_tokens) - 1];
      page_states_.push_back({static_cast<int32_t>(tokens_.size()), page, position > item.first_position});
    }
    tokens_.push_back(progress.history[static_cast<size_t>(position)]);
    positions_.push_back(position);
    hidden_rows_.push_back(row_firsts_[static_cast<size_t>(item_index)] + row);
  }
  if (item.samples && known + 1 < request.max_tokens) {
    drafting_items_.push_back(item_index);
    logit_rows_.push_back(static_cast<int32_t>(tokens_.size()) - 1);
  }
}

void StepRunner::run_mtp(bool is_first_draft) {
  token_rows_.assign(tokens_.size(), kNoSampledRow);
  const StepBatch batch{.tokens = tokens_,
                        .sampled_rows = token_rows_,
                        .positions = positions_,
                        .requests = requests_,
                        .logit_rows = logit_rows_};
  const auto run = [&](Rank& rank) { rank.forward->run_mtp(batch, hidden_rows_, page_states_, is_first_draft); };
  ranks_.run(std::cref(run));
}

void StepRunner::sample_drafts(Step& step) {
  sampling_rows_.clear();
  for (const int32_t item_index : drafting_items_) {
    const Request& request = *step.items[static_cast<size_t>(item_index)].request;
    sampling_rows_.push_back({.logit_row = static_cast<int32_t>(sampling_rows_.size()),
                              .settings = &request.settings,
                              .history = request.progress.history,
                              .prompt_count = request.prompt_count,
                              .position = static_cast<int32_t>(request.progress.history.size()),
                              .is_draft = true});
  }
  ranks_.run([&](Rank& rank) { rank.forward->compute_draft_logits(logit_rows_); });
  sample_rows(kPromptSlot);
  collect_rows(kPromptSlot, {sampled_rows_.data(), sampling_rows_.size()});
}

void StepRunner::make_drafts(Step& step) {
  clear_batch();
  logit_rows_.clear();
  drafting_items_.clear();
  for (size_t index = 0; index < step.items.size(); ++index) {
    const PlannedItem& item = step.items[index];
    const bool goes_on = !item.is_skipped && item.request->progress.finish_reason == GLINT_FINISH_NONE;
    if (item.draft_tokens > 0 && goes_on) add_mtp_rows(step, static_cast<int32_t>(index));
  }
  if (!tokens_.empty()) run_mtp(true);
  while (!drafting_items_.empty()) {
    sample_drafts(step);
    continue_drafts(step);
    if (!drafting_items_.empty()) run_mtp(false);
  }
  for (size_t index = 0; index < step.items.size(); ++index) {
    const glint_item_result& result = step.results[index];
    if (result.draft_count == 0) continue;
    RankProgress& progress = step.items[index].request->progress;
    progress.history.resize(progress.history.size() - static_cast<size_t>(result.draft_count));
    progress.drafts.assign(result.drafts, result.drafts + result.draft_count);
  }
}

void StepRunner::continue_drafts(Step& step) {
  clear_batch();
  size_t kept = 0;
  for (size_t row = 0; row < drafting_items_.size(); ++row) {
    const int32_t item_index = drafting_items_[row];
    const PlannedItem& item = step.items[static_cast<size_t>(item_index)];
    Request& request = *item.request;
    glint_item_result& result = step.results[static_cast<size_t>(item_index)];
    const SampledRow& drafted = sampled_rows_[row];
    if (drafted.failure != GLINT_FAILURE_NONE) continue;
    int32_t* drafts = step.new_drafts.data() + int64_t{item_index} * limits_.max_draft_tokens;
    drafts[result.draft_count++] = drafted.token;
    result.drafts = drafts;
    const auto position = static_cast<int32_t>(request.progress.history.size());
    request.progress.history.push_back(drafted.token);
    if (result.draft_count == item.draft_tokens || position + 2 >= request.max_tokens) continue;
    requests_.push_back({.row_first = static_cast<int32_t>(tokens_.size()),
                         .row_count = 1,
                         .first_position = position,
                         .context_first = request.progress.mtp_first,
                         .pages = item.pages.data()});
    tokens_.push_back(drafted.token);
    positions_.push_back(position);
    hidden_rows_.push_back(logit_rows_[row]);
    drafting_items_[kept++] = item_index;
  }
  drafting_items_.resize(kept);
  logit_rows_.resize(kept);
  std::iota(logit_rows_.begin(), logit_rows_.end(), 0);
}

void StepRunner::fail_row(Step& step, int32_t item_index, int32_t failure) {
  step.items[static_cast<size_t>(item_index)].request->progress.finish_reason = GLINT_FINISH_FAILED;
  glint_item_result& result = step.results[static_cast<size_t>(item_index)];
  result.finish_reason = GLINT_FINISH_FAILED;
  result.failure = failure;
}

void StepRunner::finish_row(Step& step, int32_t item_index, int32_t sampled_row, const SampledRow& row) {
  const PlannedItem& item = step.items[static_cast<size_t>(item_index)];
  Request& request = *item.request;
  glint_item_result& result = step.results[static_cast<size_t>(item_index)];
  const int32_t place = sampled_row - item.sampled_row;
  if (place == 0) request.progress.history.resize(request.progress.history.size() - item.drafts.size());
  if (result.finish_reason != GLINT_FINISH_NONE || result.token_count < place) return;
  if (place > 0 && result.tokens[place - 1] != item.drafts[static_cast<size_t>(place) - 1]) return;
  if (row.failure != GLINT_FAILURE_NONE) {
    fail_row(step, item_index, row.failure);
    return;
  }
  const auto position = static_cast<int32_t>(request.progress.history.size());
  request.progress.history.push_back(row.token);
  request.progress.finish_reason = finish_reason(request, row.token);
  step.sampled_tokens[static_cast<size_t>(sampled_row)] = row.token;
  ++result.token_count;
  result.tokens = &step.sampled_tokens[static_cast<size_t>(item.sampled_row)];
  result.finish_reason = request.progress.finish_reason;
  if (request.settings.has_logprobs) add_logprobs(step.logprobs, item_index, position, row);
}

}
