#pragma once

#include <memory>
#include <string>

#include "cuda/bench/measure.h"
#include "cuda/kernels/moe/experts.h"

namespace glint::cuda::bench {

constexpr int32_t kNumExperts = 160;
constexpr int32_t kExpertsPerToken = 8;
constexpr int64_t kHiddenSize = 5120;

struct ExpertLayout {
  const char* name;
  int32_t expert_first;
  int32_t expert_last;
  int64_t width;
  bool has_shared;

  int32_t num_local() const { return expert_last - expert_first + (has_shared ? 1 : 0); }
};

struct Routing {
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

Routing random_routing(int64_t num_tokens, uint64_t seed);

struct HostGrouping {
  std::vector<int32_t> row_tokens;
  std::vector<float> row_weights;
  std::vector<int64_t> expert_first;
};

HostGrouping group_on_host(const ExpertLayout& layout, const Routing& routing, int64_t num_tokens);

class GroupedCase {
 public:
  GroupedCase(const ExpertLayout& layout, const Routing& routing, int64_t num_tokens);
  GroupCall call(const ExpertLayout& layout) const;
  void set_real_tokens(int32_t count);
  uint64_t experts_touched() const { return experts_touched_.to_host()[0]; }
  GroupedTokens grouped() const;
  int64_t num_tokens() const { return num_tokens_; }
  int64_t max_tiles() const { return gate_up_tiles_.count(); }
  std::vector<TokenTile> down_tiles() const { return down_tiles_.to_host(); }
  std::vector<int32_t> counts() const { return counts_.to_host(); }
  std::vector<int32_t> row_tokens() const { return row_tokens_.to_host(); }
  std::vector<float> row_weights() const { return row_weights_.to_host(); }
  const int32_t* device_row_tokens() const { return row_tokens_.data(); }

 private:
  int64_t num_tokens_;
  DeviceArray<int32_t> experts_;
  DeviceArray<float> weights_;
  DeviceArray<int32_t> row_tokens_;
  DeviceArray<float> row_weights_;
  DeviceArray<TokenTile> gate_up_tiles_;
  DeviceArray<TokenTile> down_tiles_;
  DeviceArray<int32_t> counts_;
  DeviceArray<RowPlace> row_places_;
  DeviceArray<uint32_t> rows_packed_;
  DeviceArray<int32_t> num_real_tokens_;
  DeviceArray<uint64_t> experts_touched_;
};

class ExpertCase {
 public:
  ExpertCase(const ExpertLayout& layout, int64_t max_tokens, bool keeps_plain_weights);
  GateUpCall gate_up(const GroupedCase& grouped) const;
  DownCall down(const GroupedCase& grouped, float* out) const;
  void run(const GroupedCase& grouped, float* out, cudaStream_t stream) const;
  void poison();
  void keep_hidden(const GroupedCase& grouped);
  bool hands_over(const GroupedCase& grouped) const { return hidden(grouped) == handed_.data(); }
  void clear_handed() { handed_.fill_bytes(0); }
  const ExpertLayout& layout() const { return layout_; }
  double hidden_error(const HostGrouping& host, const GroupedCase& grouped) const;
  int64_t wrong_codes(const HostGrouping& host, const GroupedCase& grouped);
  double out_error(const HostGrouping& host, const float* out, int64_t num_tokens) const;

 private:
  float* hidden(const GroupedCase& grouped) const;
  std::vector<double> plain_products(const HostGrouping& host, const uint8_t* weights, const uint8_t* activations,
                                     const int32_t* row_tokens, int64_t rows, int64_t k) const;

  ExpertLayout layout_;
  std::unique_ptr<DeviceArray<uint8_t>> gate_;
  std::unique_ptr<DeviceArray<uint8_t>> up_;
  std::unique_ptr<DeviceArray<uint8_t>> down_;
  DeviceArray<uint8_t> packed_gate_up_;
  DeviceArray<uint8_t> packed_down_;
  DeviceArray<float> gate_scales_;
  DeviceArray<float> up_scales_;
  DeviceArray<float> down_scales_;
  DeviceArray<uint8_t> activations_;
  DeviceArray<float> token_scales_;
  DeviceArray<float> hidden_;
  DeviceArray<float> handed_;
  DeviceArray<uint8_t> records_;
  std::vector<uint8_t> codes_;
  std::vector<float> code_scales_;
  DeviceArray<uint32_t> arrivals_;
  DeviceArray<uint32_t> tiles_taken_;
};

}
