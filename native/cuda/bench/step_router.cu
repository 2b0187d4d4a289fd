#include "base/fp8.h"
#include "cuda/bench/step_check.h"
#include "cuda/kernels/router/router.h"

namespace glint::cuda::bench {

namespace {

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

struct RouterShape {
  int32_t width = 5120;
  int32_t num_experts = 160;
  int32_t num_groups = 1;
  int32_t groups_per_token = 1;
  int32_t experts_per_token = 8;
};

struct RouterSet {
  RouterSet(const RouterShape& shape_given, int64_t rows, uint64_t seed)
      : shape(shape_given),
        count(rows),
        random(seed),
        host_in(random.normals(as_size(count * shape.width), 1.0F)),
        host_bias(random.normals(as_size(shape.num_experts), 0.02F)),
        host_weight(as_size(shape.num_experts) * as_size(shape.width)),
        in(host_in),
        bias(host_bias),
        weight(host_weight.size()),
        pieces(as_size(router_split_floats(count, shape.width, shape.num_experts))),
        experts(as_size(count * shape.experts_per_token)),
        weights(experts.count()) {
    for (uint16_t& value : host_weight) value = bf16_from_float(0.02F * random.normal());
    weight.upload(host_weight);
  }

  RouterCall call(int64_t rows) const {
    return {.experts = experts.data(),
            .weights = weights.data(),
            .splits = pieces.data(),
            .in = in.data(),
            .weight = weight.data(),
            .bias = bias.data(),
            .count = rows,
            .width = shape.width,
            .num_experts = shape.num_experts,
            .num_groups = shape.num_groups,
            .groups_per_token = shape.groups_per_token,
            .experts_per_token = shape.experts_per_token,
            .routed_scaling = 2.5F,
            .normalises = true};
  }

  RouterShape shape;
  int64_t count;
  RandomSource random;
  std::vector<float> host_in;
  std::vector<float> host_bias;
  std::vector<uint16_t> host_weight;
  DeviceArray<float> in;
  DeviceArray<float> bias;
  DeviceArray<uint16_t> weight;
  DeviceArray<float> pieces;
  DeviceArray<int32_t> experts;
  DeviceArray<float> weights;
};

std::vector<float> joined_logits(const RouterSet& set, bool is_few) {
  const std::vector<float> pieces = set.pieces.download();
  const size_t logits = as_size(set.count * set.shape.num_experts);
  std::vector<float> sums(logits, 0.0F);
  const int64_t num_pieces = is_few ? router_splits(set.shape.width) : 1;
  for (int64_t piece = 0; piece < num_pieces; ++piece) {
    for (size_t index = 0; index < logits; ++index) sums[index] += pieces[as_size(piece) * logits + index];
  }
  return sums;
}

std::vector<double> wanted_logits(const RouterSet& set) {
  std::vector<double> wanted;
  for (int64_t row = 0; row < set.count; ++row) {
    for (int32_t expert = 0; expert < set.shape.num_experts; ++expert) {
      double sum = 0;
      for (int32_t col = 0; col < set.shape.width; ++col) {
        sum += static_cast<double>(set.host_in[as_size(row * set.shape.width + col)]) *
               static_cast<double>(float_from_bf16(set.host_weight[as_size(int64_t{expert} * set.shape.width + col)]));
      }
      wanted.push_back(sum);
    }
  }
  return wanted;
}

struct Choice {
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

std::vector<bool> kept_groups(const RouterShape& shape, const std::vector<float>& choice) {
  const int32_t size = shape.num_experts / shape.num_groups;
  std::vector<std::pair<float, int32_t>> groups;
  for (int32_t group = 0; group < shape.num_groups; ++group) {
    std::vector<float> part(choice.begin() + group * size, choice.begin() + (group + 1) * size);
    std::ranges::sort(part, std::greater<>());
    groups.emplace_back(-(part[0] + part[1]), group);
  }
  std::ranges::sort(groups);
  std::vector<bool> kept(as_size(shape.num_groups), shape.groups_per_token == shape.num_groups);
  for (int32_t index = 0; index < shape.groups_per_token; ++index) kept[as_size(groups[as_size(index)].second)] = true;
  return kept;
}

Choice wanted_choice(const RouterSet& set, const float* logits) {
  const RouterShape& shape = set.shape;
  std::vector<float> scores;
  std::vector<float> choice;
  for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
    scores.push_back(static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logits[expert])))));
    choice.push_back(scores.back() + set.host_bias[as_size(expert)]);
  }
  const std::vector<bool> kept = shape.num_groups > 1 ? kept_groups(shape, choice) : std::vector<bool>{true};
  std::vector<std::pair<float, int32_t>> order;
  for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
    const int32_t group = expert / (shape.num_experts / shape.num_groups);
    if (kept[as_size(group)]) order.emplace_back(-choice[as_size(expert)], expert);
  }
  std::ranges::sort(order);
  Choice wanted;
  for (int32_t index = 0; index < shape.experts_per_token; ++index) {
    wanted.experts.push_back(order[as_size(index)].second);
  }
  std::ranges::sort(wanted.experts);
  double sum = 1e-20;
  for (const int32_t expert : wanted.experts) sum += static_cast<double>(scores[as_size(expert)]);
  for (const int32_t expert : wanted.experts) {
    wanted.weights.push_back(static_cast<float>(static_cast<double>(scores[as_size(expert)]) * (2.5 / sum)));
  }
  return wanted;
}

