#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "cuda/comm/rank_group.h"

namespace glint::cuda {

class Watchdog {
 public:
  Watchdog(RankGroup& group, Deadline deadline, std::string missing);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void expect(std::string missing);

 private:
  void watch(Deadline deadline);

  RankGroup& group_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_ended_ = false;
  std::string missing_;
  std::thread thread_;
};

}
