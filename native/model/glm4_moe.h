#pragma once

#include <functional>
#include <span>

#include "model/ops.h"

namespace glint {

using HiddenTap = std::function<void(StepState& step, int64_t layer, int64_t count)>;

class ForwardPass {
 public:
  ForwardPass(Backend& backend, const glint_model& model);

  void run(const StepBatch& batch, int32_t slot);
  void compute_logits(std::span<const int32_t> rows);
  void run_mtp(const StepBatch& batch, std::span<const int32_t> hidden_rows, std::span<const PageState> page_states,
               bool is_first_draft);
  void compute_draft_logits(std::span<const int32_t> rows);
  void capture();
  void set_tap(HiddenTap tap) { tap_ = std::move(tap); }
  StepState& step() { return *step_; }

 private:
  void run_layers();
  void run_mtp_layer();
  void tap(int64_t layer) const;
  void attention(int64_t layer);
  void feed_forward(int64_t layer);

  Backend& backend_;
  StepOwner step_;
  int64_t num_layers_;
  int64_t num_dense_layers_;
  int64_t count_ = 0;
  HiddenTap tap_;
};

}
