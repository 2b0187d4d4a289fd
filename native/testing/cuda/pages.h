#pragma once

#include "cuda/kernels/attention/attention.h"
#include "testing/cases.h"
#include "testing/cuda/runner.h"

namespace glint::testing {

int64_t num_rows(const TestPages& pages);
inline int64_t query_width(const TestPages& pages) { return int64_t{pages.num_heads} * pages.head_dim; }
inline int64_t key_width(const TestPages& pages) { return int64_t{pages.num_kv_heads} * pages.head_dim; }
inline int64_t padded_dim(const TestPages& pages) { return cuda::padded_head_dim(pages.head_dim); }

class DevicePages {
 public:
  explicit DevicePages(const TestPages& test);

  cuda::KvPages pool() const;
  const DeviceBytes& keys() const { return keys_; }
  const DeviceBytes& values() const { return values_; }
  void download() const;

 private:
  uint16_t* host_layer(bool is_value) const;
  int64_t host_place(bool is_value, int64_t slab, int token, int dim) const;
  int64_t device_place(int64_t slab, int token, int dim) const;
  int64_t slab_count() const { return test_.num_pages * test_.num_kv_heads; }
  int64_t slab_bytes() const { return cuda::page_head_bytes(test_.head_dim, element_); }
  uint16_t read(const std::vector<uint8_t>& pages, int64_t place) const;
  void write(std::vector<uint8_t>& pages, int64_t place, uint16_t bits) const;
  std::vector<uint8_t> device_layer(bool is_value) const;
  void download_layer(bool is_value, const DeviceArray<uint8_t>& pages) const;

  const TestPages& test_;
  cuda::PageElement element_;
  DeviceArray<uint8_t> keys_;
  DeviceArray<uint8_t> values_;
};

}
