#include "cuda/bench/step_pages.h"

namespace glint::cuda::bench {

namespace {

constexpr int kHeads = 12;
constexpr int kDims = 128;
constexpr int kRotary = 64;
constexpr int kWidth = (kHeads + 2) * kDims;
constexpr double kTheta = 1e6;
constexpr float kEpsilon = 1e-5F;

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

struct RotateSet {
  RotateSet(int64_t rows, uint64_t seed)
      : count(rows),
        random(seed),
        host_in(random.normals(as_size(count * kWidth), 2.0F)),
        host_query_norm(random.normals(kDims, 1.0F)),
        host_key_norm(random.normals(kDims, 1.0F)),
        host_positions(as_size(count)),
        host_slots(as_size(count)),
        in(host_in),
        query_norm(host_query_norm),
        key_norm(host_key_norm),
        cosines(as_size(count * kRotary / 2)),
        sines(as_size(count * kRotary / 2)),
        positions(as_size(count)),
        slots(as_size(count)),
        keys(as_size((count / kPageTokens + 2) * kPageTokens * kDims)),
        values(keys.count()),
        query(as_size(count * kHeads * kDims)) {
    const auto num_slots = static_cast<int32_t>(keys.count() / kDims);
    for (int64_t row = 0; row < count; ++row) {
      host_positions[as_size(row)] = static_cast<int32_t>(random.below(200000));
      host_slots[as_size(row)] = static_cast<int32_t>((row * 1000003 + 3) % num_slots);
    }
    positions.upload(host_positions);
    slots.upload(host_slots);
  }

  RotaryTableCall table_call() const {
    return {cosines.data(), sines.data(), positions.data(), count, kRotary, kTheta};
  }
  RotateCall call() const {
    return {.query_out = query.data(),
            .pages = {reinterpret_cast<std::byte*>(keys.data()), reinterpret_cast<std::byte*>(values.data()),
                      kPageTokens * kDims * 2, kPageTokens * kDims * 2},
            .query = in.data(),
            .key = in.data() + kHeads * kDims,
            .value = in.data() + (kHeads + 1) * kDims,
            .query_stride = kWidth,
            .key_stride = kWidth,
            .query_norm = query_norm.data(),
            .key_norm = key_norm.data(),
            .cosines = cosines.data(),
            .sines = sines.data(),
            .slots = slots.data(),
            .count = count,
            .num_heads = kHeads,
            .num_kv_heads = 1,
            .head_dim = kDims,
            .rotary_dim = kRotary,
            .epsilon = kEpsilon};
  }

  int64_t count;
  RandomSource random;
  std::vector<float> host_in;
  std::vector<float> host_query_norm;
  std::vector<float> host_key_norm;
  std::vector<int32_t> host_positions;
  std::vector<int32_t> host_slots;
  DeviceArray<float> in;
  DeviceArray<float> query_norm;
  DeviceArray<float> key_norm;
  DeviceArray<float> cosines;
  DeviceArray<float> sines;
  DeviceArray<int32_t> positions;
  DeviceArray<int32_t> slots;
  DeviceArray<uint16_t> keys;
  DeviceArray<uint16_t> values;
  DeviceArray<uint16_t> query;
};

std::vector<uint16_t> wanted_head(const RotateSet& set, int64_t row, int head, const std::vector<float>& norm) {
  const float* in = set.host_in.data() + row * kWidth + head * kDims;
  double sum = 0;
  for (int dim = 0; dim < kDims; ++dim) sum += static_cast<double>(in[dim]) * static_cast<double>(in[dim]);
  const double factor = 1.0 / std::sqrt(sum / kDims + static_cast<double>(kEpsilon));
  std::vector<double> values;
  for (int dim = 0; dim < kDims; ++dim) {
    values.push_back(static_cast<double>(
        static_cast<float>(static_cast<double>(norm[as_size(dim)]) * static_cast<double>(in[dim]) * factor)));
  }
  const std::vector<double> before = values;
  for (int dim = 0; dim < kRotary / 2; ++dim) {
    const double angle = set.host_positions[as_size(row)] * std::pow(kTheta, -2.0 * dim / kRotary);
    const auto cosine = static_cast<double>(static_cast<float>(std::cos(angle)));
    const auto sine = static_cast<double>(static_cast<float>(std::sin(angle)));
    const auto high = as_size(dim + kRotary / 2);
    values[as_size(dim)] = before[as_size(dim)] * cosine - before[high] * sine;
    values[high] = before[high] * cosine + before[as_size(dim)] * sine;
  }
  std::vector<uint16_t> rounded;
  for (const double value : values) rounded.push_back(bf16_from_float(static_cast<float>(value)));
  return rounded;
}

struct Mismatch {
  int64_t checked = 0;
  int64_t flips = 0;
  int64_t wrong = 0;

