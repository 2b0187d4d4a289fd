#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/pages.h"
#include "engine/ranks.h"
#include "engine/request.h"
#include "engine/runner.h"
#include "engine/step.h"
#include "model/weights.h"

namespace glint {

class Engine {
 public:
  Engine(const glint_engine_options& options, std::span<const glint_tensor> tensors);
  ~Engine();

  uint64_t add_request(const glint_request& source);
  void free_request(uint64_t id);
  void release_pages(uint64_t id);
  void limit_reuse(uint64_t id, int32_t reusable_tokens);
  void submit_step(std::span<glint_step_item> items, glint_ticket& ticket);
  void sample_step(const glint_ticket& ticket, const glint_masks* masks);
  void collect_step(const glint_ticket& ticket, glint_step_results& results);
  void run_alone(uint64_t id, bool is_prefill, glint_step_results& results);
  glint_engine_stats stats() const;
  void check() const;
  double measure_read(uint64_t byte_count);
  void measure_arithmetic(glint_arithmetic& arithmetic);

  Ranks& ranks() { return ranks_; }
  ForwardPass& forward() { return ranks_.first_forward(); }
  Backend& backend() { return ranks_.first_backend(); }
  const glint_model& model() const { return model_; }

 private:
  struct Admission {
    Request* request = nullptr;
    int32_t first_position = 0;
    int32_t count = 0;
    int32_t match_first = 0;
    int32_t match_count = 0;
    int32_t new_pages = 0;
    int32_t num_drafts = 0;
    int32_t draft_tokens = 0;
    bool has_mtp = false;
    bool follows_drafts = false;
  };

  static constexpr size_t kStepSlots = GLINT_MAX_STEPS_IN_FLIGHT + 1;

  Request& checked_item(const glint_step_item& item, size_t index);
  Admission plan_admission(Request& request, const glint_step_item& item);
  void match_prefix(Request& request, Admission& admission);
  int64_t plan_admissions(std::span<const glint_step_item> items);
  int64_t cached_pages_to_hold();
  void require_pages_for(Request& request);
  void hold_matches(const Admission& admission);
  void admit(const Admission& admission);
  void add_item(Step& step, const Admission& admission);
  Step& open_slot();
  Step& step_of(const glint_ticket& ticket);
  void collect_item(Step& step, size_t index);
  void end_speculation(Request& request, const glint_item_result& result);
  void register_pages(Request& request, int32_t computed, int32_t mtp_end);
  void trim_pages(Request& request, int32_t num_tokens);
  void drop_pages(Request& request);
  void refresh_stats();

  glint_model model_;
  EngineLimits limits_;
  WeightStore store_;
  Ranks ranks_;
  PagePool pool_;
  RequestTable requests_;
  std::vector<Step> steps_;
  uint64_t next_step_ = 1;
  uint64_t next_collect_ = 1;
  std::vector<Admission> admissions_;
  std::vector<PagePool::Match> matches_;
  std::vector<uint64_t> page_marks_;
  uint64_t mark_ = 0;
  std::vector<int32_t> taken_;
  std::vector<bool> has_mtp_;
  mutable std::mutex stats_mutex_;
  glint_engine_stats stats_{};
  std::unique_ptr<StepRunner> runner_;
};

glint_engine_plan plan_engine(const glint_engine_options& options);
std::shared_ptr<Engine> engine_of(glint_engine* handle);

}

struct glint_engine {
  std::shared_ptr<glint::Engine> engine;
};
