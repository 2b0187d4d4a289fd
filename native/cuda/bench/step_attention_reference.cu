#include "cuda/bench/step_pages.h"

namespace glint::cuda::bench {

namespace {

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

struct SplitSums {
  double highest;
  double weight_sum;
  std::vector<double> values;
};

double rounded(double value) { return static_cast<double>(round_to_bf16(static_cast<float>(value))); }

SplitSums wanted_split(const PagedBatch& batch, int32_t request, const float* query, int kv_head, int64_t first,
                       int64_t last, bool covers_exponent) {
  const int dims = batch.heads.head_dim;
  std::vector<double> scores;
  for (int64_t position = first; position < last; ++position) {
    double score = 0;
    for (int dim = 0; dim < dims; ++dim) {
      score += static_cast<double>(query[dim]) * static_cast<double>(batch.key(request, position, kv_head, dim));
    }
    scores.push_back(static_cast<double>(static_cast<float>(score / std::sqrt(dims))));
  }
  const double highest = *std::ranges::max_element(scores);
  const double reference = covers_exponent ? std::ceil(highest / std::log(2.0)) * std::log(2.0) : highest;
  SplitSums sums{reference, 0, std::vector<double>(as_size(dims), 0.0)};
  for (int64_t position = first; position < last; ++position) {
    const double weight = std::exp(scores[as_size(position - first)] - reference);
    sums.weight_sum += weight;
    for (int dim = 0; dim < dims; ++dim) {
      sums.values[as_size(dim)] += rounded(weight) * static_cast<double>(batch.value(request, position, kv_head, dim));
    }
  }
  return sums;
}

}

std::vector<double> wanted_row(const PagedBatch& batch, int32_t row, bool covers_exponent) {
  const int32_t request = batch.request_of(row);
  const PagedRequest& place = batch.requests[as_size(request)];
  const int64_t positions = place.first_position + row - place.row_first + 1;
  const int dims = batch.heads.head_dim;
  std::vector<double> wanted;
  for (int32_t head = 0; head < batch.heads.num_heads; ++head) {
    std::vector<float> query;
    for (int dim = 0; dim < dims; ++dim) query.push_back(batch.query_value(row, head, dim));
    std::vector<SplitSums> splits;
    for (int64_t first = 0; first < positions; first += kSplitTokens) {
      splits.push_back(wanted_split(batch, request, query.data(), head / batch.heads.group_heads(), first,
                                    std::min<int64_t>(first + kSplitTokens, positions), covers_exponent));
    }
    double highest = splits[0].highest;
    for (const SplitSums& split : splits) highest = std::max(highest, split.highest);
    double weight_sum = 0;
    for (const SplitSums& split : splits) weight_sum += split.weight_sum * std::exp(split.highest - highest);
    for (int dim = 0; dim < dims; ++dim) {
      double sum = 0;
      for (const SplitSums& split : splits) sum += split.values[as_size(dim)] * std::exp(split.highest - highest);
      wanted.push_back(sum / weight_sum);
    }
  }
  return wanted;
}

double worst_error(const PagedBatch& batch, const std::vector<float>& out, const std::vector<int32_t>& rows,
                   bool covers_exponent) {
  const int64_t width = int64_t{batch.heads.num_heads} * batch.heads.head_dim;
  double worst = 0;
  for (const int32_t row : rows) {
    const std::vector<float> part(out.begin() + row * width, out.begin() + (row + 1) * width);
    worst = std::max(worst, relative_error(part, wanted_row(batch, row, covers_exponent)));
  }
  return worst;
}

}
