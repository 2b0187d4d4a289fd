#include "cuda/bench/step_check.h"

namespace glint::cuda::bench {

namespace {

constexpr int kThreads = 512;

__global__ void read_kernel(uint4* g_sink, const uint4* g_source, size_t count) {
  const size_t stride = size_t{gridDim.x} * kThreads;
  uint4 sum{};
#pragma unroll 8
  for (size_t index = size_t{blockIdx.x} * kThreads + threadIdx.x; index < count; index += stride) {
    const uint4 value = __ldg(g_source + index);
    sum.x ^= value.x;
    sum.y ^= value.y;
    sum.z ^= value.z;
    sum.w ^= value.w;
  }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678U) *g_sink = sum;
}

__global__ void difference_kernel(unsigned long long* g_count, const uint8_t* g_left, const uint8_t* g_right,
                                  size_t bytes) {
  const size_t stride = size_t{gridDim.x} * kThreads;
  unsigned long long found = 0;
  for (size_t index = size_t{blockIdx.x} * kThreads + threadIdx.x; index < bytes; index += stride) {
    found += g_left[index] != g_right[index] ? 1 : 0;
  }
  if (found > 0) atomicAdd(g_count, found);
}

__global__ void empty_kernel() {}

float elapsed_ms(const std::function<void(cudaStream_t)>& work, cudaStream_t stream) {
  cudaEvent_t start;
  cudaEvent_t stop;
  GLINT_CHECK_CUDA(cudaEventCreate(&start));
  GLINT_CHECK_CUDA(cudaEventCreate(&stop));
  GLINT_CHECK_CUDA(cudaEventRecord(start, stream));
  work(stream);
  GLINT_CHECK_CUDA(cudaEventRecord(stop, stream));
  GLINT_CHECK_CUDA(cudaEventSynchronize(stop));
  float milliseconds = 0;
  GLINT_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, start, stop));
  GLINT_CHECK_CUDA(cudaEventDestroy(start));
  GLINT_CHECK_CUDA(cudaEventDestroy(stop));
  return milliseconds;
}

}

double read_ceiling() {
  const size_t num_bytes = size_t{is_quick ? 1U : 4096U} << 20U;
  DeviceArray<uint4> source(num_bytes / sizeof(uint4));
  DeviceArray<uint4> sink(1);
  const double seconds = median_seconds(
      [&](int, cudaStream_t stream) {
        read_kernel<<<132 * 4, kThreads, 0, stream>>>(sink.data(), source.data(), source.count());
      },
      1);
  return static_cast<double>(num_bytes) / seconds;
}

double median_seconds(const std::function<void(int, cudaStream_t)>& launch, int num_sets) {
  constexpr int kRepeats = 7;
  const int launches = std::max(num_sets, 8);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t captured;
  GLINT_CHECK_CUDA(cudaStreamCreate(&stream));
  launch(0, stream);
  GLINT_CHECK_CUDA(cudaStreamSynchronize(stream));
  if (is_quick) return 1.0;
  GLINT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int index = 0; index < launches; ++index) launch(index % num_sets, stream);
  GLINT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  GLINT_CHECK_CUDA(cudaGraphInstantiate(&captured, graph, 0));
  const auto replay = [&](cudaStream_t on) { GLINT_CHECK_CUDA(cudaGraphLaunch(captured, on)); };
  for (int index = 0; index < 3; ++index) replay(stream);
  std::vector<float> times;
  for (int index = 0; index < kRepeats; ++index) times.push_back(elapsed_ms(replay, stream));
  std::ranges::sort(times);
  GLINT_CHECK_CUDA(cudaGraphExecDestroy(captured));
  GLINT_CHECK_CUDA(cudaGraphDestroy(graph));
  GLINT_CHECK_CUDA(cudaStreamDestroy(stream));
  return static_cast<double>(times[kRepeats / 2]) * 1e-3 / launches;
}

void print_time(const std::string& name, double seconds, const Work& work, const Ceiling& ceiling) {
  std::printf("time %-44s %9.2f us", name.c_str(), seconds * 1e6);
  if (work.bytes > 0) {
    const double rate = work.bytes / seconds;
    std::printf(" %7.0f GB/s %3.0f%% (floor %.2f us)", rate * 1e-9, 100 * rate / ceiling.read_bytes_per_second,
                work.bytes / ceiling.read_bytes_per_second * 1e6);
  }
  if (work.operations > 0) std::printf(" %7.1f TFLOP/s", work.operations / seconds * 1e-12);
  std::printf("\n");
  std::fflush(stdout);
}

void time_empty_kernel(const Ceiling& ceiling) {
  const double seconds = median_seconds([](int, cudaStream_t stream) { empty_kernel<<<1, 32, 0, stream>>>(); }, 1);
  print_time("a kernel that does nothing", seconds, {}, ceiling);
}

int64_t count_differences(const void* left, const void* right, size_t bytes) {
  DeviceArray<unsigned long long> count(std::vector<unsigned long long>{0});
  difference_kernel<<<264, kThreads>>>(count.data(), static_cast<const uint8_t*>(left),
                                       static_cast<const uint8_t*>(right), bytes);
  return static_cast<int64_t>(count.download()[0]);
}

bool is_repeatable(const std::function<void(cudaStream_t)>& launch, const void* out, size_t bytes, int runs) {
  DeviceArray<uint8_t> first(bytes);
  DeviceArray<unsigned long long> count(std::vector<unsigned long long>{0});
  launch(nullptr);
  GLINT_CHECK_CUDA(cudaMemcpy(first.data(), out, bytes, cudaMemcpyDeviceToDevice));
  for (int run = 1; run < (is_quick ? 3 : runs); ++run) {
    launch(nullptr);
    difference_kernel<<<264, kThreads>>>(count.data(), first.data(), static_cast<const uint8_t*>(out), bytes);
  }
  GLINT_CHECK_CUDA(cudaGetLastError());
  return count.download()[0] == 0;
}

}

int main(int argc, char** argv) {
  using namespace glint::cuda::bench;
  const std::string wanted = argc > 1 ? argv[1] : "all";
  is_quick = argc > 2 && std::string(argv[2]) == "quick";
  Report report;
  const Ceiling ceiling{read_ceiling()};
  std::printf("read ceiling %.0f GB/s\n", ceiling.read_bytes_per_second * 1e-9);
  time_empty_kernel(ceiling);
  const auto runs = [&](const char* name) { return wanted == "all" || wanted.find(name) != std::string::npos; };
  if (runs("rows")) run_rows(report, ceiling);
  if (runs("attention")) run_attention(report, ceiling);
  if (runs("codes")) run_codes(report, ceiling);
  if (runs("router")) run_router(report, ceiling);
  if (runs("sampling")) run_sampling(report, ceiling);
  std::printf("%d checks failed\n", report.num_failures());
  return report.num_failures() == 0 ? 0 : 1;
}
