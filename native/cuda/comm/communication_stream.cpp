#include "cuda/comm/communication_stream.h"

#include "cuda/check.h"

namespace glint::cuda {

CommunicationStream::CommunicationStream() {
  try {
    GLINT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    GLINT_CHECK_CUDA(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming));
    for (cudaEvent_t& event : ended_) GLINT_CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  } catch (...) {
    release();
    throw;
  }
}

CommunicationStream::~CommunicationStream() { release(); }

void CommunicationStream::release() noexcept {
  for (const cudaEvent_t event : ended_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (begun_ != nullptr) cudaEventDestroy(begun_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

cudaStream_t CommunicationStream::begin_after(cudaStream_t main) {
  GLINT_CHECK_CUDA(cudaEventRecord(begun_, main));
  GLINT_CHECK_CUDA(cudaStreamWaitEvent(stream_, begun_, 0));
  return stream_;
}

void CommunicationStream::end_with(AsyncGather gather) {
  GLINT_CHECK_CUDA(cudaEventRecord(ended_[static_cast<size_t>(gather)], stream_));
}

void CommunicationStream::await(AsyncGather gather, cudaStream_t main) {
  GLINT_CHECK_CUDA(cudaStreamWaitEvent(main, ended_[static_cast<size_t>(gather)], 0));
}

}