  void add(uint16_t out, uint16_t wanted) {
    ++checked;
    flips += out != wanted ? 1 : 0;
    const float gap = std::fabs(float_from_bf16(out) - float_from_bf16(wanted));
    wrong += gap <= 0.01F * std::fabs(float_from_bf16(wanted)) + 1e-6F ? 0 : 1;
  }
};

void check_rotate(Report& report, int64_t count) {
  RotateSet set(count, 31);
  launch_rotary_table(set.table_call(), nullptr);
  launch_rotate_and_store(set.call(), nullptr);
  const std::vector<uint16_t> query = set.query.download();
  const std::vector<uint16_t> keys = set.keys.download();
  const std::vector<uint16_t> values = set.values.download();
  Mismatch mismatch;
  int64_t written = 0;
  for (int64_t row = 0; row < count; ++row) {
    for (int head = 0; head <= kHeads; ++head) {
      const std::vector<uint16_t> wanted =
          wanted_head(set, row, head, head < kHeads ? set.host_query_norm : set.host_key_norm);
      const int64_t slot = set.host_slots[as_size(row)];
      for (int dim = 0; dim < kDims; ++dim) {
        const int64_t page_first = slot / kPageTokens * kPageTokens * kDims;
        const int64_t place = page_first + swizzled_offset(static_cast<int>(slot % kPageTokens), dim) / 2;
        const float value = set.host_in[as_size(row * kWidth + (kHeads + 1) * kDims + dim)];
        mismatch.add(head < kHeads ? query[as_size((row * kHeads + head) * kDims + dim)] : keys[as_size(place)],
                     wanted[as_size(dim)]);
        if (head == kHeads) mismatch.add(values[as_size(place)], bf16_from_float(value));
      }
    }
  }
  for (const uint16_t key : keys) written += key != 0xffff ? 1 : 0;
  report.check(mismatch.wrong == 0 && mismatch.flips * 1000 < mismatch.checked && written == count * kDims &&
                   set.keys.guard_is_whole() && set.query.guard_is_whole(),
               text("q/k norm, rotary, page write, ", count, " rows"),
               text(mismatch.flips, " of ", mismatch.checked, " round the other way, ", mismatch.wrong, " wrong"));
}

void time_rotate(const Ceiling& ceiling, int64_t count) {
  constexpr int kSets = 4;
  std::vector<std::unique_ptr<RotateSet>> sets;
  for (int set = 0; set < kSets; ++set) {
    sets.push_back(std::make_unique<RotateSet>(count, as_size(set)));
    launch_rotary_table(sets.back()->table_call(), nullptr);
  }
  const double seconds = median_seconds(
      [&](int set, cudaStream_t stream) { launch_rotate_and_store(sets[as_size(set)]->call(), stream); }, kSets);
  print_time(text("q/k norm, rotary, page write, ", count, " rows"), seconds,
             {.bytes = static_cast<double>(count) * kWidth * 6}, ceiling);
}

}

void run_rotate(Report& report, const Ceiling& ceiling) {
  check_rotate(report, 1);
  check_rotate(report, 333);
  check_rotate(report, 600);
  for (const int64_t count : {1, 64, 4096}) time_rotate(ceiling, count);
}

}
