#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/comm/nccl.h"

namespace glint::cuda {

using Deadline = std::chrono::steady_clock::time_point;

Deadline deadline_after(double seconds);

class Abortable {
 public:
  virtual void abort() noexcept = 0;

 protected:
  ~Abortable() = default;
};

struct PeerEntry {
  int device = 0;
  const float* parts[2] = {};
  float* share = nullptr;
  uint32_t* flags = nullptr;
  std::string refusal;
};

class RankGroup {
 public:
  RankGroup(int32_t num_ranks, bool shares_devices, std::shared_ptr<const Nccl> nccl);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int32_t num_ranks() const { return num_ranks_; }
  bool shares_devices() const { return shares_devices_; }
  const std::shared_ptr<const Nccl>& nccl() const { return nccl_; }

  void wait(int32_t rank, const char* purpose, Deadline deadline);
  void abort(const std::string& why) noexcept;
  bool is_aborted() const { return is_aborted_.load(std::memory_order_acquire); }
  void require_whole() const;
  void wait_for_stream(cudaStream_t stream) const;

  void end_aside(std::function<void()> end) noexcept;
  void add(Abortable& part);
  void remove(Abortable& part) noexcept;

  NcclUniqueId unique_id;
  std::vector<PeerEntry> peers;

 private:
  std::string missing_ranks() const;

  int32_t num_ranks_;
  bool shares_devices_;
  std::shared_ptr<const Nccl> nccl_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> has_arrived_;
  int32_t num_arrived_ = 0;
  uint64_t round_ = 0;
  std::string why_;
  std::atomic<bool> is_aborted_ = false;
  std::mutex parts_mutex_;
  std::vector<Abortable*> parts_;
  std::mutex ends_mutex_;
  std::vector<std::future<void>> ends_;
};

}
