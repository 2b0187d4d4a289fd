#include "cuda/graphs.h"

#include <algorithm>
#include <utility>

#include "cuda/check.h"

namespace glint::cuda {

std::vector<int64_t> captured_sizes(int64_t max_items) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < max_items; size += size < 4 ? size : size < 16 ? 4 : size < 128 ? 8 : 32) {
    sizes.push_back(size);
  }
  sizes.push_back(max_items);
  return sizes;
}

Capture::Capture(cudaStream_t stream) : stream_(stream) {
  GLINT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

Capture::~Capture() {
  if (stream_ == nullptr) return;
  cudaGraph_t unfinished = nullptr;
  cudaStreamEndCapture(stream_, &unfinished);
  if (unfinished != nullptr) cudaGraphDestroy(unfinished);
  cudaGetLastError();
}

cudaGraph_t Capture::end() {
  cudaGraph_t graph = nullptr;
  GLINT_CHECK_CUDA(cudaStreamEndCapture(std::exchange(stream_, nullptr), &graph));
  return graph;
}

Graphs::~Graphs() {
  for (const cudaGraphExec_t graph : captured_) cudaGraphExecDestroy(graph);
}

void Graphs::add(Capture& capture, const CollectiveCounts& counts, cudaStream_t stream) {
  const cudaGraph_t graph = capture.end();
  cudaGraphExec_t captured = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&captured, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "cudaGraphInstantiate");
  captured_.push_back(captured);
  counts_.push_back(counts);
  GLINT_CHECK_CUDA(cudaGraphUpload(captured, stream));
}

int64_t Graphs::padded_size(int64_t count) const { return *std::ranges::lower_bound(sizes_, count); }

size_t Graphs::index_of(int64_t count) const {
  return static_cast<size_t>(std::ranges::lower_bound(sizes_, count) - sizes_.begin());
}

void Graphs::launch(int64_t count, cudaStream_t stream) const {
  GLINT_CHECK_CUDA(cudaGraphLaunch(captured_[index_of(count)], stream));
}

}
