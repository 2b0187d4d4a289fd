#include "testing/cuda/pages.h"

#include "base/contract.h"

namespace glint::testing {

namespace {

constexpr uint16_t kPoisonBits = 0xffff;

const TestPages& checked(const TestPages& test) {
  require_argument(test.dtype == GLINT_DTYPE_BF16 && test.page_tokens == cuda::kPageTokens, "pages of dtype ",
                   test.dtype, " with ", test.page_tokens, " tokens: on CUDA they are BF16 and have ",
                   cuda::kPageTokens, " tokens");
  return test;
}

}

int64_t TestPages::num_rows() const {
  int64_t rows = 0;
  for (const BatchRequest& request : request_span()) rows += request.row_count;
  return rows;
}

DevicePages::DevicePages(const TestPages& test)
    : test_(checked(test)), keys_(swizzled(false)), values_(swizzled(true)) {}

cuda::PagePool DevicePages::pool() const {
  return {.keys = keys_.bytes(),
          .values = values_.bytes(),
          .page_bytes = test_.num_kv_heads * slab_bytes(),
          .head_bytes = slab_bytes()};
}

uint16_t* DevicePages::host_layer(bool is_value) const {
  const int64_t part = 2 * test_.layer + (is_value ? 1 : 0);
  return reinterpret_cast<uint16_t*>(test_.data) + part * slab_count() * cuda::kPageTokens * test_.head_dim;
}

int64_t DevicePages::host_place(bool is_value, int64_t slab, int token, int dim) const {
  const int64_t first = slab * cuda::kPageTokens * test_.head_dim;
  return first + (is_value ? int64_t{token} * test_.head_dim + dim : int64_t{dim} * cuda::kPageTokens + token);
}

int64_t DevicePages::device_place(int64_t slab, int token, int dim) const {
  return (slab * slab_bytes() + cuda::swizzled_offset(token, dim)) / 2;
}

std::vector<uint16_t> DevicePages::swizzled(bool is_value) const {
  const uint16_t* source = host_layer(is_value);
  std::vector<uint16_t> pages(static_cast<size_t>(slab_count() * slab_bytes() / 2));
  for (int64_t slab = 0; slab < slab_count(); ++slab) {
    for (int token = 0; token < cuda::kPageTokens; ++token) {
      const bool is_poisoned = source[host_place(is_value, slab, token, 0)] == kPoisonBits;
      for (int dim = 0; dim < test_.padded_dim(); ++dim) {
        const uint16_t padding = is_poisoned ? kPoisonBits : uint16_t{0};
        pages[static_cast<size_t>(device_place(slab, token, dim))] =
            dim < test_.head_dim ? source[host_place(is_value, slab, token, dim)] : padding;
      }
    }
  }
  return pages;
}

void DevicePages::download() const {
  download_layer(false, keys_);
  download_layer(true, values_);
}

void DevicePages::download_layer(bool is_value, const DeviceArray<uint16_t>& pages) const {
  const std::vector<uint16_t> bits = pages.to_host();
  uint16_t* target = host_layer(is_value);
  for (int64_t slab = 0; slab < slab_count(); ++slab) {
    for (int token = 0; token < cuda::kPageTokens; ++token) {
      const bool is_poisoned = bits[static_cast<size_t>(device_place(slab, token, 0))] == kPoisonBits;
      for (int dim = 0; dim < test_.padded_dim(); ++dim) {
        const uint16_t value = bits[static_cast<size_t>(device_place(slab, token, dim))];
        if (dim < test_.head_dim) target[host_place(is_value, slab, token, dim)] = value;
        require(dim < test_.head_dim || value == (is_poisoned ? kPoisonBits : 0), GLINT_STATUS_INTERNAL, "slab ",
                slab, ", token ", token, ": the padded dimension ", dim, " holds bits ", value, "; it must be 0");
      }
    }
  }
}

}
