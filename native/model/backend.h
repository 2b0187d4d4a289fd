#pragma once

#include <cstdint>
#include <memory>

namespace glint {

inline constexpr int64_t kSplitPositions = 1024;

struct BackendOptions {
  int num_threads;
  int32_t kernels;
  int64_t max_product_calls;
  int64_t max_step_items;
  int32_t vocab_size;
  int64_t max_cols;
  int64_t group_heads;
  int64_t head_dim;
  int64_t page_tokens;
};

class Backend;

struct BackendDeleter {
  void operator()(Backend* backend) const;
};

using BackendOwner = std::unique_ptr<Backend, BackendDeleter>;

BackendOwner make_backend(const BackendOptions& options);
const char* backend_name();
int32_t backend_kernels(const Backend& backend);
uint64_t backend_bytes(const Backend& backend);

}
