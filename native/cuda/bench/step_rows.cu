#include "base/fp8.h"
#include "cuda/bench/step_check.h"
#include "cuda/kernels/gemm/quantise.h"
#include "cuda/kernels/norm/rows.h"

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
            .fp8 = codes.data(),
            .scales = scales.data(),
            .fp8_stride = code_stride(),
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

std::vector<float> row_near_ties(RandomSource& random, int exponent, size_t width) {
  const auto highest = static_cast<float>(std::ldexp(1.0 + random.uniform(), exponent));
  const float scale = highest / kE4m3Max;
  std::vector<float> row(width, highest);
  for (size_t col = 1; col < width; ++col) {
    const auto code = static_cast<uint8_t>(random.below(126));
    const float tie = (float_from_e4m3(code) + float_from_e4m3(code + 1)) / 2.0F;
    float value = scale * tie;
    for (int64_t step = random.below(4); step > 0; --step) {
      value = std::nextafter(value, step % 2 == 0 ? 0.0F : highest);
    }
    row[col] = (col % 2 == 0 ? 1.0F : -1.0F) * std::min(value, highest);
  }
  row[1] = -0.0F;
  row[2] = std::numeric_limits<float>::denorm_min();
  return row;
}

void check_ties(Report& report) {
  constexpr size_t kWidth = 1536;
  RandomSource random(41);
  std::vector<float> in;
  for (int exponent = -140; exponent <= 126; exponent += 2) {
    const std::vector<float> row = row_near_ties(random, exponent, kWidth);
    in.insert(in.end(), row.begin(), row.end());
  }
  const size_t count = in.size() / kWidth;
  DeviceArray<float> device_in(in);
  DeviceArray<uint8_t> codes(in.size());
  DeviceArray<float> scales(count);
  const auto rows = static_cast<int64_t>(count);
  launch_quantise({codes.data(), scales.data(), device_in.data(), kWidth, rows, kWidth, 1, kWidth}, nullptr);
  const std::vector<uint8_t> host_codes = codes.download();
  const std::vector<float> host_scales = scales.download();
  int64_t wrong = 0;
  for (size_t row = 0; row < count; ++row) {
    wrong += wrong_codes(in.data() + row * kWidth, host_codes.data() + row * kWidth, host_scales[row], kWidth, kWidth);
  }
  report.check(wrong == 0 && codes.guard_is_whole(), text("quantise ", count, " rows close to ties"),
               text("wrong codes ", wrong));
}

void check_embed(Report& report, int64_t width) {
  constexpr int32_t kVocab = 1000;
  RandomSource random(9);
  std::vector<uint16_t> table(static_cast<size_t>(kVocab * width));
  for (uint16_t& value : table) value = bf16_from_float(random.normal());
  const std::vector<int32_t> tokens = {0, 999, 17, -1, 17, -3, 512, -2, -4};
  const std::vector<int32_t> sampled_tokens = {44, -7, 998, 100000};
  const std::vector<int32_t> wanted = {0, 999, 17, 44, 17, 998, 512, 0, 999};
  std::vector<SampleResult> results(sampled_tokens.size());
  for (size_t index = 0; index < results.size(); ++index) results[index].token = sampled_tokens[index];
  DeviceArray<uint16_t> device_table(table);
  DeviceArray<int32_t> device_tokens(tokens);
  DeviceArray<SampleResult> device_results(results);
  DeviceArray<float> out(tokens.size() * static_cast<size_t>(width));
  launch_embed({.hidden = out.data(),
                .table = device_table.data(),
                .tokens = device_tokens.data(),
                .count = static_cast<int64_t>(tokens.size()),
                .width = width,
                .sampled = device_results.data(),
                .vocab_size = kVocab},
               nullptr);
  const std::vector<float> values = out.download();
  bool is_same = true;
  for (size_t index = 0; index < values.size(); ++index) {
    const auto row = static_cast<size_t>(wanted[index / static_cast<size_t>(width)]);
    const size_t place = row * static_cast<size_t>(width) + index % static_cast<size_t>(width);
    is_same = is_same && values[index] == float_from_bf16(table[place]);
  }
  report.check(is_same && out.guard_is_whole(), text("embedding ", width, " wide, tokens given and sampled"));
}

void check_gather(Report& report, int64_t width) {
  constexpr int64_t kRows = 9;
  RandomSource random(13);
  const auto elements = static_cast<size_t>(kRows * width);
  const std::vector<float> in = random.normals(elements, 1.0F);
  const std::vector<float> update = random.normals(elements, 1.0F);
  const std::vector<int32_t> rows = {8, 0, 3, 3, 7};
  DeviceArray<float> device_in(in);
  DeviceArray<float> device_update(update);
  DeviceArray<int32_t> device_rows(rows);
  DeviceArray<float> plain(rows.size() * static_cast<size_t>(width));
  DeviceArray<float> added(plain.count());
  GatherCall call{.out = plain.data(),
                  .in = device_in.data(),
                  .rows = device_rows.data(),
                  .count = static_cast<int64_t>(rows.size()),
                  .width = width};
  launch_gather_rows(call, nullptr);
  call.out = added.data();
  call.update = device_update.data();
  launch_gather_rows(call, nullptr);
  launch_add_rows(device_in.data(), device_update.data(), static_cast<int64_t>(elements), nullptr);
  const std::vector<float> sums = device_in.download();
  const std::vector<float> plain_rows = plain.download();
  const std::vector<float> added_rows = added.download();
  int64_t wrong = 0;
  for (size_t index = 0; index < elements; ++index) wrong += sums[index] == in[index] + update[index] ? 0 : 1;
  for (size_t index = 0; index < plain_rows.size(); ++index) {
    const size_t row = index / static_cast<size_t>(width);
    const size_t place = static_cast<size_t>(rows[row] * width) + index % static_cast<size_t>(width);
    wrong += plain_rows[index] == in[place] && added_rows[index] == in[place] + update[place] ? 0 : 1;
  }
  report.check(wrong == 0 && plain.guard_is_whole() && added.guard_is_whole() && device_in.guard_is_whole(),
               text("rows added and gathered, ", width, " wide"), text(wrong, " wrong"));
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
  check_ties(report);
  for (const int64_t width : {5120, 1003}) {
    check_embed(report, width);
    check_gather(report, width);
  }
  for (const int64_t count : {1, 8, 64, 256, 4096}) time_norm(ceiling, count, 1);
}

}
