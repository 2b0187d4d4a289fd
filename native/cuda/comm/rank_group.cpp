#include "cuda/comm/rank_group.h"

#include <thread>

#include "base/contract.h"
#include "cuda/check.h"
#include "model/backend.h"

namespace glint::cuda {

namespace {

constexpr double kEndSeconds = 10.0;

}

Deadline deadline_after(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

RankGroup::RankGroup(int32_t num_ranks, bool shares_devices, std::shared_ptr<const Nccl> nccl)
    : peers(static_cast<size_t>(num_ranks)),
      num_ranks_(num_ranks),
      shares_devices_(shares_devices),
      nccl_(std::move(nccl)),
      has_arrived_(static_cast<size_t>(num_ranks), false) {
  require_argument(num_ranks >= 1, "a group has ", num_ranks, " ranks; it needs at least 1");
  why_.reserve(kMaxFailureBytes);
  ends_.reserve(static_cast<size_t>(num_ranks));
  if (shares_devices && nccl_ != nullptr) nccl_->require_shared_devices();
}

RankGroup::~RankGroup() {
  const Deadline deadline = deadline_after(kEndSeconds);
  for (const std::future<void>& end : ends_) end.wait_until(deadline);
}

void RankGroup::end_aside(std::function<void()> end) noexcept {
  std::packaged_task<void()> task(std::move(end));
  const std::lock_guard lock(ends_mutex_);
  ends_.push_back(task.get_future());
  std::thread(std::move(task)).detach();
}

std::string RankGroup::missing_ranks() const {
  std::string names;
  for (size_t rank = 0; rank < has_arrived_.size(); ++rank) {
    if (!has_arrived_[rank]) names += text(names.empty() ? "" : ", ", rank);
  }
  return names;
}

void RankGroup::wait(int32_t rank, const char* purpose, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const uint64_t round = round_;
  has_arrived_[static_cast<size_t>(rank)] = true;
  if (!is_aborted() && ++num_arrived_ == num_ranks_) {
    has_arrived_.assign(has_arrived_.size(), false);
    num_arrived_ = 0;
    ++round_;
    changed_.notify_all();
    return;
  }
  const bool is_over = changed_.wait_until(lock, deadline, [&] { return round_ != round || is_aborted(); });
  if (round_ != round) return;
  const std::string missing = missing_ranks();
  lock.unlock();
  if (!is_over) {
    abort(text("rank ", missing, " of ", num_ranks_, " did not come to ", purpose, " before the deadline; rank ", rank,
               " waited for it"));
  }
  require_whole();
}

void RankGroup::abort(const std::string& why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!is_aborted()) why_ = why;
    is_aborted_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
  const std::lock_guard lock(parts_mutex_);
  for (Abortable* part : parts_) part->abort();
}

void RankGroup::require_whole() const {
  if (!is_aborted()) return;
  const std::lock_guard lock(mutex_);
  throw Failure(GLINT_STATUS_RANK_FAILED, why_);
}

void RankGroup::wait_for_stream(cudaStream_t stream) const {
  constexpr std::chrono::microseconds kPoll(50);
  for (cudaError_t state = cudaErrorNotReady; state != cudaSuccess; std::this_thread::sleep_for(kPoll)) {
    require_whole();
    state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) check(state, "cudaStreamQuery");
  }
  require_whole();
}

void RankGroup::add(Abortable& part) {
  const std::lock_guard lock(parts_mutex_);
  parts_.push_back(&part);
}

void RankGroup::remove(Abortable& part) noexcept {
  const std::lock_guard lock(parts_mutex_);
  std::erase(parts_, &part);
}

}
