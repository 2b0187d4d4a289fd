#pragma once

#include "cuda/kernels/ptx/copy.cuh"
#include "cuda/kernels/router/router_gemm.cuh"

namespace glint::cuda {

inline constexpr int kManyGroups = 2;
inline constexpr int kManyExpertHalves = 2;
inline constexpr int kManyRowHalves = 2;
inline constexpr int kManyTileRows = 16;
inline constexpr int kManyRows = kManyRowHalves * kManyTileRows;
inline constexpr int kManyGroupThreads = kManyExpertHalves * kManyRowHalves * kWarpLanes;
inline constexpr int kManyThreads = kManyGroups * kManyGroupThreads;
inline constexpr int kWeightRowBytes = 2 * kRouterStepCols;
inline constexpr int kInputRowBytes = 4 * kRouterStepCols;
inline constexpr int kGroupBarrier = 1;
inline constexpr int kPassedBarrier = kGroupBarrier + kManyGroups;
inline constexpr int kTakenBarrier = kPassedBarrier + 1;

template <int kExpertTiles>
struct ManyStorage {
  static constexpr int kExperts = kManyExpertHalves * kExpertTiles * 8;
  static constexpr int kStages = kExpertTiles > 8 ? 3 : 4;

  std::byte weights[kManyGroups][kStages][kExperts][kWeightRowBytes];
  std::byte inputs[kManyGroups][kStages][kManyRows][kInputRowBytes];
  float4 passed[kExpertTiles][kManyGroupThreads];
};

template <int kExpertTiles>
struct ManyCopy {
  using Storage = ManyStorage<kExpertTiles>;
  static constexpr int kWeightRowChunks = kRouterStepCols / kRouterChunkCols;
  static constexpr int kWeightRows = kManyGroupThreads / kWeightRowChunks;
  static constexpr int kInputRowChunks = kRouterStepCols / 4;
  static constexpr int kInputRows = kManyGroupThreads / kInputRowChunks;
  static_assert(kWeightRows % 2 == 0 && kInputRows % 2 == 0, "a thread keeps its place in every row it copies");

  const RouterCall& call;
  Storage& s_storage;
  int group;
  int expert_first;
  int64_t row_first;
  int thread = static_cast<int>(threadIdx.x) % kManyGroupThreads;
  int weight_row = thread / kWeightRowChunks;
  int weight_col = thread % kWeightRowChunks * kRouterChunkCols;
  int weight_place = weight_row * kWeightRowBytes + 16 * ((weight_col / kRouterChunkCols) ^ (weight_row % 2 * 4));
  int input_row = thread / kInputRowChunks;
  int input_col = thread % kInputRowChunks * 4;
  int input_place = input_row * kInputRowBytes + 16 * ((input_col / 4) ^ (input_row % 2));
  const uint16_t* g_weight = call.weight + int64_t{expert_first + weight_row} * call.width + weight_col;
  const float* g_input = call.in + (row_first + input_row) * call.width + input_col;

  __device__ __forceinline__ void load(int step_first, int stage) const {
    load_weights(step_first, s_storage.weights[group][stage][0] + weight_place);
    load_inputs(step_first, s_storage.inputs[group][stage][0] + input_place);
  }

  __device__ __forceinline__ void load_weights(int step_first, std::byte* s_target) const {
    const int experts_left = step_first + weight_col < call.width ? call.num_experts - expert_first - weight_row : 0;
    const uint16_t* g_source = g_weight + step_first;
#pragma unroll
    for (int row = 0; row < Storage::kExperts; row += kWeightRows) {
      ptx::cp_async_zfill(s_target + row * kWeightRowBytes, g_source, row < experts_left ? 16 : 0);
      g_source += kWeightRows * call.width;
    }
  }

  __device__ __forceinline__ void load_inputs(int step_first, std::byte* s_target) const {
    const int64_t rows_left = step_first + input_col < call.width ? call.count - row_first - input_row : 0;
    const float* g_source = g_input + step_first;
#pragma unroll
    for (int row = 0; row < kManyRows; row += kInputRows) {
      ptx::cp_async_zfill(s_target + row * kInputRowBytes, g_source, row < rows_left ? 16 : 0);
      g_source += kInputRows * call.width;
    }
  }
};

struct ManyReader {
  int lane_row = router_lane() / 4;
  int weight_place[kLaneChunks];
  int input_place[kLaneCols / 4];

