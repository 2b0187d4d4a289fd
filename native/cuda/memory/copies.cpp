#include "cuda/memory/copies.h"

#include <algorithm>

#include "base/contract.h"
#include "cuda/check.h"

namespace glint::cuda {

void Copies::add_range(const CopyRange& range) {
  constexpr int64_t kWordBytes = 4;
  if (range.bytes == 0) return;
  require_argument(call_.count < kMostCopies && range.bytes % kWordBytes == 0, "copy ", call_.count + 1, " of ",
                   range.bytes, " bytes: at most ", kMostCopies, " of whole words go together");
  call_.ranges[call_.count++] = range;
}

void Copies::send() const {
  if (call_.count == 0) return;
  const auto* end = call_.ranges + call_.count;
  if (std::all_of(call_.ranges, end, [](const CopyRange& range) { return range.bytes <= kKernelCopyBytes; })) {
    return launch_copies(call_, stream_);
  }
  for (const CopyRange* range = call_.ranges; range != end; ++range) {
    GLINT_CHECK_CUDA(
        cudaMemcpyAsync(range->target, range->source, static_cast<size_t>(range->bytes), cudaMemcpyDefault, stream_));
  }
}

}
