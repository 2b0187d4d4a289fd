#include "cuda/weights/loader.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/check.h"
#include "cuda/memory/device_memory.h"
#include "cuda/weights/load_tasks.h"
#include "model/load_progress.h"

namespace glint::cuda {

namespace {

constexpr uint64_t kSlots = 2;
constexpr uint64_t kMinReaders = 2;
constexpr uint64_t kMaxReaders = 8;
constexpr uint64_t kCheckedBytes = uint64_t{256} << 10U;

uint64_t num_readers(int32_t num_ranks) {
  const uint64_t cores = std::thread::hardware_concurrency();
  return std::clamp<uint64_t>(cores / static_cast<uint64_t>(num_ranks), kMinReaders, kMaxReaders);
}

uint64_t staging_bytes(uint64_t readers) { return readers * kSlots * kStageBytes; }

void check_fp8_values(const std::byte* values, uint64_t count, const SourcePiece& piece) {
  require_argument(!has_fp8_nan(values, count), "the E4M3 weight of role ", piece.name.role, ", layer ",
                   piece.name.layer, ", expert ", piece.name.expert,
                   " holds an FP8 NaN (0x7f or 0xff): the file is damaged");
}

void copy_rows(std::byte* target, const SourcePiece& piece) {
  const uint64_t run_bytes = piece.is_contiguous() ? kCheckedBytes : piece.row_bytes;
  const uint64_t run_stride = piece.is_contiguous() ? kCheckedBytes : piece.row_stride;
  const std::byte* source = piece.data;
  for (uint64_t first = 0; first < piece.byte_count; first += run_bytes, source += run_stride) {
    const uint64_t count = std::min(run_bytes, piece.byte_count - first);
    std::memcpy(target + first, source, count);
    if (piece.dtype == GLINT_DTYPE_F8_E4M3) check_fp8_values(target + first, count, piece);
  }
}

void copy_piece(std::byte* target, const SourcePiece& piece) {
  if (piece.repeats_one_value) {
    auto* values = reinterpret_cast<float*>(target);
    std::fill_n(values, piece.byte_count / sizeof(float), *reinterpret_cast<const float*>(piece.data));
  } else {
    copy_rows(target, piece);
  }
}

void announce(const LoadTask& task) {
  const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const SourcePiece& piece : task.pieces) {
    if (piece.repeats_one_value || piece.byte_count < page_bytes) continue;
    const auto address = reinterpret_cast<uintptr_t>(piece.data);
    const uintptr_t before = address % page_bytes;
    posix_madvise(const_cast<std::byte*>(piece.data) - before, piece.span_bytes() + before, POSIX_MADV_WILLNEED);
  }
}

class Reader {
 public:
  Reader(std::byte* pinned, std::byte* g_stage) : pinned_(pinned), g_stage_(g_stage) {
    GLINT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t& event : slot_free_) {
      GLINT_CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }

  ~Reader() {
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    for (const cudaEvent_t event : slot_free_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void load(const LoadTask& task) {
    const uint64_t slot = num_loaded_ % kSlots;
    std::byte* staged = pinned_ + slot * kStageBytes;
    auto* g_stage = reinterpret_cast<uint8_t*>(g_stage_ + slot * kStageBytes);
    if (num_loaded_ >= kSlots) GLINT_CHECK_CUDA(cudaEventSynchronize(slot_free_[slot]));
    uint64_t filled = 0;
    for (const SourcePiece& piece : task.pieces) {
      copy_piece(staged + filled, piece);
      filled += piece.byte_count;
    }
    GLINT_CHECK_CUDA(
        cudaMemcpyAsync(staging_target(task, g_stage), staged, task.byte_count, cudaMemcpyHostToDevice, stream_));
    launch_pack_task(task, g_stage, stream_);
    GLINT_CHECK_CUDA(cudaEventRecord(slot_free_[slot], stream_));
    ++num_loaded_;
    load_progress().bytes_done += task.byte_count;
  }

  void finish() { GLINT_CHECK_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  std::byte* pinned_;
  std::byte* g_stage_;
  cudaStream_t stream_ = nullptr;
  std::array<cudaEvent_t, kSlots> slot_free_{};
  uint64_t num_loaded_ = 0;
};

class ParallelLoad {
 public:
  ParallelLoad(const std::vector<LoadTask>& tasks, uint64_t num_readers)
      : tasks_(tasks),
        num_readers_(num_readers),
        pinned_(staging_bytes(num_readers)),
        g_stages_(staging_bytes(num_readers), "staging buffers of the loader") {
    GLINT_CHECK_CUDA(cudaGetDevice(&device_));
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  }

  void run() {
    {
      std::vector<std::jthread> threads;
      for (uint64_t reader = 0; reader < num_readers_; ++reader) {
        threads.emplace_back([this, reader] { read(reader); });
      }
    }
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

 private:
  void read(uint64_t index) {
    try {
      GLINT_CHECK_CUDA(cudaSetDevice(device_));
      const uint64_t first_byte = index * kSlots * kStageBytes;
      Reader reader(pinned_.data() + first_byte, g_stages_.data() + first_byte);
      for (size_t task = next_++; task < tasks_.size() && !has_failed_; task = next_++) {
        if (task + num_readers_ < tasks_.size()) announce(tasks_[task + num_readers_]);
        reader.load(tasks_[task]);
      }
      reader.finish();
    } catch (...) {
      const std::scoped_lock lock(failure_mutex_);
      if (failure_ == nullptr) failure_ = std::current_exception();
      has_failed_ = true;
    }
  }

  const std::vector<LoadTask>& tasks_;
  const uint64_t num_readers_;
  PinnedMemory pinned_;
  DeviceMemory g_stages_;
  int device_ = 0;
  std::atomic<size_t> next_ = 0;
  std::atomic<bool> has_failed_ = false;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

}

uint64_t loader_pinned_bytes(int32_t num_ranks) { return staging_bytes(num_readers(num_ranks)); }

void load_weights(const PlacedWeights& placed, const RankSlice& slice, const ModelWeights& source) {
  const std::vector<LoadTask> tasks =
      plan_load_tasks(placed, slice.model, slice_weights(source, slice), slice.expert_first);
  load_progress().expect(total_task_bytes(tasks));
  ParallelLoad(tasks, num_readers(slice.num_ranks)).run();
}

}
