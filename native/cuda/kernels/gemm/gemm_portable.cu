#include "cuda/kernels/gemm/gemm_portable.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "cuda/kernels/gemm/gemm_portable.cuh"
#include "cuda/kernels/ptx/launch.cuh"
#include "cuda/launch.h"

namespace glint::cuda::portable {

constexpr int kPackThreads = 256;
constexpr int kWordBytes = 4;

struct PackShape {
  int64_t num_words;
  int64_t num_lines;
  int64_t row_bytes;
};

__global__ void __launch_bounds__(kPackThreads) portable_pack_kernel(const PortablePackCall call, PackShape shape) {
  const int64_t stride = int64_t{gridDim.x} * kPackThreads;
  for (int64_t word = int64_t{blockIdx.x} * kPackThreads + threadIdx.x; word < shape.num_words; word += stride) {
    const auto inside = static_cast<int>(word % (kUnitLineBytes / kWordBytes));
    const int64_t line = word / (kUnitLineBytes / kWordBytes);
    const int half = inside / 128;
    const int lane = inside / 4 % 32;
    const int64_t row = line / shape.num_lines * kUnitRows + lane / 4 + inside % 2 * 8;
    const int64_t first = line % shape.num_lines * kLineBytes + lane % 4 * kChunkBytes + half * 8 + inside / 2 % 2 * 4;
    uint32_t packed = 0;
    for (int byte = 0; byte < kWordBytes; ++byte) {
      if (row >= call.rows || first + byte >= shape.row_bytes) continue;
      packed |= uint32_t{call.weights[row * call.weight_stride_bytes + first + byte]} << (8 * byte);
    }
    reinterpret_cast<uint32_t*>(call.packed)[word] = packed;
  }
}

__global__ void __launch_bounds__(kPackThreads) to_bf16_kernel(const ToBf16Call call) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const float* g_row = call.in + blockIdx.x * call.in_stride;
  auto* g_out = reinterpret_cast<uint32_t*>(call.out + blockIdx.x * call.out_stride_bytes);
  for (int64_t word = threadIdx.x; word < call.out_stride_bytes / kWordBytes; word += kPackThreads) {
    const int64_t index = word * 2;
    const float low = index < call.width ? g_row[index] : 0.0F;
    const float high = index + 1 < call.width ? g_row[index + 1] : 0.0F;
    g_out[word] = ptx::pack_bf16(low, high);
  }
}

}

