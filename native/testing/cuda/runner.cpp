#include "testing/cuda/runner.h"

#include <algorithm>

#include "base/contract.h"
#include "cuda/check.h"

namespace glint::testing {

namespace {

constexpr int64_t kMarginBytes = 64 * 1024;
constexpr std::byte kPoison{0xff};

}

DeviceBytes::DeviceBytes(int64_t byte_count)
    : memory_(static_cast<uint64_t>(byte_count + kMarginBytes), "a test"), byte_count_(byte_count) {
  fill(std::to_integer<int>(kPoison), byte_count + kMarginBytes);
}

DeviceBytes::DeviceBytes(const void* source, int64_t byte_count) : DeviceBytes(source == nullptr ? 0 : byte_count) {
  if (byte_count_ == 0) return;
  GLINT_CHECK_CUDA(cudaMemcpy(bytes(), source, static_cast<size_t>(byte_count_), cudaMemcpyHostToDevice));
}

void DeviceBytes::download_bytes(void* target) const {
  GLINT_CHECK_CUDA(cudaMemcpy(target, bytes(), static_cast<size_t>(byte_count_), cudaMemcpyDeviceToHost));
}

void DeviceBytes::copy_from(const DeviceBytes& source) const {
  GLINT_CHECK_CUDA(
      cudaMemcpyAsync(bytes(), source.bytes(), static_cast<size_t>(byte_count_), cudaMemcpyDeviceToDevice, nullptr));
}

void DeviceBytes::fill(int value, int64_t byte_count) const {
  GLINT_CHECK_CUDA(cudaMemsetAsync(bytes(), value, static_cast<size_t>(byte_count), nullptr));
}

void DeviceBytes::check_margin() const {
  std::vector<std::byte> margin(static_cast<size_t>(kMarginBytes));
  GLINT_CHECK_CUDA(cudaMemcpy(margin.data(), bytes() + byte_count_, margin.size(), cudaMemcpyDeviceToHost));
  const auto found = std::ranges::find_if(margin, [](std::byte value) { return value != kPoison; });
  require(found == margin.end(), GLINT_STATUS_INTERNAL, "a kernel wrote ", found - margin.begin(),
          " bytes behind the end of an array of ", byte_count_, " bytes; it may write inside only");
}

Runner::Runner(int32_t kernels, int32_t num_repeats)
    : is_hopper_(kernels == GLINT_KERNELS_HOPPER),
      is_fallback_(kernels == kFallbackKernels),
      num_repeats_(num_repeats) {
  constexpr int kHopperMajor = 9;
  int device = 0;
  int major = 0;
  GLINT_CHECK_CUDA(cudaGetDevice(&device));
  GLINT_CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  require_argument(kernels == GLINT_KERNELS_PORTABLE || is_fallback_ || (is_hopper_ && major == kHopperMajor),
                   "kernels is ", kernels, " on a GPU of compute capability ", major,
                   ": portable and the fallback run from 9 on, hopper on 9 alone");
}

void Runner::run(const std::function<void()>& launch, std::initializer_list<const DeviceBytes*> outputs) {
  std::vector<std::unique_ptr<DeviceBytes>> before;
  std::vector<std::unique_ptr<DeviceBytes>> expected;
  const DeviceArray<unsigned long long> different(std::vector<unsigned long long>{0});
  if (is_timing()) {
    microseconds_.push_back(timer_->median_microseconds(launch));
    return;
  }
  poison_shared_memory();
  for (const DeviceBytes* output : outputs) {
    before.emplace_back(std::make_unique<DeviceBytes>(output->byte_count()))->copy_from(*output);
  }
  launch();
  for (const DeviceBytes* output : outputs) {
    expected.emplace_back(std::make_unique<DeviceBytes>(output->byte_count()))->copy_from(*output);
  }
  for (int32_t repeat = 1; repeat < num_repeats_; ++repeat) {
    for (size_t index = 0; index < outputs.size(); ++index) outputs.begin()[index]->copy_from(*before[index]);
    launch();
    for (size_t index = 0; index < outputs.size(); ++index) {
      const DeviceBytes& output = *outputs.begin()[index];
      launch_count_different(different.data(), output.bytes(), expected[index]->bytes(), output.byte_count());
    }
  }
  GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  for (const DeviceBytes* output : outputs) output->check_margin();
  num_different_bytes_ += static_cast<int64_t>(different.to_host().front());
}

void Runner::run_row_counts(const std::function<void(int64_t)>& launch, const DeviceBytes& out, int64_t count) {
  const int64_t row_bytes = out.byte_count() / count;
  const DeviceArray<unsigned long long> different(std::vector<unsigned long long>{0});
  const DeviceBytes expected(out.byte_count());
  launch(count);
  expected.copy_from(out);
  for (int64_t rows = 1; rows <= count; ++rows) {
    out.fill(std::to_integer<int>(kPoison), rows * row_bytes);
    launch(rows);
    launch_count_different(different.data(), out.bytes(), expected.bytes(), rows * row_bytes);
  }
  GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  num_different_bytes_ += static_cast<int64_t>(different.to_host().front());
}

}

extern "C" {

using glint::testing::Runner;

GLINT_API const char* glint_testing_operations_error(void) { return glint::testing::last_error.c_str(); }

GLINT_API Runner* glint_testing_backend_new(int32_t kernels, int32_t num_repeats) {
  std::unique_ptr<Runner> runner;
  glint::testing::guarded([&] { runner = std::make_unique<Runner>(kernels, num_repeats); });
  return runner.release();
}

GLINT_API void glint_testing_backend_free(Runner* runner) { delete runner; }

GLINT_API int64_t glint_testing_backend_different_bytes(Runner* runner) { return runner->num_different_bytes(); }

GLINT_API int32_t glint_testing_start_timing(Runner* runner) {
  return glint::testing::guarded([&] { runner->start_timing(); });
}

GLINT_API int32_t glint_testing_run_nothing(Runner* runner) {
  return glint::testing::guarded([&] { runner->run(glint::testing::launch_empty, {}); });
}

GLINT_API int32_t glint_testing_peak_read(Runner* runner, double* bytes_per_second) {
  return glint::testing::guarded([&] { *bytes_per_second = runner->timer().peak_bytes_per_second(); });
}

GLINT_API int32_t glint_testing_take_microseconds(Runner* runner, double* out, int32_t capacity) {
  const std::vector<double> taken = runner->take_microseconds();
  std::copy_n(taken.begin(), std::min(taken.size(), static_cast<size_t>(capacity)), out);
  return static_cast<int32_t>(taken.size());
}
}
