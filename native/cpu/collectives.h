#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "model/backend.h"

namespace glint {

class World {
 public:
  explicit World(int32_t num_ranks);

  int32_t num_ranks() const { return static_cast<int32_t>(published_.size()); }
  void publish(int32_t rank, const void* place) { published_[static_cast<size_t>(rank)] = place; }
  const void* published(int32_t rank) const { return published_[static_cast<size_t>(rank)]; }
  void wait_for_all();
  void stop(const std::string& why);

 private:
  bool has_left(uint32_t round) const { return round_.load(std::memory_order_acquire) != round; }

  std::vector<const void*> published_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int32_t> num_arrived_ = 0;
  std::atomic<uint32_t> round_ = 0;
  std::atomic<bool> is_stopped_ = false;
  std::string why_;
};

namespace cpu {

struct ColumnParts {
  int64_t rows;
  int64_t cols_per_rank;
  int64_t total_cols;
  int64_t out_stride;

  int64_t cols_of(int32_t rank) const {
    return std::clamp<int64_t>(total_cols - rank * cols_per_rank, 0, cols_per_rank);
  }
};

class Collectives {
 public:
  Collectives(World& world, int32_t rank);

  void all_gather(void* data, int64_t bytes_per_rank, int64_t total_bytes);
  void all_to_all(void* out, const void* in, int64_t bytes_per_rank);
  void broadcast(void* data, int64_t byte_count, int32_t root);
  void all_reduce(float* out, const float* part, int64_t count);
  void reduce_scatter(float* out, const float* part, int64_t first, int64_t count, int64_t total);
  void gather_columns(const ColumnParts& parts, float* out, const float* in, int32_t root);

  uint64_t num_run() const { return num_run_; }
  uint64_t bytes_sent() const { return bytes_sent_; }

 private:
  template <typename Copy>
  void exchange(const void* published, int64_t bytes_sent, Copy copy);
  void sum_over_ranks(float* out, int64_t first, int64_t count);

  World& world_;
  const int32_t rank_;
  std::vector<float> sums_;
  std::atomic<uint64_t> num_run_ = 0;
  std::atomic<uint64_t> bytes_sent_ = 0;
};

}

}
