#include "testing/cuda/timer.h"

#include <algorithm>
#include <vector>

#include "cuda/device.h"
#include "cuda/check.h"

namespace glint::testing {

namespace {

constexpr uint64_t kFlushedBytes = uint64_t{1} << 30U;
constexpr int kWarmUps = 3;
constexpr int kSamples = 21;

class Event {
 public:
  Event() { GLINT_CHECK_CUDA(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}

Timer::Timer() : memory_(kFlushedBytes, "the timer") {
  GLINT_CHECK_CUDA(cudaMemset(memory_.data(), 0, memory_.byte_count()));
}

double Timer::median_microseconds(const std::function<void()>& launch) const {
  const Event begin;
  const Event end;
  std::vector<float> milliseconds;
  for (int sample = -kWarmUps; sample < kSamples; ++sample) {
    float elapsed = 0;
    launch_flush(memory_);
    GLINT_CHECK_CUDA(cudaEventRecord(begin.get(), nullptr));
    launch();
    GLINT_CHECK_CUDA(cudaEventRecord(end.get(), nullptr));
    GLINT_CHECK_CUDA(cudaEventSynchronize(end.get()));
    GLINT_CHECK_CUDA(cudaEventElapsedTime(&elapsed, begin.get(), end.get()));
    if (sample >= 0) milliseconds.push_back(elapsed);
  }
  std::ranges::sort(milliseconds);
  return static_cast<double>(milliseconds[kSamples / 2]) * 1e3;
}

double Timer::peak_bytes_per_second() const { return cuda::measure_read(memory_, nullptr); }

}
