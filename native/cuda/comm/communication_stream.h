#pragma once

#include <cuda_runtime_api.h>

#include <array>

namespace glint::cuda {

enum class AsyncGather { kRows, kExperts };

class CommunicationStream {
 public:
  CommunicationStream();
  ~CommunicationStream();
  CommunicationStream(const CommunicationStream&) = delete;
  CommunicationStream& operator=(const CommunicationStream&) = delete;

  cudaStream_t stream() const { return stream_; }
  cudaStream_t begin_after(cudaStream_t main);
  void end_with(AsyncGather gather);
  void await(AsyncGather gather, cudaStream_t main);

 private:
  static constexpr size_t kGathers = 2;

  void release() noexcept;

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begun_ = nullptr;
  std::array<cudaEvent_t, kGathers> ended_ = {};
};

}
