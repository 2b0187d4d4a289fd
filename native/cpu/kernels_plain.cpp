#include "cpu/lane_attention.h"
#include "cpu/lane_gemm.h"
#include "cpu/lane_peak.h"
#include "cpu/lane_quantise.h"

namespace glint {

namespace {

struct PlainIsa {
  static constexpr int kLanes = 4;
  static constexpr int kFp8Vectors = 1;
  static constexpr int kBf16Vectors = 1;
  static constexpr int kTokens = 4;
  static constexpr int64_t kPanelBytes = 20 << 10;
  static constexpr float kFp8Factor = 1.0F;

  static Lanes<kLanes>::Floats multiply_add(Lanes<kLanes>::Floats left, Lanes<kLanes>::Floats right,
                                            Lanes<kLanes>::Floats sum) {
    return left * right + sum;
  }

  static Lanes<kLanes>::Floats broadcast(float value) { return Lanes<kLanes>::broadcast(value); }

  static float sum(Lanes<kLanes>::Floats values) { return (values[0] + values[1]) + (values[2] + values[3]); }

  static Lanes<kLanes>::Floats sum_rows(Lanes<kLanes>::Floats row0, Lanes<kLanes>::Floats row1,
                                        Lanes<kLanes>::Floats row2, Lanes<kLanes>::Floats row3) {
    return Lanes<kLanes>::Floats{sum(row0), sum(row1), sum(row2), sum(row3)};
  }

  static constexpr int direct_rows(int tokens) { return tokens <= 2 ? 4 : 2; }

  static Lanes<kLanes>::Floats load_bf16(const std::byte* source) {
    uint16_t halves[kLanes];
    std::memcpy(halves, source, sizeof(halves));
    Lanes<kLanes>::Floats values = {};
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = float_from_bf16(halves[lane]);
    return values;
  }

  static std::array<Lanes<kLanes>::Floats, kBf16Vectors> decode_bf16(const std::byte* source) {
    return {load_bf16(source)};
  }

  static std::array<Lanes<kLanes>::Floats, kFp8Vectors> decode_fp8(const std::byte* source) {
    const std::array<float, 256>& table = e4m3_table();
    Lanes<kLanes>::Floats values = {};
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = table[std::to_integer<uint8_t>(source[lane])];
    return {values};
  }
};

}

const KernelSet& plain_kernels() {
  static const KernelSet kernels{.name = "plain",
                                 .id = GLINT_KERNELS_PLAIN,
                                 .fp8_form = OperandForm::kFloat,
                                 .gemm_fp8 = LaneGemm<PlainIsa>::fp8,
                                 .gemm_floats = LaneGemm<PlainIsa>::floats,
                                 .attend = LaneAttention<PlainIsa>::attend,
                                 .swiglu = lane_swiglu<PlainIsa>,
                                 .quantise = LaneQuantise<PlainIsa>::to_floats,
                                 .rows = kRowKernels,
                                 .multiply_adds = lane_multiply_adds<PlainIsa>,
                                 .sums_groups = true};
  return kernels;
}

}
