#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/activations.h"
#include "cuda/device_memory.h"
#include "cuda/graphs.h"
#include "cuda/placement.h"
#include "cuda/staging.h"
#include "model/ops.h"

namespace glint {

struct DeviceFacts {
  std::string name;
  int32_t index;
  int32_t kernels;
  int32_t num_multiprocessors;
  uint64_t memory_total;
  uint64_t memory_free;
};

class Backend {
 public:
  Backend(const glint_model& model, const glint_engine_options& options, const ModelWeights& weights);
  ~Backend();
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  cuda::PagePool pages(int64_t layer) const;
  const cuda::PlacedLayer& layer(int64_t index) const { return weights.layers[static_cast<size_t>(index)]; }
  cuda::Operand operand(int64_t width) const;

  const glint_model model;
  const DeviceFacts device;
  const cuda::StepLimits limits;
  const int64_t num_pages;
  const cuda::DeviceMemory weight_memory;
  const cuda::PlacedWeights weights;
  const cuda::DeviceMemory page_memory;
  const cuda::DeviceMemory workspace_memory;
  cuda::Activations places;
  cuda::Staging staging;
  cuda::Graphs graphs;
  cudaStream_t stream = nullptr;

  int64_t num_rows = 0;
  int64_t num_decode_tasks = 0;
  int64_t num_prefill_tasks = 0;
  int32_t slot = 0;
  bool is_capturing = false;
  bool has_update = false;
  bool has_logits = false;
  bool samples_all_rows = false;
  std::atomic<uint64_t> experts_read = 0;
  std::atomic<uint64_t> steps_replayed = 0;
};

namespace cuda {

DeviceFacts find_device(int32_t requested_kernels);
DeviceFacts find_checked_device(const glint_model& model, const glint_engine_options& options);
StepLimits step_limits(const glint_model& model, const glint_engine_options& options, const DeviceFacts& device);
int64_t bytes_per_page(const glint_model& model);

}

}
