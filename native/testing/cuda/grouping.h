#pragma once

#include "cuda/kernels/moe/experts.h"
#include "testing/cuda/runner.h"

namespace glint::testing {

struct TestGrouping {
  int32_t* row_tokens;
  float* row_weights;
  int32_t* gate_up_tiles;
  int32_t* down_tiles;
  int32_t* counts;
  uint32_t* row_places;
  const int32_t* experts;
  const float* weights;
  int64_t num_tokens;
  int64_t max_tiles;
  int32_t experts_per_token;
  int32_t expert_first;
  int32_t expert_last;
  int32_t has_shared;
  int32_t num_real_tokens;
  int32_t is_in_expert_order;

  int32_t num_local() const { return expert_last - expert_first; }
};

int64_t most_tiles(const TestGrouping& test);

class Grouping {
 public:
  explicit Grouping(const TestGrouping& test);

  cuda::GroupCall call(int64_t num_tokens) const;
  void launch(int64_t num_tokens) const { cuda::launch_group_tokens(call(num_tokens), nullptr); }
  void run(Runner& runner, const std::function<void()>& launch_all) const;
  void download() const;
  void download_touched() const;
  cuda::GroupedTokens grouped() const;
  int64_t max_tiles(int64_t num_tokens) const;
  const int32_t* experts() const { return experts_.data(); }
  std::vector<cuda::TokenTile> down_tiles() const { return down_tiles_.to_host(); }
  const DeviceBytes& touched() const { return touched_; }

 private:
  const TestGrouping& test_;
  DeviceArray<int32_t> experts_;
  DeviceArray<float> weights_;
  DeviceArray<int32_t> num_real_;
  DeviceArray<int32_t> row_tokens_;
  DeviceArray<float> row_weights_;
  DeviceArray<cuda::TokenTile> gate_up_tiles_;
  DeviceArray<cuda::TokenTile> down_tiles_;
  DeviceArray<int32_t> counts_;
  DeviceArray<int32_t> down_tile_ends_;
  DeviceArray<cuda::RowPlace> row_places_;
  DeviceArray<uint32_t> rows_packed_;
  DeviceArray<int32_t> token_rows_;
  DeviceArray<uint64_t> touched_;
};

}