  __device__ __forceinline__ ManyReader(int tile_expert, int tile_row) {
#pragma unroll
    for (int chunk = 0; chunk < kLaneChunks; ++chunk) {
      const int place = (lane_col(chunk * kRouterChunkCols) / kRouterChunkCols) ^ (lane_row % 2 * 4);
      weight_place[chunk] = (tile_expert + lane_row) * kWeightRowBytes + 16 * place;
    }
#pragma unroll
    for (int index = 0; index < kLaneCols / 4; ++index) {
      const int place = (lane_col(4 * index) / 4) ^ (lane_row % 2);
      input_place[index] = (tile_row + lane_row) * kInputRowBytes + 16 * place;
    }
  }

  __device__ __forceinline__ uint4 read_weights(const std::byte* s_weights, int tile, int chunk) const {
    return *reinterpret_cast<const uint4*>(s_weights + 8 * tile * kWeightRowBytes + weight_place[chunk]);
  }

  __device__ __forceinline__ void read_terms(LaneTerms& terms, const std::byte* s_inputs, int half) const {
    LaneInputs inputs;
#pragma unroll
    for (int index = 0; index < kLaneCols; index += 4) {
      const std::byte* s_values = s_inputs + 8 * half * kInputRowBytes + input_place[index / 4];
      const float4 loaded = *reinterpret_cast<const float4*>(s_values);
      inputs.values[index] = loaded.x;
      inputs.values[index + 1] = loaded.y;
      inputs.values[index + 2] = loaded.z;
      inputs.values[index + 3] = loaded.w;
    }
    terms.split(inputs);
  }
};

__device__ __forceinline__ ptx::FragmentA token_fragment(const LaneTerms (&rows)[2], int mma, int term) {
  const ptx::FragmentB& low = rows[0].terms[mma][term];
  const ptx::FragmentB& high = rows[1].terms[mma][term];
  return {{low.regs[0], high.regs[0], low.regs[1], high.regs[1]}};
}

template <int kExpertTiles>
struct ManySums {
  ptx::FragmentC tiles[kExpertTiles] = {};

  __device__ __forceinline__ void add_mma(const LaneTerms (&rows)[2], int mma, const uint32_t (&low)[kExpertTiles],
                                          const uint32_t (&high)[kExpertTiles]) {
#pragma unroll
    for (int term = 0; term < kTermCount; ++term) {
      const ptx::FragmentA tokens = token_fragment(rows, mma, term);
#pragma unroll
      for (int tile = 0; tile < kExpertTiles; ++tile) {
        ptx::mma_m16n8k16_bf16(tiles[tile], tokens, low[tile], high[tile]);
      }
    }
  }

  __device__ __forceinline__ void add_step(const ManyReader& reader, const std::byte* s_weights,
                                           const std::byte* s_inputs) {
    LaneTerms rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) reader.read_terms(rows[half], s_inputs, half);
#pragma unroll
    for (int chunk = 0; chunk < kLaneChunks; ++chunk) {
      uint32_t words[4][kExpertTiles];
#pragma unroll
      for (int tile = 0; tile < kExpertTiles; ++tile) {
        const uint4 loaded = reader.read_weights(s_weights, tile, chunk);
        words[0][tile] = loaded.x;
        words[1][tile] = loaded.y;
        words[2][tile] = loaded.z;
        words[3][tile] = loaded.w;
      }
      add_mma(rows, 2 * chunk, words[0], words[1]);
      add_mma(rows, 2 * chunk + 1, words[2], words[3]);
    }
    float last = tiles[0].values[0];
#pragma unroll
    for (int tile = 1; tile < kExpertTiles; ++tile) last = __fadd_rn(last, tiles[tile].values[0]);
    ptx::wait_for_sum(last);
  }

  __device__ __forceinline__ void add(const float4& values, int index) {
    ptx::FragmentC& sum = tiles[index];
    sum.values[0] += values.x;
    sum.values[1] += values.y;
    sum.values[2] += values.z;
    sum.values[3] += values.w;
  }

  __device__ __forceinline__ float4 get(int index) const {
    const ptx::FragmentC& sum = tiles[index];
    return make_float4(sum.values[0], sum.values[1], sum.values[2], sum.values[3]);
  }
};

__device__ __forceinline__ void store_token_sums(float* g_out, const ptx::FragmentC& sum, const RouterCall& call,
                                                 int expert_first, int64_t row_first) {
#pragma unroll
  for (int element = 0; element < 4; ++element) {
    const int expert = expert_first + router_lane() % 4 * 2 + element % 2;
    const int64_t row = row_first + router_lane() / 4 + element / 2 * 8;
    if (expert < call.num_experts && row < call.count) g_out[row * call.num_experts + expert] = sum.values[element];
  }
}

