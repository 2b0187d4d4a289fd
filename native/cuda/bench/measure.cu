#include "cuda/bench/measure.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace glint::cuda::bench {

namespace {

constexpr int kThreads = 256;

__device__ uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27U)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31U);
}

__device__ float random_value(uint64_t seed, int64_t index) {
  const uint64_t bits = mix(seed * 0x100000001b3ULL + static_cast<uint64_t>(index));
  float sum = 0.0F;
  for (int part = 0; part < 4; ++part) sum += static_cast<float>((bits >> (part * 16)) & 0xffffU) / 65536.0F - 0.5F;
  return sum * 1.7320508F;
}

__global__ void fill_codes_kernel(uint8_t* out, int64_t count, RandomFill fill) {
  for (int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x; index < count; index += gridDim.x * kThreads) {
    out[index] = __nv_cvt_float_to_fp8(random_value(fill.seed, index) * fill.spread, __NV_SATFINITE, __NV_E4M3);
  }
}

__global__ void fill_bf16_kernel(uint16_t* out, int64_t count, RandomFill fill) {
  for (int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x; index < count; index += gridDim.x * kThreads) {
    out[index] = __bfloat16_as_ushort(__float2bfloat16(random_value(fill.seed, index) * fill.spread));
  }
}

__global__ void fill_float_kernel(float* out, int64_t count, RandomFill fill, bool is_positive) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= count) return;
  const float value = random_value(fill.seed, index);
  out[index] = fill.spread * (is_positive ? 0.5F + fabsf(value) : value);
}

__global__ void poison_shared_kernel() {
  extern __shared__ uint32_t s_words[];
  for (int index = threadIdx.x; index < 227 * 256; index += blockDim.x) s_words[index] = 0xffffffffU;
  __syncthreads();
  if (s_words[(clock64() & 1023)] != 0xffffffffU) asm volatile("trap;");
}

__device__ double value_of(const uint8_t* values, int64_t index, bool is_bf16) {
  if (is_bf16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(values)[index]);
  __nv_fp8_e4m3 code;
  code.__x = values[index];
  return static_cast<float>(code);
}

__global__ void reference_kernel(ReferenceProduct product) {
  const int64_t output = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (output >= product.rows * product.num_tokens) return;
  const int64_t row = output % product.rows;
  const int64_t place = output / product.rows;
  const int64_t token = product.row_tokens == nullptr ? place : product.row_tokens[place];
  double sum = 0.0;
  for (int64_t k = threadIdx.x % 32; k < product.k; k += 32) {
    sum += value_of(product.weights, row * product.k + k, product.is_bf16) *
           value_of(product.activations, token * product.k + k, product.is_bf16);
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0U, sum, distance);
  if (threadIdx.x % 32 == 0) product.out[output] = sum;
}

struct Sums {
  double error;
  double reference;
  unsigned long long num_wrong;
};

__global__ void compare_kernel(Sums* sums, const float* out, const double* reference, int64_t count) {
  Sums mine = {0.0, 0.0, 0};
  for (int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x; index < count; index += gridDim.x * kThreads) {
    const double difference = static_cast<double>(out[index]) - reference[index];
    if (!isfinite(out[index])) {
      ++mine.num_wrong;
      continue;
    }
    mine.error += difference * difference;
    mine.reference += reference[index] * reference[index];
  }
  atomicAdd(&sums->error, mine.error);
  atomicAdd(&sums->reference, mine.reference);
  atomicAdd(&sums->num_wrong, mine.num_wrong);
}

__global__ void count_different_kernel(unsigned long long* count_out, const uint32_t* left, const uint32_t* right,
                                       int64_t count) {
  unsigned long long different = 0;
  for (int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x; index < count; index += gridDim.x * kThreads) {
    different += left[index] != right[index] ? 1U : 0U;
  }
  if (different > 0) atomicAdd(count_out, different);
}

__global__ void read_kernel(uint32_t* out, const uint4* data, int64_t count) {
  uint32_t folded = 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; index + 3 * stride < count; index += 4 * stride) {
    uint4 values[4];
#pragma unroll
    for (int part = 0; part < 4; ++part) values[part] = __ldcs(data + index + part * stride);
#pragma unroll
    for (int part = 0; part < 4; ++part) folded ^= values[part].x ^ values[part].y ^ values[part].z ^ values[part].w;
  }
  if (folded == 0x12345678U) *out = folded;
}

