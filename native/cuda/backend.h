#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "cuda/comm/collectives.h"
#include "cuda/comm/communication_stream.h"
#include "cuda/comm/peer_sum.h"
#include "cuda/device.h"
#include "cuda/graphs.h"
#include "cuda/memory/device_memory.h"
#include "cuda/memory/staging.h"
#include "cuda/memory/workspace.h"
#include "cuda/weights/placement.h"
#include "model/ops.h"
#include "model/slices.h"

namespace glint {

class World {
 public:
  explicit World(const glint_engine_options& options);

  cuda::RankGroup group;
};

class Backend {
 public:
  Backend(const RankSlice& the_slice, const glint_engine_options& options, const ModelWeights& whole, World& world);
  ~Backend();
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  cuda::KvPages pages(int64_t layer) const;
  cuda::KvPages widened_pages() const;
  float* page_states() const;
  const cuda::PlacedLayer& layer(int64_t index) const { return weights.layers[static_cast<size_t>(index)]; }
  cuda::Operand operand(int64_t width) const;
  cuda::Operand gated_operand(int64_t width) const;
  bool is_fp8() const { return cuda::weight_element(model) == cuda::GemmElement::kE4m3; }
  bool has_peers() const { return slice.num_ranks > 1; }
  bool emulates_ranks() const { return limits.num_ranks > slice.num_ranks; }
  uint64_t branch_output_bytes() const;
  void wait_for_stream();
  void wait_for_event(cudaEvent_t event);

  const RankSlice slice;
  const glint_model& model;
  const int32_t all_reduce;
  const cuda::DeviceProperties device;
  const cuda::StepLimits limits;
  const int64_t num_pages;
  const int64_t num_page_layers;
  const cuda::PageElement page_element;
  const cuda::DeviceMemory weight_memory;
  const cuda::PlacedWeights weights;
  const cuda::DeviceMemory page_memory;
  const cuda::DeviceMemory workspace_memory;
  cuda::Workspace workspace;
  cuda::Staging staging;
  std::optional<cuda::Collectives> collectives;
  std::optional<cuda::PeerSum> peers;
  std::optional<cuda::CommunicationStream> communication;
  cuda::Graphs graphs;
  std::optional<cuda::Graphs> verify_graphs;
  std::optional<cuda::Graphs> draft_graphs;
  cudaStream_t stream = nullptr;

  std::atomic<uint64_t> experts_read = 0;
  std::atomic<uint64_t> steps_replayed = 0;
};

}
