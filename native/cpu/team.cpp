#include "cpu/team.h"

#include <cfenv>
#include <chrono>

namespace glint {

namespace {

constexpr int kSpinsBeforeClock = 64;
constexpr int64_t kStretchesPerThread = 2;
constexpr std::chrono::microseconds kSpinForWork{100};
constexpr std::chrono::microseconds kSpinForWorkers{20};

void pause_briefly() {
#if defined(GLINT_X86)
  __builtin_ia32_pause();
#elif defined(GLINT_ARM64)
  asm volatile("isb" ::: "memory");
#else
  std::this_thread::yield();
#endif
}

template <typename Condition>
bool spin_until(const Condition& condition, std::chrono::microseconds time) {
  if (condition()) return true;
  const auto deadline = std::chrono::steady_clock::now() + time;
  do {
    for (int spin = 0; spin < kSpinsBeforeClock; ++spin) {
      if (condition()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return condition();
}

}

ThreadTeam::ThreadTeam(int num_threads) {
  workers_.reserve(static_cast<size_t>(num_threads > 1 ? num_threads - 1 : 0));
  try {
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadTeam::~ThreadTeam() { stop(); }

void ThreadTeam::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_.store(true);
    round_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::run_together(int64_t num_tasks, const TaskReference& reference) {
  reference_ = &reference;
  num_tasks_ = num_tasks;
  failure_ = nullptr;
  next_task_.store(0, std::memory_order_relaxed);
  busy_workers_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    const std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  take_tasks(0);
  const auto is_done = [this] { return busy_workers_.load(std::memory_order_acquire) == 0; };
  while (!spin_until(is_done, kSpinForWorkers)) {
    std::this_thread::yield();
  }
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

ThreadTeam::Stretch ThreadTeam::take_stretch() {
  const int64_t shares = kStretchesPerThread * num_threads();
  int64_t first = next_task_.load(std::memory_order_relaxed);
  int64_t last = 0;
  do {
    last = first + (num_tasks_ - first + shares - 1) / shares;
  } while (!next_task_.compare_exchange_weak(first, last, std::memory_order_relaxed));
  return {first, last};
}

void ThreadTeam::take_tasks(int thread) {
  for (;;) {
    const auto [first, last] = take_stretch();
    if (first == last) return;
    try {
      for (int64_t task = first; task < last; ++task) (*reference_)(task, thread);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
    }
  }
}

uint32_t ThreadTeam::wait_for_round(uint32_t last_round) {
  const auto has_new_round = [&] { return round_.load(std::memory_order_seq_cst) != last_round; };
  if (!spin_until(has_new_round, kSpinForWork)) {
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, has_new_round);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
  return round_.load(std::memory_order_seq_cst);
}

void ThreadTeam::work(int thread) {
  std::fesetenv(FE_DFL_ENV);
  for (uint32_t round = 0;;) {
    round = wait_for_round(round);
    if (is_stopping_.load()) return;
    take_tasks(thread);
    busy_workers_.fetch_sub(1, std::memory_order_release);
  }
}

}