unsigned blocks_for(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

unsigned few_blocks_for(int64_t count) { return std::min(blocks_for(count), 4096U); }

}

void synchronize() {
  GLINT_CHECK_CUDA(cudaGetLastError());
  GLINT_CHECK_CUDA(cudaDeviceSynchronize());
}

void fill_codes(uint8_t* out, int64_t count, RandomFill fill) {
  fill_codes_kernel<<<few_blocks_for(count), kThreads>>>(out, count, fill);
  synchronize();
}

void fill_bf16(uint16_t* out, int64_t count, RandomFill fill) {
  fill_bf16_kernel<<<few_blocks_for(count), kThreads>>>(out, count, fill);
  synchronize();
}

void fill_positive(float* out, int64_t count, RandomFill fill) {
  fill_float_kernel<<<blocks_for(count), kThreads>>>(out, count, fill, true);
  synchronize();
}

void fill_signed(float* out, int64_t count, RandomFill fill) {
  fill_float_kernel<<<blocks_for(count), kThreads>>>(out, count, fill, false);
  synchronize();
}

void poison_shared_memory() {
  constexpr int kBytes = 227 * 1024;
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(poison_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  poison_shared_kernel<<<132, 1024, kBytes>>>();
  synchronize();
}

void run_reference(const ReferenceProduct& product) {
  reference_kernel<<<blocks_for(product.rows * product.num_tokens * 32), kThreads>>>(product);
  synchronize();
}

Difference compare(const float* out, const double* reference, int64_t count) {
  DeviceArray<Sums> sums(1);
  sums.fill_bytes(0);
  compare_kernel<<<std::min(blocks_for(count), 1024U), kThreads>>>(sums.data(), out, reference, count);
  synchronize();
  const Sums host = sums.to_host()[0];
  return {host.reference > 0.0 ? sqrt(host.error / host.reference) : host.error, static_cast<int64_t>(host.num_wrong)};
}

int64_t count_different_bits(const float* left, const float* right, int64_t count) {
  static DeviceArray<unsigned long long> different(1);
  different.fill_bytes(0);
  count_different_kernel<<<std::min(blocks_for(count), 1024U), kThreads>>>(
      different.data(), reinterpret_cast<const uint32_t*>(left), reinterpret_cast<const uint32_t*>(right), count);
  synchronize();
  return static_cast<int64_t>(different.to_host()[0]);
}

double median_microseconds(cudaStream_t stream, int launches, const std::function<void(int)>& launch) {
  constexpr int kReplays = 15;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  launch(0);
  GLINT_CHECK_CUDA(cudaStreamSynchronize(stream));
  GLINT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int index = 0; index < launches; ++index) launch(index);
  GLINT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  GLINT_CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  GLINT_CHECK_CUDA(cudaEventCreate(&begin));
  GLINT_CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int index = 0; index < kReplays + 3; ++index) {
    GLINT_CHECK_CUDA(cudaEventRecord(begin, stream));
    GLINT_CHECK_CUDA(cudaGraphLaunch(replay, stream));
    GLINT_CHECK_CUDA(cudaEventRecord(end, stream));
    GLINT_CHECK_CUDA(cudaEventSynchronize(end));
    float milliseconds = 0.0F;
    GLINT_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    if (index >= 3) times.push_back(milliseconds);
  }
  GLINT_CHECK_CUDA(cudaEventDestroy(begin));
  GLINT_CHECK_CUDA(cudaEventDestroy(end));
  GLINT_CHECK_CUDA(cudaGraphExecDestroy(replay));
  GLINT_CHECK_CUDA(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]) * 1000.0 / launches;
}

double read_ceiling_bytes_per_second() {
  constexpr int64_t kBytes = int64_t{1} << 31;
  const DeviceArray<uint8_t> data(kBytes);
  const DeviceArray<uint32_t> out(1);
  cudaStream_t stream = nullptr;
  GLINT_CHECK_CUDA(cudaStreamCreate(&stream));
  const double microseconds = median_microseconds(stream, 2, [&](int) {
    read_kernel<<<132 * 8, 512, 0, stream>>>(out.data(), reinterpret_cast<const uint4*>(data.data()), kBytes / 16);
  });
  GLINT_CHECK_CUDA(cudaStreamDestroy(stream));
  return static_cast<double>(kBytes) / microseconds * 1e6;
}

}
