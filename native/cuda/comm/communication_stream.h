#pragma once

#include <cuda_runtime_api.h>

#include <array>

namespace glint::cuda {

enum class Arrival { kRows, kChoices };

class SideStream {
 public:
  SideStream();
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  cudaStream_t stream() const { return stream_; }
  cudaStream_t begin_after(cudaStream_t main);
  void end_with(Arrival arrival);
  void await(Arrival arrival, cudaStream_t main);

 private:
  static constexpr size_t kArrivals = 2;

  void release() noexcept;

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr;
  std::array<cudaEvent_t, kArrivals> ended_ = {};
};

}
