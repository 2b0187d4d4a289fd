#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/comm/collectives.h"

namespace glint::cuda {

std::vector<int64_t> captured_sizes(int64_t max_items);

class Capture {
 public:
  explicit Capture(cudaStream_t stream);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  cudaGraph_t end();

 private:
  cudaStream_t stream_;
};

class Graphs {
 public:
  explicit Graphs(int64_t max_items) : sizes_(captured_sizes(max_items)) { captured_.reserve(sizes_.size()); }
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  bool is_complete() const { return captured_.size() == sizes_.size(); }
  int64_t next_size() const { return sizes_[captured_.size()]; }
  void add(Capture& capture, const CollectiveCounts& counts, cudaStream_t stream);
  int64_t padded_size(int64_t count) const;
  const CollectiveCounts& counts_of(int64_t count) const { return counts_[index_of(count)]; }
  void launch(int64_t count, cudaStream_t stream) const;

 private:
  size_t index_of(int64_t count) const;

  std::vector<int64_t> sizes_;
  std::vector<cudaGraphExec_t> captured_;
  std::vector<CollectiveCounts> counts_;
};

}
