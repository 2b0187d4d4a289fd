#include "cpu/collectives.h"

#include <algorithm>
#include <cstring>

#include "base/contract.h"
#include "base/faults.h"

namespace glint {

World::World(int32_t num_ranks) : published_(static_cast<size_t>(num_ranks)) { why_.reserve(kMaxFailureBytes); }

void World::wait_for_all() {
  constexpr int kSpins = 2000;
  const uint32_t round = round_.load(std::memory_order_acquire);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_ranks()) {
    num_arrived_.store(0, std::memory_order_relaxed);
    {
      const std::lock_guard lock(mutex_);
      round_.store(round + 1, std::memory_order_release);
    }
    changed_.notify_all();
  }
  for (int spin = 0; spin < kSpins && !has_left(round) && !is_stopped_; ++spin) {
  }
  if (!has_left(round)) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return has_left(round) || is_stopped_; });
  }
  require(!is_stopped_, GLINT_STATUS_RANK_FAILED, why_);
}

void World::stop(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return;
    why_ = why;
    is_stopped_ = true;
  }
  changed_.notify_all();
}

WorldOwner make_world(const glint_engine_options& options) { return WorldOwner(new World(options.num_ranks)); }

void WorldDeleter::operator()(World* world) const { delete world; }

void stop_world(World& world, const std::string& why) noexcept { world.stop(why); }

namespace cpu {

namespace {

constexpr int64_t kSumFloats = 256;

std::byte* part_at(void* data, int64_t index, int64_t bytes) { return static_cast<std::byte*>(data) + index * bytes; }

const std::byte* part_at(const void* data, int64_t index, int64_t bytes) {
  return static_cast<const std::byte*>(data) + index * bytes;
}

void copy_bytes(std::byte* out, const std::byte* in, int64_t bytes) {
  if (out != in) std::memcpy(out, in, static_cast<size_t>(bytes));
}

}

Collectives::Collectives(World& world, int32_t rank)
    : world_(world), rank_(rank), sums_(static_cast<size_t>(world.num_ranks() * kSumFloats)) {}

template <typename Copy>
void Collectives::exchange(const void* published, int64_t bytes_sent, Copy copy) {
  pass_fault_point(FaultPoint::kCollective, rank_);
  world_.publish(rank_, published);
  world_.wait_for_all();
  copy();
  world_.wait_for_all();
  ++num_run_;
  bytes_sent_ += static_cast<uint64_t>(bytes_sent);
}

void Collectives::all_gather(void* data, int64_t bytes_per_rank, int64_t total_bytes) {
  const auto bytes_of = [&](int64_t rank) {
    return std::clamp<int64_t>(total_bytes - rank * bytes_per_rank, 0, bytes_per_rank);
  };
  exchange(data, bytes_of(rank_) * (world_.num_ranks() - 1), [&] {
    for (int32_t rank = 0; rank < world_.num_ranks(); ++rank) {
      copy_bytes(part_at(data, rank, bytes_per_rank), part_at(world_.published(rank), rank, bytes_per_rank),
                 bytes_of(rank));
    }
  });
}

void Collectives::all_to_all(void* out, const void* in, int64_t bytes_per_rank) {
  exchange(in, bytes_per_rank * (world_.num_ranks() - 1), [&] {
    for (int32_t rank = 0; rank < world_.num_ranks(); ++rank) {
      copy_bytes(part_at(out, rank, bytes_per_rank), part_at(world_.published(rank), rank_, bytes_per_rank),
                 bytes_per_rank);
    }
  });
}

void Collectives::broadcast(void* data, int64_t byte_count, int32_t root) {
  exchange(data, rank_ == root ? byte_count * (world_.num_ranks() - 1) : 0, [&] {
    if (rank_ != root) copy_bytes(part_at(data, 0, 0), part_at(world_.published(root), 0, 0), byte_count);
  });
}

void Collectives::sum_over_ranks(float* out, int64_t first, int64_t count) {
  const int32_t num_ranks = world_.num_ranks();
  for (int64_t done = 0; done < count; done += kSumFloats) {
    const int64_t floats = std::min(kSumFloats, count - done);
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      const auto* part = static_cast<const float*>(world_.published(rank));
      std::copy_n(part + first + done, floats, sums_.data() + rank * kSumFloats);
    }
    for (int32_t width = 1; width < num_ranks; width *= 2) {
      for (int32_t rank = 0; rank + width < num_ranks; rank += 2 * width) {
        float* sum = sums_.data() + rank * kSumFloats;
        const float* other = sum + width * kSumFloats;
        for (int64_t index = 0; index < floats; ++index) sum[index] += other[index];
      }
    }
    std::copy_n(sums_.data(), floats, out + done);
  }
}

void Collectives::all_reduce(float* out, const float* part, int64_t count) {
  const auto bytes = count * static_cast<int64_t>(sizeof(float));
  exchange(part, bytes * (world_.num_ranks() - 1), [&] { sum_over_ranks(out, 0, count); });
}

void Collectives::reduce_scatter(float* out, const float* part, int64_t first, int64_t count, int64_t total) {
  const auto bytes = (total - count) * static_cast<int64_t>(sizeof(float));
  exchange(part, bytes, [&] { sum_over_ranks(out, first, count); });
}

void Collectives::gather_columns(const ColumnParts& parts, float* out, const float* in, int32_t root) {
  const auto bytes = parts.rows * parts.cols_of(rank_) * static_cast<int64_t>(sizeof(float));
  exchange(in, rank_ == root ? 0 : bytes, [&] {
    if (rank_ != root) return;
    for (int32_t rank = 0; rank < world_.num_ranks(); ++rank) {
      const int64_t cols = parts.cols_of(rank);
      const auto* source = static_cast<const float*>(world_.published(rank));
      for (int64_t row = 0; row < parts.rows; ++row) {
        std::copy_n(source + row * cols, cols, out + row * parts.out_stride + rank * parts.cols_per_rank);
      }
    }
  });
}

}

}