namespace glint::cuda {

namespace {

using portable::GemmPlan;
using portable::GemmShape;

template <GemmElement kElement, bool kHasTileScales>
struct Shapes {
  using Split16 = GemmShape<kElement, kHasTileScales, 1, 2, 1, 1, 3, 2>;
  using Split32 = GemmShape<kElement, kHasTileScales, 1, 4, 1, 1, 2, 2>;
  using Split64 = GemmShape<kElement, kHasTileScales, kHasTileScales ? 1 : 2, 8, 1, 1, 2, 1>;
  using WholeK16 = GemmShape<kElement, kHasTileScales, 1, 2, 8, 1, 2, kHasTileScales ? 3 : 4>;
  using WholeK32 = GemmShape<kElement, kHasTileScales, 2, 2, 4, 2, 3, kHasTileScales ? 2 : 3>;
  using WholeK64 = GemmShape<kElement, kHasTileScales, 2, 4, 4, 2, 3, kHasTileScales ? 1 : 2>;
};

int64_t element_bytes(GemmElement element) { return element == GemmElement::kBf16 ? 2 : 1; }

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

GemmPlan plan_gemm(const PortableWeight& weight) {
  const int64_t row_bytes = weight.cols * element_bytes(weight.element);
  const int64_t num_lines = divide_up(row_bytes, portable::kLineBytes);
  const int64_t num_stages = divide_up(num_lines, portable::kStageLines);
  const int64_t split_stages = std::max<int64_t>(2, divide_up(num_stages, portable::kMaxSplits));
  return {.num_units = static_cast<int32_t>(divide_up(weight.rows, portable::kUnitRows)),
          .num_lines = static_cast<int32_t>(num_lines),
          .row_bytes = static_cast<int32_t>(row_bytes),
          .split_stages = static_cast<int32_t>(split_stages),
          .num_splits = static_cast<int32_t>(divide_up(num_stages, split_stages)),
          .row_groups = 1,
          .tile_parts = 1};
}

template <class Shape>
bool fits_device() {
  static const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return Shape::kRingBytes * (Shape::kMaxThreads / Shape::kGroupThreads) <= limit;
}

template <class Shape>
void launch_shape(const PortableGemmCall& call, cudaStream_t stream) {
  const auto kernel = portable::gemm_portable_kernel<Shape>;
  GemmPlan plan = plan_gemm(call.weight);
  int groups = 1;
  if constexpr (Shape::kIsSplit) {
    const auto wanted = static_cast<int32_t>(divide_up(plan.num_units, Shape::kGroupUnits));
    plan.row_groups = std::min(portable::kMaxSplits / plan.num_splits, wanted);
    groups = plan.row_groups * plan.num_splits;
  }
  plan.tile_parts = static_cast<int32_t>(divide_up(std::max(call.tile_tokens, 1), Shape::kGroupTokens));
  const int bytes = groups * Shape::kRingBytes;
  GLINT_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t row_blocks = divide_up(plan.num_units, plan.row_groups * Shape::kGroupUnits);
  const int64_t token_blocks =
      call.tiles != nullptr ? call.max_tiles * plan.tile_parts : divide_up(call.num_tokens, Shape::kGroupTokens);
  const dim3 grid(static_cast<unsigned>(row_blocks), static_cast<unsigned>(token_blocks));
  launch_dependent(kernel, {grid, static_cast<unsigned>(groups * Shape::kGroupThreads), bytes}, stream, call, plan);
}

int64_t tokens_at_once(const PortableGemmCall& call) {
  return call.tiles != nullptr ? call.tile_tokens : call.num_tokens;
}

template <class Set>
bool prefers_whole_k(const PortableGemmCall& call) {
  static const int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t tokens = tokens_at_once(call);
  if (plan_gemm(call.weight).num_splits <= 2) return true;
  if (call.tiles != nullptr) return tokens > Set::Split32::kGroupTokens;
  const int64_t row_tiles = divide_up(call.weight.rows, Set::WholeK64::kGroupRows);
  const int64_t tiles = row_tiles * divide_up(tokens, Set::WholeK64::kGroupTokens);
  return tokens > Set::Split16::kGroupTokens && tiles * 4 >= multiprocessors * 3;
}

template <class Set>
void launch_whole_k(const PortableGemmCall& call, cudaStream_t stream) {
  const int64_t tokens = tokens_at_once(call);
  if (tokens <= Set::WholeK16::kGroupTokens) return launch_shape<typename Set::WholeK16>(call, stream);
  if (tokens <= Set::WholeK32::kGroupTokens) return launch_shape<typename Set::WholeK32>(call, stream);
  launch_shape<typename Set::WholeK64>(call, stream);
}

template <class Set>
void launch_split(const PortableGemmCall& call, cudaStream_t stream) {
  const int64_t tokens = tokens_at_once(call);
  const bool has_few_tokens = tokens <= Set::Split64::kGroupTokens;
  if (tokens <= Set::Split16::kGroupTokens) return launch_shape<typename Set::Split16>(call, stream);
  if (has_few_tokens || !fits_device<typename Set::Split64>()) return launch_shape<typename Set::Split32>(call, stream);
  launch_shape<typename Set::Split64>(call, stream);
}

template <class Set>
void choose_shape(const PortableGemmCall& call, cudaStream_t stream) {
  if (prefers_whole_k<Set>(call)) return launch_whole_k<Set>(call, stream);
  launch_split<Set>(call, stream);
}

void check_gemm(const PortableGemmCall& call) {
  const PortableWeight& weight = call.weight;
  const bool has_scales = weight.scale_kind != GLINT_SCALE_NONE;
  require_argument(weight.rows > 0 && weight.cols > 0, "a GEMM's weight is ", weight.rows, " by ", weight.cols,
                   "; both must be above 0");
  require_argument(call.activation_stride_bytes % portable::kChunkBytes == 0, "activation rows are ",
                   call.activation_stride_bytes, " bytes apart; make that a multiple of ", portable::kChunkBytes);
  require_argument(call.activation_stride_bytes >= weight.cols * element_bytes(weight.element), "activation rows of ",
                   call.activation_stride_bytes, " bytes are too short for ", weight.cols, " columns");
  require_argument(!has_scales || weight.scales != nullptr, "scale kind ", weight.scale_kind,
                   " needs scales; pass them or GLINT_SCALE_NONE");
  require_argument(weight.scale_kind != GLINT_SCALE_TILE || weight.element == GemmElement::kE4m3,
                   "scales by tile are for E4M3 weights only");
  require_argument(call.tiles == nullptr || (call.num_tiles != nullptr && call.tile_tokens > 0),
                   "grouped GEMMs need num_tiles and tile_tokens");
}

}

int64_t portable_weight_bytes(int64_t rows, int64_t cols, GemmElement element) {
  return divide_up(rows, portable::kUnitRows) * divide_up(cols * element_bytes(element), portable::kLineBytes) *
         portable::kUnitLineBytes;
}

int64_t portable_row_bytes(int64_t cols, GemmElement element) {
  return divide_up(cols * element_bytes(element), kPortableRowBytes) * kPortableRowBytes;
}

void launch_portable_pack(const PortablePackCall& call, cudaStream_t stream) {
  constexpr int64_t kMaxThreadBlocks = 4096;
  const int64_t row_bytes = call.cols * element_bytes(call.element);
  PortablePackCall packed_call = call;
  if (call.weight_stride_bytes == 0) packed_call.weight_stride_bytes = row_bytes;
  const portable::PackShape shape = {portable_weight_bytes(call.rows, call.cols, call.element) / portable::kWordBytes,
                                     divide_up(row_bytes, portable::kLineBytes), row_bytes};
  const int64_t blocks = std::min(kMaxThreadBlocks, divide_up(shape.num_words, portable::kPackThreads));
  portable::portable_pack_kernel<<<static_cast<unsigned>(blocks), portable::kPackThreads, 0, stream>>>(packed_call,
                                                                                                       shape);
  GLINT_CHECK_CUDA(cudaGetLastError());
}

void launch_gemm_portable(const PortableGemmCall& call, cudaStream_t stream) {
  check_gemm(call);
  if (call.num_tokens == 0 || (call.tiles != nullptr && call.max_tiles == 0)) return;
  if (call.weight.element == GemmElement::kBf16) {
    choose_shape<Shapes<GemmElement::kBf16, false>>(call, stream);
  } else if (call.weight.scale_kind == GLINT_SCALE_TILE) {
    choose_shape<Shapes<GemmElement::kE4m3, true>>(call, stream);
  } else {
    choose_shape<Shapes<GemmElement::kE4m3, false>>(call, stream);
  }
}

void launch_to_bf16(const ToBf16Call& call, cudaStream_t stream) {
  require_argument(call.out_stride_bytes % portable::kWordBytes == 0 && call.out_stride_bytes >= call.width * 2,
                   "BF16 rows of ", call.width, " columns cannot be ", call.out_stride_bytes,
                   " bytes apart; use portable_row_bytes");
  if (call.count == 0) return;
  launch_dependent(portable::to_bf16_kernel, {static_cast<unsigned>(call.count), portable::kPackThreads, 0}, stream,
                   call);
}

}
