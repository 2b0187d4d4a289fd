#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace glint {

class TaskReference {
 public:
  template <typename Callable>
  explicit TaskReference(Callable& callable)
      : target_(&callable),
        call_([](void* target, int64_t task, int thread) { (*static_cast<Callable*>(target))(task, thread); }) {}
  void operator()(int64_t task, int thread) const { call_(target_, task, thread); }

 private:
  void* target_;
  void (*call_)(void*, int64_t, int);
};

class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  template <typename Callable>
  void run(int64_t num_tasks, Callable&& callable) {
    if (num_tasks <= 0) return;
    if (num_tasks == 1 || workers_.empty()) {
      for (int64_t task = 0; task < num_tasks; ++task) callable(task, 0);
      return;
    }
    const TaskReference reference(callable);
    run_together(num_tasks, reference);
  }

 private:
  struct Stretch {
    int64_t first;
    int64_t last;
  };

  void run_together(int64_t num_tasks, const TaskReference& reference);
  Stretch take_stretch();
  void take_tasks(int thread);
  void work(int thread);
  void stop();
  uint32_t wait_for_round(uint32_t last_round);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const TaskReference* reference_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> busy_workers_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> is_stopping_{false};
  std::exception_ptr failure_;
};

}
