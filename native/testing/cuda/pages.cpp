#include "testing/cuda/pages.h"

#include <cmath>
#include <cstring>

#include "base/contract.h"
#include "base/fp8.h"

namespace glint::testing {

namespace {

constexpr uint16_t kPoisonBits = 0xffff;
constexpr uint8_t kPoisonFp8 = 0xff;

const TestPages& checked(const TestPages& test) {
  require_argument(test.dtype == GLINT_DTYPE_BF16 && test.page_tokens == cuda::kPageTokens, "pages of dtype ",
                   test.dtype, " with ", test.page_tokens, " tokens: for CUDA give BF16 numbers, also of FP8, and ",
                   cuda::kPageTokens, " tokens");
  return test;
}

cuda::PageElement element_of(TestRounding rounding) {
  if (rounding == TestRounding::kFp8) return cuda::PageElement::kE4m3;
  return rounding == TestRounding::kRounded ? cuda::PageElement::kBf16OfE4m3 : cuda::PageElement::kBf16;
}

}

int64_t num_rows(const TestPages& pages) {
  int64_t rows = 0;
  for (const BatchRequest& request : pages.request_span()) rows += request.row_count;
  return rows;
}

DevicePages::DevicePages(const TestPages& test)
    : test_(checked(test)),
      element_(element_of(test.rounding)),
      keys_(device_layer(false)),
      values_(device_layer(true)) {}

cuda::KvPages DevicePages::pool() const {
  return {.keys = keys_.bytes(),
          .values = values_.bytes(),
          .page_bytes = test_.num_kv_heads * slab_bytes(),
          .head_bytes = slab_bytes(),
          .element = element_};
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
  const int offset = cuda::holds_fp8(element_) ? cuda::fp8_offset(static_cast<int>(padded_dim(test_)), token, dim)
                                               : cuda::swizzled_offset(token, dim);
  return slab * slab_bytes() + offset;
}

uint16_t DevicePages::read(const std::vector<uint8_t>& pages, int64_t place) const {
  const uint8_t* source = pages.data() + place;
  if (cuda::holds_fp8(element_)) {
    return *source == kPoisonFp8 ? kPoisonBits : bf16_from_float(float_from_e4m3(*source));
  }
  uint16_t bits = 0;
  std::memcpy(&bits, source, sizeof(bits));
  return bits;
}

void DevicePages::write(std::vector<uint8_t>& pages, int64_t place, uint16_t bits) const {
  uint8_t* target = pages.data() + place;
  if (cuda::holds_fp8(element_)) {
    *target = bits == kPoisonBits ? kPoisonFp8 : e4m3_from_float(float_from_bf16(bits));
  } else {
    std::memcpy(target, &bits, sizeof(bits));
  }
}

std::vector<uint8_t> DevicePages::device_layer(bool is_value) const {
  const uint16_t* source = host_layer(is_value);
  std::vector<uint8_t> pages(static_cast<size_t>(slab_count() * slab_bytes()));
  for (int64_t slab = 0; slab < slab_count(); ++slab) {
    for (int token = 0; token < cuda::kPageTokens; ++token) {
      const bool is_poisoned = source[host_place(is_value, slab, token, 0)] == kPoisonBits;
      for (int dim = 0; dim < padded_dim(test_); ++dim) {
        const uint16_t padding = is_poisoned ? kPoisonBits : uint16_t{0};
        write(pages, device_place(slab, token, dim),
              dim < test_.head_dim ? source[host_place(is_value, slab, token, dim)] : padding);
      }
    }
  }
  return pages;
}

void DevicePages::download() const {
  download_layer(false, keys_);
  download_layer(true, values_);
}

void DevicePages::download_layer(bool is_value, const DeviceArray<uint8_t>& pages) const {
  const std::vector<uint8_t> bytes = pages.to_host();
  uint16_t* target = host_layer(is_value);
  for (int64_t slab = 0; slab < slab_count(); ++slab) {
    for (int token = 0; token < cuda::kPageTokens; ++token) {
      const uint16_t first = read(bytes, device_place(slab, token, 0));
      const uint16_t padding = std::isnan(float_from_bf16(first)) ? first : uint16_t{0};
      for (int dim = 0; dim < padded_dim(test_); ++dim) {
        const uint16_t value = read(bytes, device_place(slab, token, dim));
        if (dim < test_.head_dim) target[host_place(is_value, slab, token, dim)] = value;
        require(dim < test_.head_dim || value == 0 || value == padding, GLINT_STATUS_INTERNAL, "slab ", slab,
                ", token ", token, ": the padded dimension ", dim, " holds bits ", value, "; it must be 0");
      }
    }
  }
}

}
