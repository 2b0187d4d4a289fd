#pragma once

#include <span>

#include "cuda/attention.h"
#include "model/ops.h"
#include "testing/cuda/runner.h"

namespace glint::testing {

struct TestPages {
  std::byte* data;
  int64_t num_pages;
  int64_t page_tokens;
  int64_t layer;
  int32_t dtype;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  int32_t request_count;
  const BatchRequest* requests;

  std::span<const BatchRequest> request_span() const { return {requests, static_cast<size_t>(request_count)}; }
  int64_t num_rows() const;
  int64_t query_width() const { return int64_t{num_heads} * head_dim; }
  int64_t key_width() const { return int64_t{num_kv_heads} * head_dim; }
  int64_t padded_dim() const { return cuda::padded_head_dim(head_dim); }
};

class DevicePages {
 public:
  explicit DevicePages(const TestPages& test);

  cuda::PagePool pool() const;
  const DeviceBytes& keys() const { return keys_; }
  const DeviceBytes& values() const { return values_; }
  void download() const;

 private:
  uint16_t* host_layer(bool is_value) const;
  int64_t host_place(bool is_value, int64_t slab, int token, int dim) const;
  int64_t device_place(int64_t slab, int token, int dim) const;
  int64_t slab_count() const { return test_.num_pages * test_.num_kv_heads; }
  int64_t slab_bytes() const { return cuda::kPageTokens * test_.padded_dim() * 2; }
  std::vector<uint16_t> swizzled(bool is_value) const;
  void download_layer(bool is_value, const DeviceArray<uint16_t>& pages) const;

  const TestPages& test_;
  DeviceArray<uint16_t> keys_;
  DeviceArray<uint16_t> values_;
};

}
