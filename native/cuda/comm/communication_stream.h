#pragma once

#include <cuda_runtime_api.h>

#include <array>

namespace glint::cuda {

enum class Arrival { kRows, kChoices };

class CommunicationStream {
 public:
  CommunicationStream();
  ~CommunicationStream();
  CommunicationStream(const CommunicationStream&) = delete;
  CommunicationStream& operator=(const CommunicationStream&) = delete;

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
