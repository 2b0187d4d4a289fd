#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace glint::cuda {

std::vector<int64_t> captured_sizes(int64_t max_items);

class Graphs {
 public:
  explicit Graphs(int64_t max_items) : sizes_(captured_sizes(max_items)) {}
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  bool is_complete() const { return captured_.size() == sizes_.size(); }
  int64_t next_size() const { return sizes_[captured_.size()]; }
  void add(cudaStream_t stream);
  int64_t padded_size(int64_t count) const;
  size_t index_of(int64_t count) const;
  void launch(int64_t count, cudaStream_t stream) const;

 private:
  std::vector<int64_t> sizes_;
  std::vector<cudaGraphExec_t> captured_;
};

}
