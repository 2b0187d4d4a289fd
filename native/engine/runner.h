#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/ranks.h"
#include "engine/step.h"

namespace glint {

class StepRunner {
 public:
  StepRunner(Ranks& ranks, const EngineLimits& limits);
  ~StepRunner();
  StepRunner(const StepRunner&) = delete;
  StepRunner& operator=(const StepRunner&) = delete;

  void submit(Step& step);
  void allow_sampling(Step& step);
  void wait(Step& step);

 private:
  void loop();
  void run_part(std::unique_lock<std::mutex>& lock, Step& step, void (StepRunner::*part)(Step&));
  bool launch(std::unique_lock<std::mutex>& lock);
  void finish(std::unique_lock<std::mutex>& lock);
  void run_forward(Step& step);
  void run_sampling(Step& step);
  void compute_logits(std::span<const int32_t> rows);
  void sample_rows(int32_t slot);
  void collect_rows(int32_t slot, std::span<SampledRow> out);
  void take_rows(Step& step);
  void make_drafts(Step& step);
  void add_mtp_rows(Step& step, int32_t item_index);
  void run_mtp(bool is_first_draft);
  void sample_drafts(Step& step);
  void continue_drafts(Step& step);
  const uint32_t* mask_of(const Step& step, int32_t row) const;
  void clear_batch();
  void begin_item(PlannedItem& item);
  void keep_drafts(PlannedItem& item, int32_t count);
  void add_to_batch(const PlannedItem& item);
  void report_prompt_logprobs(Step& step);
  void report_prompt_rows(Step& step, int32_t item_index, int32_t row_first);
  void fail_row(Step& step, int32_t item_index, int32_t failure);
  void finish_row(Step& step, int32_t item_index, int32_t sampled_row, const SampledRow& row);

  Ranks& ranks_;
  EngineLimits limits_;
  bool overlaps_steps_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Step*> queue_;
  Step* sampled_ = nullptr;
  bool is_stopping_ = false;

  std::vector<int32_t> tokens_;
  std::vector<int32_t> token_rows_;
  std::vector<int32_t> positions_;
  std::vector<BatchRequest> requests_;
  std::vector<int32_t> row_firsts_;
  std::vector<int32_t> logit_rows_;
  std::vector<int32_t> prompt_rows_;
  std::vector<int32_t> hidden_rows_;
  std::vector<PageState> page_states_;
  std::vector<int32_t> drafting_items_;
  std::vector<SamplingRow> sampling_rows_;
  std::vector<SampledRow> sampled_rows_;
  std::thread thread_;
};

}
