#include "base/fp8.h"
#include "cuda/bench/step_check.h"
#include "cuda/quantise.h"
#include "cuda/rows.h"

namespace glint::cuda::bench {

namespace {

constexpr float kEpsilon = 1e-5F;

struct NormSet {
  NormSet(int64_t rows, int64_t row_width, int num_parts_given, uint64_t seed)
      : count(rows),
        width(row_width),
        num_parts(num_parts_given),
        random(seed),
        host_hidden(random.normals(static_cast<size_t>(count * width), 3.0F)),
        host_parts(random.normals(static_cast<size_t>(std::max(1, num_parts) * count * width), 1.0F)),
        host_weight(random.normals(static_cast<size_t>(width), 1.0F)),
        hidden(host_hidden),
        parts(host_parts),
        weight(host_weight),
        normed(host_hidden.size()),
        codes(static_cast<size_t>(count * code_stride())),
        scales(static_cast<size_t>(count)) {}

  int64_t code_stride() const { return (width + 15) / 16 * 16; }
  NormCall call() const {
    return {.hidden = hidden.data(),
            .normed = normed.data(),
            .codes = codes.data(),
            .scales = scales.data(),
            .code_stride = code_stride(),
            .parts = parts.data(),
            .part_stride = count * width,
            .num_parts = num_parts,
            .weight = weight.data(),
            .count = count,
            .width = width,
            .epsilon = kEpsilon};
  }