void check_router(Report& report, const RouterShape& shape, int64_t count) {
  RouterSet set(shape, count, static_cast<uint64_t>(count));
  launch_router(set.call(count), nullptr);
  const std::vector<float> logits = joined_logits(set, takes_few_rows(count, shape.width));
  const std::vector<int32_t> experts = set.experts.download();
  const std::vector<float> weights = set.weights.download();
  const double error = relative_error(logits, wanted_logits(set));
  int64_t wrong = 0;
  for (int64_t row = 0; row < count; ++row) {
    const Choice wanted = wanted_choice(set, logits.data() + row * shape.num_experts);
    for (int32_t kept = 0; kept < shape.experts_per_token; ++kept) {
      const auto index = as_size(row * shape.experts_per_token + kept);
      wrong += experts[index] == wanted.experts[as_size(kept)] ? 0 : 1;
      wrong += std::fabs(weights[index] - wanted.weights[as_size(kept)]) <= 3e-7F ? 0 : 1;
    }
  }
  report.check(error < 2e-6 && wrong == 0 && set.experts.guard_is_whole() && set.pieces.guard_is_whole(),
               text("router ", count, " rows, ", shape.num_experts, "x", shape.width, ", groups ", shape.num_groups),
               text("logit error ", error, ", wrong choices ", wrong));
}

void check_counts(Report& report) {
  RouterSet set({}, 700, 3);
  launch_router(set.call(700), nullptr);
  const std::vector<float> many = set.weights.download();
  bool is_same = true;
  for (const int64_t count : {1, 3, 17, 64, 512}) {
    launch_router(set.call(count), nullptr);
    const std::vector<float> few = set.weights.download();
    is_same = is_same && std::memcmp(few.data(), many.data(), as_size(count) * 8 * sizeof(float)) == 0;
  }
  report.check(is_same, "router: the first rows are the same at 1 to 700 rows");
  report.check(is_repeatable([&](cudaStream_t stream) { launch_router(set.call(64), stream); }, set.weights.data(),
                             64 * 8 * sizeof(float), 1000),
               "router: 1,000 runs give the same bits");
}

void check_bad_rows(Report& report, const RouterShape& shape, int64_t count) {
  RouterSet set(shape, count, 11);
  launch_router(set.call(count), nullptr);
  const std::vector<int32_t> before = set.experts.download();
  const std::vector<float> weights_before = set.weights.download();
  std::vector<float> in = set.host_in;
  const std::vector<float> bad = {NAN, INFINITY, -INFINITY, 3e38F};
  for (int64_t row = 0; row < count; row += 2) {
    for (int32_t col = 0; col < shape.width; ++col) {
      in[as_size(row * shape.width + col)] = bad[as_size((row / 2 + (row / 8) * col) % 4)];
    }
  }
  set.in.upload(in);
  set.experts.poison();
  launch_router(set.call(count), nullptr);
  const std::vector<int32_t> experts = set.experts.download();
  const std::vector<float> weights = set.weights.download();
  int64_t wrong = 0;
  for (size_t index = 0; index < experts.size(); ++index) {
    const auto row = static_cast<int64_t>(index) / shape.experts_per_token;
    const bool is_first = static_cast<int64_t>(index) % shape.experts_per_token == 0;
    wrong += experts[index] >= 0 && experts[index] < shape.num_experts ? 0 : 1;
    wrong += is_first || experts[index] > experts[index - 1] ? 0 : 1;
    if (row % 2 == 0) continue;
    wrong += experts[index] == before[index] && weights[index] == weights_before[index] ? 0 : 1;
  }
  report.check(wrong == 0 && set.experts.guard_is_whole(),
               text("router ", count, " rows, every second one not finite: valid experts, the others unchanged"));
}

void time_router(const Ceiling& ceiling, int64_t count) {
  constexpr int kSets = 40;
  std::vector<std::unique_ptr<RouterSet>> sets;
  const int num_sets = count > 1000 ? 2 : kSets;
  for (int set = 0; set < num_sets; ++set) {
    sets.push_back(std::make_unique<RouterSet>(RouterShape{}, count, as_size(set)));
  }
  const double seconds = median_seconds(
      [&](int set, cudaStream_t stream) { launch_router(sets[as_size(set)]->call(count), stream); }, num_sets);
  const double floats = static_cast<double>(count) * 5120;
  print_time(text("router ", count, " rows"), seconds,
             {.bytes = floats * 4 + 160 * 5120 * 2, .operations = floats * 160 * 2}, ceiling);
}

}

void run_router(Report& report, const Ceiling& ceiling) {
  for (const int64_t count : {1, 9, 64, 600}) check_router(report, {}, count);
  check_router(report, {1000, 128, 1, 1, 8}, 5);
  check_router(report, {1000, 128, 1, 1, 8}, 525);
  check_router(report, {1003, 200, 1, 1, 8}, 33);
  check_router(report, {4096, 64, 8, 3, 6}, 540);
  check_router(report, {5120, 512, 1, 1, 8}, 20);
  check_counts(report);
  for (const int64_t count : {32, 700}) check_bad_rows(report, {}, count);
  check_bad_rows(report, {4096, 64, 8, 3, 6}, 32);
  for (const int64_t count : {1, 8, 64, 256, 4096}) time_router(ceiling, count);
}

}
