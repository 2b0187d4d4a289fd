#include "cuda/bench/step_pages.h"

namespace glint::cuda::bench {

namespace {

constexpr double kTheta = 1e6;
constexpr float kEpsilon = 1e-5F;
constexpr int64_t kSpoiledRow = 7;

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

struct RotateShape {
  Heads heads;
  int32_t rotary_dim = 64;
  bool has_norm = true;

  int64_t key_first() const { return int64_t{heads.num_heads} * heads.head_dim; }
  int64_t value_first() const { return key_first() + int64_t{heads.num_kv_heads} * heads.head_dim; }
  int64_t width() const { return value_first() + int64_t{heads.num_kv_heads} * heads.head_dim; }
};

std::vector<float> spoiled_inputs(std::vector<float> rows, int64_t width) {
  const size_t end = as_size((kSpoiledRow + 1) * width);
  if (rows.size() >= end) rows[end - 1] = std::numeric_limits<float>::max();
  return rows;
}

struct RotateSet {
  RotateSet(const RotateShape& shape_given, int64_t rows, uint64_t seed)
      : shape(shape_given),
        count(rows),
        random(seed),
        host_in(spoiled_inputs(random.normals(as_size(count * shape.width()), 2.0F), shape.width())),
        host_query_norm(random.normals(as_size(shape.heads.head_dim), 1.0F)),
        host_key_norm(random.normals(as_size(shape.heads.head_dim), 1.0F)),
        host_positions(as_size(count)),
        host_slots(as_size(count)),
        in(host_in),
        query_norm(host_query_norm),
        key_norm(host_key_norm),
        cosines(as_size(count * shape.rotary_dim / 2)),
        sines(as_size(count * shape.rotary_dim / 2)),
        positions(as_size(count)),
        slots(as_size(count)),
        keys(as_size((count / kPageTokens + 2) * shape.heads.page_bytes() / 2)),
        values(keys.count()),
        query(as_size(count * shape.heads.num_heads * shape.heads.padded_dim())) {
    const int64_t num_slots = (count / kPageTokens + 2) * kPageTokens;
    for (int64_t row = 0; row < count; ++row) {
      host_positions[as_size(row)] = static_cast<int32_t>(random.below(200000));
      host_slots[as_size(row)] = static_cast<int32_t>((row * 1000003 + 3) % num_slots);
    }
    positions.upload(host_positions);
    slots.upload(host_slots);
  }

  RotaryTableCall table_call() const {
    return {cosines.data(), sines.data(), positions.data(), count, shape.rotary_dim, kTheta};
  }
  RopeCall call() const {
    return {.query_out = query.data(),
            .pages = {reinterpret_cast<std::byte*>(keys.data()), reinterpret_cast<std::byte*>(values.data()),
                      shape.heads.page_bytes(), shape.heads.slab_bytes()},
            .query = in.data(),
            .key = in.data() + shape.key_first(),
            .value = in.data() + shape.value_first(),
            .query_stride = shape.width(),
            .key_stride = shape.width(),
            .query_norm = shape.has_norm ? query_norm.data() : nullptr,
            .key_norm = shape.has_norm ? key_norm.data() : nullptr,
            .cosines = cosines.data(),
            .sines = sines.data(),
            .slots = slots.data(),
            .count = count,
            .num_heads = shape.heads.num_heads,
            .num_kv_heads = shape.heads.num_kv_heads,
            .head_dim = shape.heads.head_dim,
            .rotary_dim = shape.rotary_dim,
            .epsilon = kEpsilon};
  }

