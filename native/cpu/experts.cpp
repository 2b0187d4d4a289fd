#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/contract.h"
#include "cpu/operations.h"

namespace glint::cpu {

namespace {

constexpr int32_t kMaxExperts = 4096;

using Scores = std::array<float, kMaxExperts>;

int32_t best_of(const Scores& scores, int32_t count) {
  int32_t best = 0;
  for (int32_t index = 1; index < count; ++index) {
    if (scores[static_cast<size_t>(index)] > scores[static_cast<size_t>(best)]) best = index;
  }
  return best;
}

void route_row(const RouteCall& call, int64_t row) {
  const glint_model& model = *call.model;
  Scores scores;
  Scores choice;
  for (int32_t expert = 0; expert < model.num_experts; ++expert) {
    const auto logit = static_cast<double>(call.logits[row * model.num_experts + expert]);
    const auto score = static_cast<float>(1.0 / (1.0 + std::exp(-logit)));
    const float selection = score + call.bias[expert];
    scores[static_cast<size_t>(expert)] = score;
    choice[static_cast<size_t>(expert)] = std::isnan(selection) ? std::numeric_limits<float>::lowest() : selection;
  }
  int32_t* experts = call.experts + row * model.experts_per_token;
  for (int32_t kept = 0; kept < model.experts_per_token; ++kept) {
    experts[kept] = best_of(choice, model.num_experts);
    choice[static_cast<size_t>(experts[kept])] = -std::numeric_limits<float>::infinity();
  }
  std::sort(experts, experts + model.experts_per_token);
  double sum = 1e-20;
  for (int32_t kept = 0; kept < model.experts_per_token; ++kept) {
    sum += static_cast<double>(scores[static_cast<size_t>(experts[kept])]);
  }
  const double factor = static_cast<double>(model.routed_scaling) / (model.normalise_weights != 0 ? sum : 1.0);
  for (int32_t kept = 0; kept < model.experts_per_token; ++kept) {
    call.weights[row * model.experts_per_token + kept] =
        static_cast<float>(static_cast<double>(scores[static_cast<size_t>(experts[kept])]) * factor);
  }
}

void combine_row(const RowKernels& kernels, const CombineCall& call, int64_t row, double* sums) {
  std::fill(sums, sums + call.hidden_size, 0.0);
  for (int64_t kept = 0; kept < call.experts_per_token; ++kept) {
    const int64_t index = row * call.experts_per_token + kept;
    if (call.experts[index] < call.expert_first || call.experts[index] >= call.expert_last) continue;
    const float* routed = call.routed + call.routed_rows[index] * call.hidden_size;
    kernels.add_weighted(sums, routed, static_cast<double>(call.weights[index]), call.hidden_size);
  }
  const int64_t first = row * call.hidden_size;
  kernels.write_sums(call.out + first, sums, call.shared + first, call.hidden_size);
}

}

void swiglu(Workers& workers, float* out, const float* gate, const float* up, int64_t count) {
  constexpr int64_t kChunk = 4096;
  workers.team().run((count + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
    const int64_t first = chunk * kChunk;
    workers.kernels().swiglu(out + first, gate + first, up + first, std::min(kChunk, count - first));
  });
}

void route(Workers& workers, const RouteCall& call) {
  require_argument(call.model->num_experts <= kMaxExperts, "at most ", kMaxExperts, " experts are supported");
  workers.team().run(call.count, [&](int64_t row, int) { route_row(call, row); });
}

void combine(Workers& workers, const CombineCall& call) {
  workers.team().run(call.count, [&](int64_t row, int thread) {
    combine_row(workers.kernels().rows, call, row, reinterpret_cast<double*>(workers.scratch(thread)));
  });
}

}
