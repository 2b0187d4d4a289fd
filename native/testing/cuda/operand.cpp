#include "testing/cuda/operand.h"

#include <algorithm>
#include <cstring>

#include "base/contract.h"
#include "cuda/kernels/gemm/quantise.h"

namespace glint::testing {

namespace {

cuda::GemmElement element_of(bool has_fp8) { return has_fp8 ? cuda::GemmElement::kE4m3 : cuda::GemmElement::kBf16; }

int64_t bytes_of_slice(const TestOperand& source) {
  require_argument(source.has_fp8 != 0 || source.row_slices == 1, "BF16 rows are cut in ", source.row_slices,
                   " slices; give 1");
  return cuda::portable_row_bytes(source.width / source.row_slices, element_of(source.has_fp8 != 0));
}

}

Operand::Operand(const TestOperand& source)
    : has_fp8_(source.has_fp8 != 0),
      count_(source.count),
      width_(source.width),
      row_slices_(source.row_slices),
      slice_bytes_(bytes_of_slice(source)),
      in_(source.in, source.count * source.width),
      rows_(source.count * source.row_slices * slice_bytes_),
      scales_(source.count * source.row_slices) {}

void Operand::launch() const {
  if (has_fp8_) {
    cuda::launch_quantise({.fp8 = rows_.data(),
                           .scales = scales_.data(),
                           .in = in_.data(),
                           .in_stride = width_,
                           .count = count_,
                           .width = width_,
                           .row_slices = row_slices_,
                           .slice_stride = slice_bytes_},
                          nullptr);
    return;
  }
  cuda::launch_to_bf16({.out = rows_.data(),
                        .in = in_.data(),
                        .in_stride = width_,
                        .count = count_,
                        .width = width_,
                        .out_stride_bytes = slice_bytes_},
                       nullptr);
}

std::vector<float> Operand::values() const {
  if (has_fp8_) return fp8_values(rows_);
  const std::vector<uint8_t> bytes = rows_.to_host();
  std::vector<uint16_t> bits(bytes.size() / 2);
  std::memcpy(bits.data(), bytes.data(), bytes.size());
  std::vector<float> values(bits.size());
  std::ranges::transform(bits, values.begin(), float_from_bf16);
  return values;
}

std::vector<float> fp8_values(const DeviceArray<uint8_t>& fp8) {
  const std::vector<uint8_t> bytes = fp8.to_host();
  std::vector<float> values(bytes.size());
  std::ranges::transform(bytes, values.begin(), float_from_e4m3);
  return values;
}

}

extern "C" {

using glint::testing::Operand;
using glint::testing::Runner;
using glint::testing::TestOperand;

GLINT_API int64_t glint_testing_operand_stride(Runner*, int64_t width, int32_t row_slices, int32_t has_fp8) {
  const auto element = has_fp8 != 0 ? glint::cuda::GemmElement::kE4m3 : glint::cuda::GemmElement::kBf16;
  return row_slices * glint::cuda::portable_row_bytes(width / row_slices, element) / (has_fp8 != 0 ? 1 : 2);
}

GLINT_API int32_t glint_testing_prepare(Runner* runner, const TestOperand* source) {
  return glint::testing::guarded([&] {
    const Operand operand(*source);
    runner->run([&] { operand.launch(); }, {&operand.rows(), &operand.scales()});
    std::ranges::copy(operand.values(), source->out);
    if (source->has_fp8 != 0) operand.scales().download(source->scales);
  });
}
}
