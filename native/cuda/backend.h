#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/memory/activations.h"
#include "cuda/memory/device_memory.h"
#include "cuda/comm/exchange.h"
#include "cuda/graphs.h"
#include "cuda/weights/placement.h"
#include "cuda/memory/staging.h"
#include "model/ops.h"
#include "model/slices.h"

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
  Backend(const RankSlice& the_slice, const glint_engine_options& options, const ModelWeights& whole, World& world);
  ~Backend();
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  cuda::KvPages pages(int64_t layer) const;
  cuda::KvPages widened_pages() const;
  const cuda::PlacedLayer& layer(int64_t index) const { return weights.layers[static_cast<size_t>(index)]; }
  cuda::Operand operand(int64_t width) const;
  cuda::Operand gated_operand(int64_t width) const;
  bool has_peers() const { return slice.num_ranks > 1; }
  bool emulates_ranks() const { return limits.num_ranks > slice.num_ranks; }
  uint64_t update_bytes() const;

  const RankSlice slice;
  const glint_model& model;
  const int32_t all_reduce;
  const DeviceFacts device;
  const cuda::StepLimits limits;
  const int64_t num_pages;
  const cuda::PageElement page_element;
  const cuda::DeviceMemory weight_memory;
  const cuda::PlacedWeights weights;
  const cuda::DeviceMemory page_memory;
  const cuda::DeviceMemory workspace_memory;
  cuda::Activations places;
  cuda::Staging staging;
  std::optional<cuda::Collectives> collectives;
  std::optional<cuda::PeerSum> peers;
  std::optional<cuda::SideStream> side;
  cuda::Graphs graphs;
  cudaStream_t stream = nullptr;

  int64_t num_rows = 0;
  int64_t num_decode_tasks = 0;
  int64_t num_prefill_tasks = 0;
  int64_t num_prefill_pages = 0;
  int32_t slot = 0;
  bool is_capturing = false;
  cuda::Exchange exchange = cuda::Exchange::kAlone;
  cuda::UpdateSource update_source = cuda::UpdateSource::kAttention;
  cuda::PendingUpdate pending;
  bool hidden_is_settled = false;
  bool has_logits = false;
  bool samples_all_rows = false;
  std::atomic<uint64_t> experts_read = 0;
  std::atomic<uint64_t> steps_replayed = 0;
  std::vector<cuda::CollectiveCounts> captured_counts;
};

namespace cuda {

DeviceFacts find_device(const glint_engine_options& options, int32_t rank);
StepLimits step_limits(const RankSlice& slice, const glint_engine_options& options, const DeviceFacts& device);
int64_t bytes_per_page(const glint_model& model, PageElement element);

}

}
