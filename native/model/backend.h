#pragma once

#include <cstdint>
#include <memory>

#include "include/glint.h"
#include "model/weights.h"

namespace glint {

inline constexpr int64_t kSplitPositions = 1024;

class Backend;

struct BackendDeleter {
  void operator()(Backend* backend) const;
};

using BackendOwner = std::unique_ptr<Backend, BackendDeleter>;

BackendOwner make_backend(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights);
glint_engine_plan plan_backend(const glint_model& model, const glint_engine_options& options);
const char* backend_name();
bool backend_checks_codes();
void fill_backend_stats(const Backend& backend, glint_engine_stats& stats);

}
