#include "testing/cuda/grouping.h"

#include <algorithm>
#include <cstring>

#include "base/contract.h"

namespace glint::testing {

namespace {

constexpr int kGateUpCount = 0;
constexpr int kRowCount = 1;
constexpr int kTouchedCount = 2;

int64_t rows_of(const TestGrouping& test) { return test.num_tokens * (int64_t{test.experts_per_token} + 1); }

}

int64_t most_tiles(const TestGrouping& test) {
  int64_t most = 0;
  for (int64_t tokens = 1; tokens <= test.num_tokens; ++tokens) {
    most = std::max(most, cuda::max_token_tiles(tokens, test.experts_per_token, test.num_local()));
  }
  return most;
}

Grouping::Grouping(const TestGrouping& test)
    : test_(test),
      experts_(test.experts, test.num_tokens * test.experts_per_token),
      weights_(test.weights, test.num_tokens * test.experts_per_token),
      num_real_(std::vector{test.num_real_tokens}),
      row_tokens_(rows_of(test)),
      row_weights_(rows_of(test)),
      gate_up_tiles_(most_tiles(test)),
      down_tiles_(most_tiles(test)),
      counts_(2),
      down_tile_ends_(test.num_tokens + 1),
      row_places_(cuda::max_streamed_rows(test.num_tokens, test.experts_per_token)),
      rows_packed_(most_tiles(test)),
      token_rows_(rows_of(test)),
      touched_(std::vector<uint64_t>{0}) {}

cuda::GroupedTokens Grouping::grouped() const {
  return {.row_tokens = row_tokens_.data(),
          .row_weights = row_weights_.data(),
          .gate_up_tiles = gate_up_tiles_.data(),
          .num_gate_up_tiles = counts_.data() + kGateUpCount,
          .down_tiles = down_tiles_.data(),
          .down_tile_ends = down_tile_ends_.data(),
          .num_rows = counts_.data() + kRowCount,
          .row_places = row_places_.data(),
          .rows_packed = rows_packed_.data(),
          .token_rows = token_rows_.data()};
}

int64_t Grouping::max_tiles(int64_t num_tokens) const {
  return std::min(cuda::max_token_tiles(num_tokens, test_.experts_per_token, test_.num_local()),
                  num_tokens * (int64_t{test_.experts_per_token} + 1));
}

cuda::GroupCall Grouping::call(int64_t num_tokens) const {
  return {.grouped = grouped(),
          .experts = experts_.data(),
          .weights = weights_.data(),
          .num_tokens = static_cast<int32_t>(num_tokens),
          .experts_per_token = test_.experts_per_token,
          .expert_first = test_.expert_first,
          .expert_last = test_.expert_last,
          .has_shared = test_.has_shared,
          .num_real_tokens = num_real_.data(),
          .experts_touched = touched_.data(),
          .is_in_expert_order = test_.is_in_expert_order != 0};
}

void Grouping::run(Runner& runner, const std::function<void()>& launch_all) const {
  runner.run(launch_all, {&row_tokens_, &row_weights_, &gate_up_tiles_, &down_tiles_, &counts_, &down_tile_ends_,
                          &row_places_, &rows_packed_, &token_rows_, &touched_});
}

void Grouping::download() const {
  require_argument(test_.max_tiles >= gate_up_tiles_.count(), "there is room for ", test_.max_tiles, " tiles; make it ",
                   gate_up_tiles_.count());
  row_tokens_.download(test_.row_tokens);
  row_weights_.download(test_.row_weights);
  gate_up_tiles_.download_bytes(test_.gate_up_tiles);
  down_tiles_.download_bytes(test_.down_tiles);
  counts_.download(test_.counts);
  if (test_.row_places != nullptr) row_places_.download_bytes(test_.row_places);
  download_touched();
}

void Grouping::download_touched() const {
  test_.counts[kTouchedCount] = static_cast<int32_t>(touched_.to_host().front());
}

}

extern "C" {

using glint::testing::Grouping;
using glint::testing::Runner;
using glint::testing::TestGrouping;

GLINT_API int64_t glint_testing_most_tiles(const TestGrouping* test) { return glint::testing::most_tiles(*test); }

GLINT_API int32_t glint_testing_group_tokens(Runner* runner, const TestGrouping* test) {
  return glint::testing::guarded([&] {
    const Grouping grouping(*test);
    grouping.run(*runner, [&] { grouping.launch(test->num_tokens); });
    grouping.download();
  });
}
}
