#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/weights/placement.h"
#include "model/weights.h"

namespace glint::cuda {

inline constexpr uint64_t kStageBytes = uint64_t{8} << 20U;

struct TensorName {
  int32_t role;
  int32_t part;
  int32_t layer;
  int32_t expert;
};

struct SourcePiece {
  TensorName name{};
  const std::byte* data = nullptr;
  uint64_t first_byte = 0;
  uint64_t byte_count = 0;
  uint64_t row_bytes = 0;
  uint64_t row_stride = 0;
  int64_t cols = 1;
  int32_t dtype = GLINT_DTYPE_F32;
  bool repeats_one_value = false;

  bool is_contiguous() const { return row_bytes == row_stride; }
  uint64_t span_bytes() const { return is_contiguous() ? byte_count : byte_count / row_bytes * row_stride; }
};

enum class TaskKind { kCopy, kPackRows, kPackPortable, kPackGateUp, kPackDown };

struct LoadTask {
  TaskKind kind = TaskKind::kCopy;
  uint8_t* target = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  GemmElement element = GemmElement::kE4m3;
  uint64_t byte_count = 0;
  std::vector<SourcePiece> pieces;
};

std::vector<LoadTask> plan_load_tasks(const PlacedWeights& placed, const glint_model& model, const ModelWeights& source,
                                      int32_t expert_first);
uint64_t total_task_bytes(const std::vector<LoadTask>& tasks);
uint8_t* staging_target(const LoadTask& task, uint8_t* g_stage);
void launch_pack_task(const LoadTask& task, const uint8_t* g_stage, cudaStream_t stream);

}
