#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "include/glint.h"
#include "model/weights.h"

namespace glint {

inline constexpr int64_t kSplitPositions = 1024;
inline constexpr size_t kMaxFailureBytes = 2048;
inline std::atomic<bool> rounds_new_pages = false;

class Backend;
class World;
struct StepState;

struct BackendDeleter {
  void operator()(Backend* backend) const;
};

struct WorldDeleter {
  void operator()(World* world) const;
};

struct StepDeleter {
  void operator()(StepState* step) const;
};

using BackendOwner = std::unique_ptr<Backend, BackendDeleter>;
using WorldOwner = std::unique_ptr<World, WorldDeleter>;
using StepOwner = std::unique_ptr<StepState, StepDeleter>;

WorldOwner make_world(const glint_engine_options& options);
void stop_world(World& world, const std::string& why) noexcept;

BackendOwner make_backend(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights,
                          World& world, int32_t rank);
void join_world(Backend& backend);
StepOwner make_step();
glint_engine_plan plan_backend(const glint_model& model, const glint_engine_options& options);
glint_device describe_backend_device(int32_t index, int32_t kernels);
const char* backend_name();
bool backend_checks_fp8_values();
void fill_backend_stats(const Backend& backend, glint_engine_stats& stats);

}
