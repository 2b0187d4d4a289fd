#include "cuda/bench/experts_check.h"

#include <cmath>
#include <cstdint>
#include <cstdio>

#include "cuda/bench/expert_case.h"

namespace glint::cuda::bench {

namespace {

constexpr ExpertLayout kTensorParallel = {"tp 160x192", 0, 160, 192, false};
constexpr ExpertLayout kTensorParallelShared = {"tp 160x192+shared", 0, 160, 192, true};
constexpr ExpertLayout kExpertParallel = {"ep 20x1536", 40, 60, 1536, false};

Routing first_tokens(const Routing& routing, int64_t num_tokens) {
  const auto pairs = static_cast<std::ptrdiff_t>(num_tokens * kExpertsPerToken);
  return {{routing.experts.begin(), routing.experts.begin() + pairs},
          {routing.weights.begin(), routing.weights.begin() + pairs}};
}

bool is_grouping_right(const HostGrouping& host, const GroupedCase& grouped) {
  const std::vector<int32_t> tokens = grouped.row_tokens();
  const std::vector<float> weights = grouped.row_weights();
  return std::equal(host.row_tokens.begin(), host.row_tokens.end(), tokens.begin()) &&
         std::equal(host.row_weights.begin(), host.row_weights.end(), weights.begin());
}

bool check_errors(const ExpertLayout& layout) {
  ExpertCase experts(layout, 700, true);
  double worst_hidden = 0.0;
  double worst_out = 0.0;
  bool is_right = true;
  for (const int64_t tokens : {1, 3, 8, 17, 64, 65, 200, 256, 300, 700}) {
    const Routing routing = random_routing(tokens, 77 + static_cast<uint64_t>(tokens));
    const GroupedCase grouped(layout, routing, tokens);
    const HostGrouping host = group_on_host(layout, routing, tokens);
    DeviceArray<float> out(tokens * kHiddenSize);
    experts.poison();
    experts.run(grouped, out.data(), nullptr);
    synchronize();
    experts.keep_hidden(grouped);
    const bool is_grouped = is_grouping_right(host, grouped);
    const double hidden_error = experts.hidden_error(host, grouped);
    const int64_t wrong_codes = experts.wrong_codes(host, grouped);
    const double out_error = experts.out_error(host, out.data(), tokens);
    const bool holds = is_grouped && hidden_error < 1e-3 && wrong_codes == 0 && out_error < 1e-3;
    if (!holds) {
      std::printf("WRONG %s at %lld tokens: grouped %d hidden %g codes %lld out %g\n", layout.name,
                  static_cast<long long>(tokens), is_grouped ? 1 : 0, hidden_error,
                  static_cast<long long>(wrong_codes), out_error);
    }
    is_right = is_right && holds;
    worst_hidden = std::max(worst_hidden, hidden_error);
    worst_out = std::max(worst_out, out_error);
  }
  std::printf("experts %-18s worst relative error: hidden %.2e out %.2e, codes exact\n", layout.name, worst_hidden,
              worst_out);
  return is_right;
}

bool check_invariance(const ExpertLayout& layout) {
  constexpr int64_t kMost = 4096;
  ExpertCase experts(layout, kMost, false);
  const Routing routing = random_routing(kMost, 5);
  const GroupedCase all(layout, routing, kMost);
  DeviceArray<float> expected(kMost * kHiddenSize);
  DeviceArray<float> out(kMost * kHiddenSize);
  experts.run(all, expected.data(), nullptr);
  synchronize();
  int64_t different = 0;
  const auto check_count = [&](int64_t tokens) {
    const GroupedCase grouped(layout, first_tokens(routing, tokens), tokens);
    out.poison();
    experts.run(grouped, out.data(), nullptr);
    synchronize();
    different += count_different_bits(out.data(), expected.data(), tokens * kHiddenSize);
  };
  for (int64_t tokens = 1; tokens <= 256; ++tokens) check_count(tokens);
  for (int repeat = 0; repeat < 20; ++repeat) check_count(64);
  for (const int64_t tokens : {257, 300, 512, 1000, 1024, 1025, 1500, 2048, 2049, 3000, 4095}) check_count(tokens);
  for (int repeat = 0; repeat < 3; ++repeat) check_count(kMost);
  std::printf("experts %-18s 267 row counts against 4096 rows and 23 repeats: %lld values differ\n", layout.name,
              static_cast<long long>(different));
  return different == 0;
}

Routing with_unusable_rest(const Routing& routing, int64_t num_tokens, int64_t num_real) {
  constexpr int32_t kUnusable[] = {-1, kNumExperts, INT32_MAX, INT32_MIN, -7, 1 << 20, 0x7fc00000, kNumExperts + 1};
  Routing padded = first_tokens(routing, num_tokens);
  for (auto pair = static_cast<size_t>(num_real * kExpertsPerToken); pair < padded.experts.size(); ++pair) {
    padded.experts[pair] = kUnusable[pair % 8];
    padded.weights[pair] = NAN;
  }
  return padded;
}

uint64_t count_touched(const ExpertLayout& layout, const Routing& routing, int64_t num_real) {
  const HostGrouping host = group_on_host(layout, routing, num_real);
  uint64_t touched = 0;
  for (int32_t expert = 0; expert < layout.expert_last - layout.expert_first; ++expert) {
    const auto place = static_cast<size_t>(expert);
    if (host.expert_first[place + 1] > host.expert_first[place]) ++touched;
  }
  return touched;
}

struct PaddedStep {
  int64_t num_tokens;
  int32_t num_real;
};

bool check_padding(const ExpertLayout& layout) {
  constexpr int64_t kMost = 2048;
  ExpertCase experts(layout, kMost, false);
  const Routing routing = random_routing(kMost, 9);
  const GroupedCase all(layout, routing, kMost);
  const DeviceArray<float> expected(kMost * kHiddenSize);
  DeviceArray<float> out(kMost * kHiddenSize);
  experts.run(all, expected.data(), nullptr);
  synchronize();
  int64_t different = 0;
  bool is_right = true;
  for (const PaddedStep& step : {PaddedStep{1, 0}, {1, 1}, {8, 5}, {64, 0}, {64, 1}, {64, 40}, {256, 100}, {256, 0},
                                 {1024, 300}, {1024, 0}, {2048, 900}, {2048, 1500}, {64, 1000}, {64, -5}}) {
    const int32_t real = std::clamp(step.num_real, 0, static_cast<int32_t>(step.num_tokens));
    const Routing padded = with_unusable_rest(routing, step.num_tokens, real);
    GroupedCase grouped(layout, padded, step.num_tokens);
    for (const bool counts_real : {true, false}) {
      grouped.set_real_tokens(counts_real ? step.num_real : static_cast<int32_t>(step.num_tokens));
      out.poison();
      experts.run(grouped, out.data(), nullptr);
      synchronize();
      if (real > 0) different += count_different_bits(out.data(), expected.data(), real * kHiddenSize);
      const std::vector<float> rest = out.to_host();
      const auto first = rest.begin() + real * kHiddenSize;
      is_right = is_right && std::all_of(first, rest.begin() + step.num_tokens * kHiddenSize,
                                         [](float value) { return std::isfinite(value); });
    }
    is_right = is_right && grouped.experts_touched() == 2 * count_touched(layout, padded, real);
  }
  std::printf("experts %-18s padded steps: %lld values differ, %s\n", layout.name, static_cast<long long>(different),
              is_right ? "padded rows finite, touched experts right" : "WRONG padded rows or touched experts");
  return is_right && different == 0;
}

struct BatchMeasure {
  const ExpertCase& experts;
  std::vector<std::unique_ptr<GroupedCase>> groups;
  double bytes;
  double rows;
};

BatchMeasure make_batch(const ExpertCase& experts, int64_t tokens) {
  const ExpertLayout& layout = experts.layout();
  const int num_sets = tokens <= 8 ? 24 : 8;
  BatchMeasure batch = {experts, {}, 0.0, 0.0};
  for (int index = 0; index < num_sets; ++index) {
    const Routing routing = random_routing(tokens, 1000 + static_cast<uint64_t>(index));
    const HostGrouping host = group_on_host(layout, routing, tokens);
    batch.rows += static_cast<double>(host.row_tokens.size()) / num_sets;
    for (int32_t expert = 0; expert < layout.num_local(); ++expert) {
      const auto place = static_cast<size_t>(expert);
      if (host.expert_first[place + 1] == host.expert_first[place]) continue;
      batch.bytes += 3.0 * static_cast<double>(layout.width * kHiddenSize) / num_sets;
    }
    batch.groups.push_back(std::make_unique<GroupedCase>(layout, routing, tokens));
    launch_group_tokens(batch.groups.back()->call(layout), nullptr);
  }
  synchronize();
  return batch;
}

void measure_batch(ExpertCase& experts, int64_t tokens, double ceiling, cudaStream_t stream) {
  const BatchMeasure batch = make_batch(experts, tokens);
  const DeviceArray<float> out(tokens * kHiddenSize);
  const auto num_sets = static_cast<int>(batch.groups.size());
  const auto group = [&](int index) { launch_group_tokens(batch.groups[index]->call(experts.layout()), stream); };
  const auto gate_up = [&](int index) { launch_expert_gate_up(experts.gate_up(*batch.groups[index]), stream); };
  const auto down = [&](int index) { launch_expert_down(experts.down(*batch.groups[index], out.data()), stream); };
  const double group_time = median_microseconds(stream, num_sets, group);
  const double gate_up_time = median_microseconds(stream, num_sets, gate_up);
  experts.clear_handed();
  const double all_time = median_microseconds(stream, num_sets, [&](int index) {
    group(index);
    gate_up(index);
    down(index);
  });
  const bool needs_group = experts.hands_over(*batch.groups[0]);
  const double pair_time = needs_group ? all_time : median_microseconds(stream, num_sets, [&](int index) {
    gate_up(index);
    down(index);
  });
  const double down_time = pair_time - gate_up_time;
  const double floor = batch.bytes / ceiling * 1e6;
  const double flops = 6.0 * batch.rows * static_cast<double>(experts.layout().width * kHiddenSize);
  std::printf("%-18s %5lld tokens  group %6.2f  gate+up %8.2f (%4.1f%%)  down %8.2f (%4.1f%%)  "
              "%s %8.2f us %6.0f GB/s %4.1f%% of ceiling  floor %6.2f  with group %8.2f  %7.1f TFLOP/s\n",
              experts.layout().name, static_cast<long long>(tokens), group_time, gate_up_time,
              200.0 / 3.0 * floor / gate_up_time, down_time, 100.0 / 3.0 * floor / down_time,
              needs_group ? "group+pair" : "pair", pair_time,
              batch.bytes / pair_time / 1e3, 100.0 * floor / pair_time, floor, all_time, flops / pair_time / 1e6);
  std::fflush(stdout);
}

}

bool check_experts() {
  bool is_right = true;
  for (const ExpertLayout& layout : {kTensorParallelShared, kExpertParallel}) {
    is_right = check_errors(layout) && is_right;
    std::fflush(stdout);
  }
  for (const ExpertLayout& layout : {kTensorParallelShared, kExpertParallel}) {
    is_right = check_invariance(layout) && is_right;
    is_right = check_padding(layout) && is_right;
    std::fflush(stdout);
  }
  return is_right;
}

void measure_experts(double ceiling) {
  cudaStream_t stream = nullptr;
  GLINT_CHECK_CUDA(cudaStreamCreate(&stream));
  for (const ExpertLayout& layout : {kTensorParallel, kTensorParallelShared, kExpertParallel}) {
    ExpertCase experts(layout, 4096, false);
    for (const int64_t tokens : {1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096}) {
      measure_batch(experts, tokens, ceiling, stream);
    }
  }
  GLINT_CHECK_CUDA(cudaStreamDestroy(stream));
}

}
