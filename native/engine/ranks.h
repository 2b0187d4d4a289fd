#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/failure_record.h"
#include "model/backend.h"
#include "model/glm4_moe.h"

namespace glint {

struct Rank {
  int32_t index = 0;
  BackendOwner backend;
  std::optional<ForwardPass> forward;
};

class RankThreads {
 public:
  explicit RankThreads(int32_t num_ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  void run(const std::function<void(int32_t rank)>& action);

 private:
  void loop(int32_t rank);
  void stop();

  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  const std::function<void(int32_t)>* action_ = nullptr;
  uint64_t round_ = 0;
  size_t num_busy_ = 0;
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;
};

class Ranks {
 public:
  Ranks(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights);

  void run(const std::function<void(Rank&)>& action);
  Rank& rank(int32_t index) { return ranks_[static_cast<size_t>(index)]; }
  Backend& first_backend() { return *ranks_.front().backend; }
  ForwardPass& first_forward() { return *ranks_.front().forward; }
  int32_t count() const { return static_cast<int32_t>(ranks_.size()); }
  void require_running() const;
  void fill_stats(glint_engine_stats& stats) const;

 private:
  void load(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights);
  void run_guarded(Rank& rank, const std::function<void(Rank&)>& action) noexcept;
  void fail(const Rank& rank, glint_status status, const char* why) noexcept;

  WorldOwner world_;
  std::vector<Rank> ranks_;
  const bool deals_experts_;
  mutable std::mutex mutex_;
  FailureRecord failure_;
  RankThreads threads_;
};

}