  int64_t count;
  int64_t width;
  int num_parts;
  RandomSource random;
  std::vector<float> host_hidden;
  std::vector<float> host_parts;
  std::vector<float> host_weight;
  DeviceArray<float> hidden;
  DeviceArray<float> parts;
  DeviceArray<float> weight;
  DeviceArray<float> normed;
  DeviceArray<uint8_t> codes;
  DeviceArray<float> scales;
};

float joined(const NormSet& set, int64_t index) {
  std::vector<float> parts;
  for (int part = 0; part < set.num_parts; ++part) {
    parts.push_back(set.host_parts[static_cast<size_t>(part * set.count * set.width + index)]);
  }
  for (size_t width = 1; width < parts.size(); width *= 2) {
    for (size_t part = 0; part + width < parts.size(); part += 2 * width) parts[part] += parts[part + width];
  }
  const float before = set.host_hidden[static_cast<size_t>(index)];
  return parts.empty() ? before : before + parts[0];
}

std::vector<double> wanted_norm(const NormSet& set) {
  std::vector<double> wanted(set.host_hidden.size());
  for (int64_t row = 0; row < set.count; ++row) {
    double sum = 0;
    for (int64_t col = 0; col < set.width; ++col) {
      sum += std::pow(static_cast<double>(joined(set, row * set.width + col)), 2);
    }
    const double factor = 1.0 / std::sqrt(sum / static_cast<double>(set.width) + static_cast<double>(kEpsilon));
    for (int64_t col = 0; col < set.width; ++col) {
      const auto index = static_cast<size_t>(row * set.width + col);
      wanted[index] = static_cast<double>(set.host_weight[static_cast<size_t>(col)]) *
                      static_cast<double>(joined(set, static_cast<int64_t>(index))) * factor;
    }
  }
  return wanted;
}

int64_t wrong_codes(const float* values, const uint8_t* codes, float scale, int64_t width, int64_t stride) {
  float highest = 0.0F;
  for (int64_t col = 0; col < width; ++col) highest = std::max(highest, std::fabs(values[col]));
  const float wanted = highest / kE4m3Max == 0.0F ? 1.0F : highest / kE4m3Max;
  int64_t wrong = wanted == scale ? 0 : 1;
  for (int64_t col = 0; col < width; ++col) wrong += codes[col] == e4m3_from_float(values[col] / wanted) ? 0 : 1;
  for (int64_t col = width; col < stride; ++col) wrong += codes[col] == 0 ? 0 : 1;
  return wrong;
}

void check_norm(Report& report, int64_t count, int64_t width, int num_parts) {
  NormSet set(count, width, num_parts, static_cast<uint64_t>(width + num_parts));
  launch_norm(set.call(), nullptr);
  const std::vector<float> normed = set.normed.download();
  const std::vector<uint8_t> codes = set.codes.download();
  const std::vector<float> scales = set.scales.download();
  const std::vector<float> hidden = set.hidden.download();
  int64_t wrong_sums = 0;
  int64_t wrong = 0;
  for (size_t index = 0; index < hidden.size(); ++index) {
    wrong_sums += hidden[index] == joined(set, static_cast<int64_t>(index)) ? 0 : 1;
  }
  for (int64_t row = 0; row < count; ++row) {
    wrong += wrong_codes(normed.data() + row * width, codes.data() + row * set.code_stride(),
                         scales[static_cast<size_t>(row)], width, set.code_stride());
  }
  const double error = relative_error(normed, wanted_norm(set));
  const bool is_kept = set.normed.guard_is_whole() && set.codes.guard_is_whole() && set.hidden.guard_is_whole();
  report.check(error < 3e-7 && wrong == 0 && wrong_sums == 0 && is_kept,
               text("norm ", count, "x", width, " parts ", num_parts),
               text("error ", error, ", wrong codes ", wrong, ", wrong sums ", wrong_sums));
}

void check_norm_alone(Report& report) {
  NormSet set(64, 5120, 0, 5);
  const NormCall call = set.call();
  launch_norm(call, nullptr);
  const std::vector<float> whole = set.normed.download();
  const std::vector<uint8_t> codes = set.codes.download();
  bool is_same = true;
  for (int64_t row = 0; row < set.count; row += 21) {
    NormCall alone = call;
    alone.hidden += row * set.width;
    alone.count = 1;
    launch_norm(alone, nullptr);
    is_same = is_same && std::memcmp(set.normed.download().data(), whole.data() + row * set.width, 5120 * 4) == 0 &&
              std::memcmp(set.codes.download().data(), codes.data() + row * 5120, 5120) == 0;
  }
  report.check(is_same, "norm: a row alone = in a batch of 64");
  report.check(is_repeatable([&](cudaStream_t stream) { launch_norm(call, stream); }, set.codes.data(),
                             set.codes.bytes(), 1000),
               "norm: 1,000 runs give the same bits");
}

void check_swiglu(Report& report, int64_t count, int64_t width, int row_slices) {
  RandomSource random(static_cast<uint64_t>(width));
  const std::vector<float> gate = random.normals(static_cast<size_t>(count * width), 4.0F);
  const std::vector<float> up = random.normals(static_cast<size_t>(count * width), 1.0F);
  DeviceArray<float> device_gate(gate);
  DeviceArray<float> device_up(up);
  const int64_t slice = width / row_slices;
  const int64_t stride = (slice + 15) / 16 * 16;
  DeviceArray<float> out(gate.size());
  DeviceArray<uint8_t> codes(static_cast<size_t>(count * row_slices * stride));
  DeviceArray<float> scales(static_cast<size_t>(count * row_slices));
  launch_swiglu({out.data(), codes.data(), scales.data(), device_gate.data(), device_up.data(), width, count, width,
                 row_slices, stride},
                nullptr);
  const std::vector<float> values = out.download();
  const std::vector<uint8_t> host_codes = codes.download();
  const std::vector<float> host_scales = scales.download();
  std::vector<double> wanted(gate.size());
  for (size_t index = 0; index < wanted.size(); ++index) {
    const auto g = static_cast<double>(gate[index]);
    wanted[index] = g / (1.0 + std::exp(-g)) * static_cast<double>(up[index]);
  }
  int64_t wrong = 0;
  for (int64_t row = 0; row < count; ++row) {
    for (int part = 0; part < row_slices; ++part) {
      wrong += wrong_codes(values.data() + row * width + part * slice,
                           host_codes.data() + (row * row_slices + part) * stride,
                           host_scales[static_cast<size_t>(part * count + row)], slice, stride);
    }
  }
  DeviceArray<uint8_t> again(codes.count());
  launch_quantise({again.data(), scales.data(), out.data(), width, count, width, row_slices, stride}, nullptr);
  const double error = relative_error(values, wanted);
  report.check(error < 3e-7 && wrong == 0 && same_bits(again.download(), host_codes) && codes.guard_is_whole(),
               text("swiglu and quantise ", count, "x", width, " slices ", row_slices),
               text("error ", error, ", wrong codes ", wrong));
}

void check_embed(Report& report) {
  constexpr int64_t kVocab = 1000;
  constexpr int64_t kWidth = 5120;
  RandomSource random(9);
  std::vector<uint16_t> table(kVocab * kWidth);
  for (uint16_t& value : table) value = bf16_from_float(random.normal());
  const std::vector<int32_t> tokens = {0, 999, 17, 17, 512};
  DeviceArray<uint16_t> device_table(table);
  DeviceArray<int32_t> device_tokens(tokens);
  DeviceArray<float> out(tokens.size() * kWidth);
  launch_embed({out.data(), device_table.data(), device_tokens.data(), static_cast<int64_t>(tokens.size()), kWidth},
               nullptr);
  const std::vector<float> values = out.download();
  bool is_same = true;
  for (size_t index = 0; index < values.size(); ++index) {
    const auto row = static_cast<size_t>(tokens[index / kWidth]);
    is_same = is_same && values[index] == float_from_bf16(table[row * kWidth + index % kWidth]);
  }
  report.check(is_same && out.guard_is_whole(), "embedding");
}

void time_norm(const Ceiling& ceiling, int64_t count, int num_parts) {
  constexpr int kSets = 4;
  std::vector<std::unique_ptr<NormSet>> sets;
  for (int index = 0; index < kSets; ++index) {
    sets.push_back(std::make_unique<NormSet>(count, 5120, num_parts, 1 + index));
  }
  const double seconds = median_seconds(
      [&](int set, cudaStream_t stream) {
        NormCall call = sets[static_cast<size_t>(set)]->call();
        call.normed = nullptr;
        launch_norm(call, stream);
      },
      kSets);
  const double floats = static_cast<double>(count) * 5120;
  print_time(text("add + norm + quantise ", count, "x5120 parts ", num_parts), seconds,
             {.bytes = floats * (4 + (num_parts > 0 ? 4 + 4 * num_parts : 0) + 1)}, ceiling);
}

}

void run_rows(Report& report, const Ceiling& ceiling) {
  for (const int parts : {0, 1, 2, 8}) check_norm(report, 7, 5120, parts);
  check_norm(report, 3, 1001, 1);
  check_norm(report, 2, 8192, 0);
  check_norm(report, 5, 576, 1);
  check_norm_alone(report);
  check_swiglu(report, 9, 1536, 1);
  check_swiglu(report, 3, 12288, 8);
  check_swiglu(report, 2, 12288, 1);
  check_swiglu(report, 5, 190, 1);
  check_embed(report);
  for (const int64_t count : {1, 64, 256, 4096}) time_norm(ceiling, count, 1);
}

}