template <int kExpertTiles>
struct ManyPass {
  using Storage = ManyStorage<kExpertTiles>;
  using Sums = ManySums<kExpertTiles>;

  Storage& s_storage;
  int num_splits;
  int thread = static_cast<int>(threadIdx.x) % kManyGroupThreads;

  __device__ __forceinline__ void send(const Sums& sums, int split) const {
    if (split > 1) ptx::bar_sync(kTakenBarrier, kManyThreads);
#pragma unroll
    for (int tile = 0; tile < kExpertTiles; ++tile) s_storage.passed[tile][thread] = sums.get(tile);
    ptx::bar_arrive(kPassedBarrier, kManyThreads);
  }

  __device__ __forceinline__ void take(Sums& totals, int split) const {
    ptx::bar_sync(kPassedBarrier, kManyThreads);
#pragma unroll
    for (int tile = 0; tile < kExpertTiles; ++tile) totals.add(s_storage.passed[tile][thread], tile);
    if (split + kManyGroups < num_splits) ptx::bar_arrive(kTakenBarrier, kManyThreads);
  }
};

template <int kExpertTiles>
struct ManyGroup {
  using Storage = ManyStorage<kExpertTiles>;
  using Sums = ManySums<kExpertTiles>;

  const ManyCopy<kExpertTiles>& copy;
  const ManyReader& reader;
  Storage& s_storage;
  int group;
  int num_splits;
  int next_split = group;
  int next_step = 0;
  int load_stage = 0;
  int read_stage = 0;

  __device__ __forceinline__ void load_next() {
    if (next_split < num_splits) {
      copy.load(next_split * kRouterSplitCols + next_step * kRouterStepCols, load_stage);
      load_stage = load_stage + 1 == Storage::kStages ? 0 : load_stage + 1;
      next_split += next_step == kSplitSteps - 1 ? kManyGroups : 0;
      next_step = next_step == kSplitSteps - 1 ? 0 : next_step + 1;
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void add_split(Sums& sums) {
    sums = {};
#pragma unroll
    for (int step = 0; step < kSplitSteps; ++step) {
      ptx::cp_async_wait_group<Storage::kStages - 2>();
      ptx::bar_sync(kGroupBarrier + group, kManyGroupThreads);
      load_next();
      sums.add_step(reader, s_storage.weights[group][read_stage][0], s_storage.inputs[group][read_stage][0]);
      read_stage = read_stage + 1 == Storage::kStages ? 0 : read_stage + 1;
    }
  }
};

template <int kExpertTiles>
__global__ void __launch_bounds__(kManyThreads, 1) router_gemm_many_kernel(const RouterCall call) {
  using Storage = ManyStorage<kExpertTiles>;
  extern __shared__ uint4 s_memory[];
  auto& s_storage = *reinterpret_cast<Storage*>(s_memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int group = static_cast<int>(threadIdx.x) / kManyGroupThreads;
  const int expert_first = static_cast<int>(blockIdx.x) * Storage::kExperts;
  const int tile_expert = warp % kManyExpertHalves * kExpertTiles * 8;
  const int tile_row = warp / kManyExpertHalves % kManyRowHalves * kManyTileRows;
  const int64_t row_first = int64_t{blockIdx.y} * kManyRows;
  const auto num_splits = static_cast<int>(router_splits(call.width));
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const ManyCopy<kExpertTiles> copy{call, s_storage, group, expert_first, row_first};
  const ManyReader reader(tile_expert, tile_row);
  const ManyPass<kExpertTiles> pass{s_storage, num_splits};
  ManyGroup<kExpertTiles> steps{copy, reader, s_storage, group, num_splits};
  for (int stage = 0; stage < Storage::kStages - 1; ++stage) steps.load_next();
  ManySums<kExpertTiles> sums;
  if (group > 0) {
    for (int split = group; split < num_splits; split += kManyGroups) {
      steps.add_split(sums);
      pass.send(sums, split);
    }
    return;
  }
  ManySums<kExpertTiles> totals;
  for (int split = 0; split < num_splits; split += kManyGroups) {
    steps.add_split(sums);
    if (split > 0) pass.take(totals, split - 1);
#pragma unroll
    for (int tile = 0; tile < kExpertTiles; ++tile) totals.add(sums.get(tile), tile);
  }
  if (num_splits % kManyGroups == 0) pass.take(totals, num_splits - 1);
#pragma unroll
  for (int tile = 0; tile < kExpertTiles; ++tile) {
    const int expert = expert_first + tile_expert + tile * 8;
    store_token_sums(call.splits, totals.tiles[tile], call, expert, row_first + tile_row);
  }
}

}