  RotateShape shape;
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

std::vector<double> wanted_norm(const float* in, const std::vector<float>& norm) {
  double sum = 0;
  for (size_t dim = 0; dim < norm.size(); ++dim) sum += static_cast<double>(in[dim]) * static_cast<double>(in[dim]);
  const double factor = 1.0 / std::sqrt(sum / static_cast<double>(norm.size()) + static_cast<double>(kEpsilon));
  std::vector<double> values;
  for (size_t dim = 0; dim < norm.size(); ++dim) {
    const double value = static_cast<double>(norm[dim]) * static_cast<double>(in[dim]) * factor;
    values.push_back(static_cast<double>(static_cast<float>(value)));
  }
  return values;
}

std::vector<uint16_t> wanted_head(const RotateSet& set, int64_t row, int64_t first, const std::vector<float>& norm) {
  const float* in = set.host_in.data() + row * set.shape.width() + first;
  const int rotary = set.shape.rotary_dim;
  std::vector<double> values(in, in + set.shape.heads.head_dim);
  if (set.shape.has_norm) values = wanted_norm(in, norm);
  const std::vector<double> before = values;
  for (int dim = 0; dim < rotary / 2; ++dim) {
    const double angle = set.host_positions[as_size(row)] * std::pow(kTheta, -2.0 * dim / rotary);
    const auto cosine = static_cast<double>(static_cast<float>(std::cos(angle)));
    const auto sine = static_cast<double>(static_cast<float>(std::sin(angle)));
    const auto high = as_size(dim + rotary / 2);
    values[as_size(dim)] = before[as_size(dim)] * cosine - before[high] * sine;
    values[high] = before[high] * cosine + before[as_size(dim)] * sine;
  }
  std::vector<uint16_t> rounded(as_size(set.shape.heads.padded_dim()), 0);
  for (size_t dim = 0; dim < values.size(); ++dim) rounded[dim] = bf16_from_float(static_cast<float>(values[dim]));
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

void check_query(Mismatch& mismatch, const RotateSet& set) {
  const Heads& heads = set.shape.heads;
  const std::vector<uint16_t> query = set.query.download();
  for (int64_t row = 0; row < set.count; ++row) {
    for (int64_t head = 0; head < heads.num_heads; ++head) {
      const std::vector<uint16_t> wanted = wanted_head(set, row, head * heads.head_dim, set.host_query_norm);
      const int64_t first = (row * heads.num_heads + head) * heads.padded_dim();
      for (size_t dim = 0; dim < wanted.size(); ++dim) mismatch.add(query[as_size(first) + dim], wanted[dim]);
    }
  }
}

int64_t check_pages(Mismatch& mismatch, const RotateSet& set) {
  const Heads& heads = set.shape.heads;
  const std::vector<uint16_t> keys = set.keys.download();
  const std::vector<uint16_t> values = set.values.download();
  int64_t unaccounted = std::ranges::count_if(keys, [](uint16_t key) { return key != 0xffff; });
  for (int64_t row = 0; row < set.count; ++row) {
    const int64_t slot = set.host_slots[as_size(row)];
    for (int64_t kv_head = 0; kv_head < heads.num_kv_heads; ++kv_head) {
      const std::vector<uint16_t> wanted =
          wanted_head(set, row, set.shape.key_first() + kv_head * heads.head_dim, set.host_key_norm);
      const bool is_spoiled = row == kSpoiledRow && kv_head == heads.num_kv_heads - 1;
      const float* value = set.host_in.data() + row * set.shape.width() + set.shape.value_first() +
                           kv_head * heads.head_dim;
      const int64_t slab = slot / kPageTokens * heads.page_bytes() + kv_head * heads.slab_bytes();
      for (int dim = 0; dim < heads.padded_dim(); ++dim) {
        const size_t place = as_size(slab + swizzled_offset(static_cast<int>(slot % kPageTokens), dim)) / 2;
        --unaccounted;
        if (is_spoiled) {
          mismatch.wrong += std::isnan(float_from_bf16(keys[place])) && values[place] == 0 ? 0 : 1;
          continue;
        }
        mismatch.add(keys[place], wanted[as_size(dim)]);
        mismatch.add(values[place], dim < heads.head_dim ? bf16_from_float(value[dim]) : uint16_t{0});
      }
    }
  }
  return unaccounted;
}

void check_rotate(Report& report, const RotateShape& shape, int64_t count) {
  const RotateSet set(shape, count, 31);
  launch_rotary_table(set.table_call(), nullptr);
  launch_rope_and_cache(set.call(), nullptr);
  Mismatch mismatch;
  check_query(mismatch, set);
  const int64_t unaccounted = check_pages(mismatch, set);
  const int64_t allowed_flips = mismatch.checked / 1000;
  report.check(mismatch.wrong == 0 && mismatch.flips <= allowed_flips && unaccounted == 0 &&
                   set.keys.guard_is_whole() && set.values.guard_is_whole() && set.query.guard_is_whole(),
               text(shape.has_norm ? "q/k norm, " : "", "rotary ", shape.rotary_dim, ", page write, ", count,
                    " rows of ", shape.heads.num_heads, " heads over ", shape.heads.num_kv_heads, " of ",
                    shape.heads.head_dim),
               text(mismatch.flips, " of ", mismatch.checked, " round the other way, ", mismatch.wrong, " wrong"));
}

void time_rotate(const Ceiling& ceiling, int64_t count) {
  constexpr int kSets = 4;
  std::vector<std::unique_ptr<RotateSet>> sets;
  for (int set = 0; set < kSets; ++set) {
    sets.push_back(std::make_unique<RotateSet>(RotateShape{}, count, as_size(set)));
    launch_rotary_table(sets.back()->table_call(), nullptr);
  }
  const double seconds = median_seconds(
      [&](int set, cudaStream_t stream) { launch_rope_and_cache(sets[as_size(set)]->call(), stream); }, kSets);
  print_time(text("q/k norm, rotary, page write, ", count, " rows"), seconds,
             {.bytes = static_cast<double>(count * RotateShape{}.width()) * 6}, ceiling);
}

}

void run_rotate(Report& report, const Ceiling& ceiling) {
  check_rotate(report, {}, 1);
  check_rotate(report, {}, 600);
  check_rotate(report, {{6, 2, 64}, 32, true}, 333);
  check_rotate(report, {{6, 2, 32}, 16, false}, 333);
  check_rotate(report, {{6, 2, 32}, 16, true}, 333);
  check_rotate(report, {{6, 3, 32}, 32, false}, 333);
  check_rotate(report, {{8, 2, 16}, 8, true}, 200);
  check_rotate(report, {{5, 1, 98}, 70, true}, 200);
  check_rotate(report, {{16, 1, 128}, 0, true}, 200);
  for (const int64_t count : {1, 64, 4096}) time_rotate(ceiling, count);
}

}
