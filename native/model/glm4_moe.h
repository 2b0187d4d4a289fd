#pragma once

#include <functional>
#include <span>

#include "model/ops.h"

namespace glint {

using HiddenTap = std::function<void(int64_t layer, int64_t count)>;

class ForwardPass {
 public:
  ForwardPass(Backend& backend, const glint_model& model);

  void run(const StepBatch& batch, int32_t slot);
  void capture();
  void set_tap(HiddenTap tap) { tap_ = std::move(tap); }

 private:
  void run_layers();
  void tap(int64_t layer) const;
  void attention(int64_t layer);
  void feed_forward(int64_t layer);

  Backend& backend_;
  int64_t num_layers_;
  int64_t num_dense_layers_;
  int64_t count_ = 0;
  HiddenTap tap_;
};

}
