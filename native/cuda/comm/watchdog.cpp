#include "cuda/comm/watchdog.h"

#include <utility>

namespace glint::cuda {

Watchdog::Watchdog(RankGroup& group, Deadline deadline, std::string missing)
    : group_(group), missing_(std::move(missing)), thread_([this, deadline] { watch(deadline); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    is_ended_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

void Watchdog::expect(std::string missing) {
  const std::lock_guard lock(mutex_);
  missing_ = std::move(missing);
}

void Watchdog::watch(Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (ended_.wait_until(lock, deadline, [this] { return is_ended_; })) return;
  const std::string why = missing_ + " before the deadline";
  lock.unlock();
  group_.abort(why);
}

}
