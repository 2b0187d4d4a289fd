#include "engine/ranks.h"

#include <array>
#include <cfenv>
#include <cstdio>
#include <new>
#include <span>

#include "base/contract.h"
#include "base/faults.h"

namespace glint {

RankThreads::RankThreads(int32_t num_ranks) {
  threads_.reserve(static_cast<size_t>(num_ranks));
  try {
    for (int32_t rank = 1; rank < num_ranks; ++rank) threads_.emplace_back([this, rank] { loop(rank); });
  } catch (...) {
    stop();
    throw;
  }
}

RankThreads::~RankThreads() { stop(); }

void RankThreads::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  started_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RankThreads::run(const std::function<void(int32_t)>& action) {
  {
    const std::lock_guard lock(mutex_);
    action_ = &action;
    num_busy_ = threads_.size();
    ++round_;
  }
  started_.notify_all();
  action(0);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return num_busy_ == 0; });
}

void RankThreads::loop(int32_t rank) {
  std::fesetenv(FE_DFL_ENV);
  uint64_t round = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    started_.wait(lock, [&] { return is_stopping_ || round_ != round; });
    if (is_stopping_) return;
    round = round_;
    lock.unlock();
    (*action_)(rank);
    lock.lock();
    if (--num_busy_ == 0) finished_.notify_all();
  }
}

Ranks::Ranks(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights)
    : world_(make_world(options)),
      ranks_(static_cast<size_t>(options.num_ranks)),
      deals_experts_(options.expert_layout == GLINT_EXPERT_LAYOUT_EP),
      threads_(options.num_ranks) {
  for (int32_t index = 0; index < options.num_ranks; ++index) rank(index).index = index;
  try {
    load(model, options, weights);
  } catch (const Failure&) {
    if (!failure_.is_set()) throw;
    throw Failure(failure_.status(), failure_.words());
  }
}

void Ranks::load(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights) {
  run([&](Rank& rank) {
    pass_fault_point(FaultPoint::kLoad, rank.index);
    rank.backend = make_backend(model, options, weights, *world_, rank.index);
    rank.forward.emplace(*rank.backend, model);
  });
  run([](Rank& rank) { join_world(*rank.backend); });
  run([](Rank& rank) { rank.forward->capture(); });
}

void Ranks::run(const std::function<void(Rank&)>& action) {
  if (count() == 1) return action(ranks_.front());
  require_running();
  threads_.run([&](int32_t index) { run_guarded(rank(index), action); });
  require_running();
}

void Ranks::run_guarded(Rank& rank, const std::function<void(Rank&)>& action) noexcept {
  try {
    action(rank);
  } catch (const Failure& failure) {
    fail(rank, failure.status(), failure.what());
  } catch (const std::bad_alloc&) {
    fail(rank, GLINT_STATUS_OUT_OF_MEMORY, "the machine is out of memory");
  } catch (const std::exception& failure) {
    fail(rank, GLINT_STATUS_INTERNAL, failure.what());
  } catch (...) {
    fail(rank, GLINT_STATUS_INTERNAL, "an unknown failure");
  }
}

void Ranks::fail(const Rank& rank, glint_status status, const char* why) noexcept {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "rank %d of %d failed: ", rank.index, count());
  {
    const std::lock_guard lock(mutex_);
    if (failure_.is_set()) return;
    failure_.set(status, name.data(), why);
  }
  stop_world(*world_, failure_.words());
}

void Ranks::require_running() const {
  const std::lock_guard lock(mutex_);
  require(!failure_.is_set(), GLINT_STATUS_RANK_FAILED, failure_.words(),
          "; the ranks cannot go on without it, start the engine again");
}

void Ranks::fill_stats(glint_engine_stats& stats) const {
  fill_backend_stats(*ranks_.front().backend, stats);
  if (!deals_experts_) return;
  for (const Rank& rank : std::span(ranks_).subspan(1)) {
    glint_engine_stats of_rank{};
    fill_backend_stats(*rank.backend, of_rank);
    stats.experts_read += of_rank.experts_read;
  }
}

}
