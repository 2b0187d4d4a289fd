#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace glint::cuda {

inline constexpr int32_t kMostCopies = 5;
inline constexpr int64_t kKernelCopyBytes = 80 * 1024;

struct CopyRange {
  void* target;
  const void* source;
  int64_t bytes;
};

enum class CopyDirection { kToDevice, kToHost };

struct CopyCall {
  CopyRange ranges[kMostCopies];
  int32_t count;
  CopyDirection direction;
};

void launch_copies(const CopyCall& call, cudaStream_t stream);

class Copies {
 public:
  Copies(CopyDirection direction, cudaStream_t stream)
      : call_{.ranges = {}, .count = 0, .direction = direction}, stream_(stream) {}

  template <typename T>
  void add(T* target, const T* source, int64_t count) {
    add_range({target, source, count * static_cast<int64_t>(sizeof(T))});
  }

  void send() const;

 private:
  void add_range(const CopyRange& range);

  CopyCall call_;
  cudaStream_t stream_;
};

}
