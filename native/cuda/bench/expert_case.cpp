#include "cuda/bench/expert_case.h"

#include <cmath>

#include "base/fp8.h"

namespace glint::cuda::bench {

namespace {

uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27U)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31U);
}

int64_t largest_records(const ExpertLayout& layout, int64_t max_tokens) {
  int64_t most = 0;
  for (const int64_t tokens : {int64_t{64}, int64_t{256}, max_tokens}) {
    const PackedTileShape shape = {plan_tiles(tokens).down_tokens, layout.width};
    most = std::max(most, shape.bytes() * max_token_tiles(tokens, kExpertsPerToken, layout.num_local()));
  }
  return most;
}

int64_t code_place(const PackedTileShape& shape, int64_t count, int64_t slot, int64_t unit) {
  if (shape.max_tokens == 64) {
    const int64_t lane = slot % 8 * 4 + unit % 16 / 4;
    const int64_t word = unit / 16 % 2 * 2 + slot % 16 / 8;
    return slot / 16 * 16 * shape.width + unit / 32 * 512 + lane * 16 + word * 4 + unit % 4;
  }
  return kPackedTileHeadBytes + count * kTokenMetadataBytes + (unit / 16 * count + slot) * 16 + unit % 16;
}

int64_t scale_place(const PackedTileShape& shape, int64_t slot) {
  if (shape.max_tokens == 64) return shape.metadata_offset() + kPackedTileHeadBytes + (2 * shape.max_tokens + slot) * 4;
  return kPackedTileHeadBytes + slot * kTokenMetadataBytes + 8;
}

}

Routing random_routing(int64_t num_tokens, uint64_t seed) {
  Routing routing;
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::vector<int32_t> chosen;
    uint64_t state = mix(seed * 1000003U + static_cast<uint64_t>(token));
    while (chosen.size() < kExpertsPerToken) {
      state = mix(state);
      const auto expert = static_cast<int32_t>(state % kNumExperts);
      if (std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) chosen.push_back(expert);
    }
    std::sort(chosen.begin(), chosen.end());
    for (const int32_t expert : chosen) {
      state = mix(state);
      routing.experts.push_back(expert);
      routing.weights.push_back(0.1F + static_cast<float>(state % 1000U) / 2000.0F);
    }
  }
  return routing;
}

HostGrouping group_on_host(const ExpertLayout& layout, const Routing& routing, int64_t num_tokens) {
  HostGrouping host;
  for (int32_t expert = layout.expert_first; expert < layout.expert_last; ++expert) {
    host.expert_first.push_back(static_cast<int64_t>(host.row_tokens.size()));
    for (int64_t pair = 0; pair < num_tokens * kExpertsPerToken; ++pair) {
      if (routing.experts[static_cast<size_t>(pair)] != expert) continue;
      host.row_tokens.push_back(static_cast<int32_t>(pair / kExpertsPerToken));
      host.row_weights.push_back(routing.weights[static_cast<size_t>(pair)]);
    }
  }
  if (layout.has_shared) host.expert_first.push_back(static_cast<int64_t>(host.row_tokens.size()));
  for (int32_t token = 0; layout.has_shared && token < num_tokens; ++token) {
    host.row_tokens.push_back(token);
    host.row_weights.push_back(1.0F);
  }
  host.expert_first.push_back(static_cast<int64_t>(host.row_tokens.size()));
  return host;
}

GroupedCase::GroupedCase(const ExpertLayout& layout, const Routing& routing, int64_t num_tokens)
    : num_tokens_(num_tokens),
      experts_(routing.experts),
      weights_(routing.weights),
      row_tokens_(num_tokens * (kExpertsPerToken + 1)),
      row_weights_(num_tokens * (kExpertsPerToken + 1)),
      gate_up_tiles_(max_token_tiles(num_tokens, kExpertsPerToken, layout.num_local())),
      down_tiles_(max_token_tiles(num_tokens, kExpertsPerToken, layout.num_local())),
      counts_(64),
      row_places_(max_streamed_rows(num_tokens, kExpertsPerToken)),
      rows_packed_(max_token_tiles(num_tokens, kExpertsPerToken, layout.num_local())),
      num_real_tokens_(std::vector<int32_t>{static_cast<int32_t>(num_tokens)}),
      experts_touched_(std::vector<uint64_t>{0}) {}

void GroupedCase::set_real_tokens(int32_t count) {
  GLINT_CHECK_CUDA(cudaMemcpy(num_real_tokens_.data(), &count, sizeof(count), cudaMemcpyHostToDevice));
}

GroupedTokens GroupedCase::grouped() const {
  return {.row_tokens = row_tokens_.data(),
          .row_weights = row_weights_.data(),
          .gate_up_tiles = gate_up_tiles_.data(),
          .num_gate_up_tiles = counts_.data(),
          .down_tiles = down_tiles_.data(),
          .down_tile_ends = counts_.data() + 2,
          .num_rows = counts_.data() + 1,
          .row_places = row_places_.data(),
          .rows_packed = rows_packed_.data()};
}

GroupCall GroupedCase::call(const ExpertLayout& layout) const {
  return {.grouped = grouped(),
          .experts = experts_.data(),
          .weights = weights_.data(),
          .num_tokens = static_cast<int32_t>(num_tokens_),
          .experts_per_token = kExpertsPerToken,
          .expert_first = layout.expert_first,
          .expert_last = layout.expert_last,
          .has_shared = layout.has_shared ? 1 : 0,
          .num_real_tokens = num_real_tokens_.data(),
          .experts_touched = experts_touched_.data()};
}

ExpertCase::ExpertCase(const ExpertLayout& layout, int64_t max_tokens, bool keeps_plain_weights)
    : layout_(layout),
      gate_(std::make_unique<DeviceArray<uint8_t>>(layout.num_local() * layout.width * kHiddenSize)),
      up_(std::make_unique<DeviceArray<uint8_t>>(layout.num_local() * layout.width * kHiddenSize)),
      down_(std::make_unique<DeviceArray<uint8_t>>(layout.num_local() * layout.width * kHiddenSize)),
      packed_gate_up_(layout.num_local() * packed_gate_up_bytes(layout.width, kHiddenSize)),
      packed_down_(layout.num_local() * packed_down_bytes(kHiddenSize, layout.width)),
      gate_scales_(layout.num_local() * layout.width),
      up_scales_(layout.num_local() * layout.width),
      down_scales_(layout.num_local() * kHiddenSize),
      activations_(max_tokens * kHiddenSize),
      token_scales_(max_tokens),
      hidden_(max_tokens * (kExpertsPerToken + 1) * layout.width),
      handed_(max_streamed_rows(max_tokens, kExpertsPerToken) * layout.width),
      records_(largest_records(layout, max_tokens)),
      arrivals_(1),
      tiles_taken_(1) {
  const int64_t count = gate_->count();
  fill_codes(gate_->data(), count, {21, 100.0F});
  fill_codes(up_->data(), count, {22, 100.0F});
  fill_codes(down_->data(), count, {23, 100.0F});
  fill_codes(activations_.data(), activations_.count(), {24, 100.0F});
  fill_positive(gate_scales_.data(), gate_scales_.count(), {25, 2e-4F});
  fill_positive(up_scales_.data(), up_scales_.count(), {26, 2e-4F});
  fill_positive(down_scales_.data(), down_scales_.count(), {27, 2e-4F});
  fill_positive(token_scales_.data(), token_scales_.count(), {28, 1e-2F});
  handed_.fill_bytes(0);
  arrivals_.fill_bytes(0);
  tiles_taken_.fill_bytes(0);
  launch_pack_gate_up({packed_gate_up_.data(), gate_->data(), up_->data(), layout.width, kHiddenSize,
                       layout.num_local()},
                      nullptr);
  launch_pack_down({packed_down_.data(), down_->data(), nullptr, kHiddenSize, layout.width, layout.num_local()},
                   nullptr);
  synchronize();
  if (keeps_plain_weights) return;
  gate_.reset();
  up_.reset();
  down_.reset();
}

void ExpertCase::poison() {
  hidden_.poison();
  records_.poison();
  poison_shared_memory();
}

GateUpCall ExpertCase::gate_up(const GroupedCase& grouped) const {
  return {.hidden = hidden(grouped),
          .grouped = grouped.grouped(),
          .packed_weights = packed_gate_up_.data(),
          .gate_scales = gate_scales_.data(),
          .up_scales = up_scales_.data(),
          .activations = activations_.data(),
          .token_scales = token_scales_.data(),
          .width = layout_.width,
          .k_bytes = kHiddenSize,
          .num_tokens = grouped.num_tokens(),
          .max_tiles = grouped.max_tiles(),
          .tiles_taken = tiles_taken_.data()};
}

DownCall ExpertCase::down(const GroupedCase& grouped, float* out) const {
  return {.out = out,
          .packed_tiles = records_.data(),
          .arrivals = arrivals_.data(),
          .grouped = grouped.grouped(),
          .packed_weights = packed_down_.data(),
          .row_scales = down_scales_.data(),
          .hidden = hidden(grouped),
          .width = layout_.width,
          .hidden_size = kHiddenSize,
          .num_tokens = grouped.num_tokens(),
          .max_rows = grouped.num_tokens() * (kExpertsPerToken + 1)};
}

float* ExpertCase::hidden(const GroupedCase& grouped) const {
  return streams_gate_up(grouped.num_tokens()) ? handed_.data() : hidden_.data();
}

void ExpertCase::keep_hidden(const GroupedCase& grouped) {
  if (!hands_over(grouped)) return;
  launch_group_tokens(grouped.call(layout_), nullptr);
  launch_expert_gate_up(gate_up(grouped), nullptr);
  synchronize();
  const int64_t count = std::min(handed_.count(), hidden_.count());
  GLINT_CHECK_CUDA(cudaMemcpy(hidden_.data(), handed_.data(), static_cast<size_t>(count) * sizeof(float),
                              cudaMemcpyDeviceToDevice));
  clear_handed();
}

void ExpertCase::run(const GroupedCase& grouped, float* out, cudaStream_t stream) const {
  launch_group_tokens(grouped.call(layout_), stream);
  launch_expert_gate_up(gate_up(grouped), stream);
  launch_expert_down(down(grouped, out), stream);
}

std::vector<double> ExpertCase::plain_products(const HostGrouping& host, const uint8_t* weights,
                                               const uint8_t* activations, const int32_t* row_tokens, int64_t rows,
                                               int64_t k) const {
  const auto num_rows = static_cast<int64_t>(host.row_tokens.size());
  const DeviceArray<double> sums(std::max<int64_t>(num_rows * rows, 1));
  for (int32_t expert = 0; expert < layout_.num_local(); ++expert) {
    const int64_t first = host.expert_first[static_cast<size_t>(expert)];
    const int64_t count = host.expert_first[static_cast<size_t>(expert) + 1] - first;
    if (count == 0) continue;
    run_reference({sums.data() + first * rows, weights + expert * rows * k,
                   activations + (row_tokens == nullptr ? first * k : 0),
                   row_tokens == nullptr ? nullptr : row_tokens + first, rows, k, count, false});
  }
  return sums.to_host();
}

double ExpertCase::hidden_error(const HostGrouping& host, const GroupedCase& grouped) const {
  const auto num_rows = static_cast<int64_t>(host.row_tokens.size());
  if (num_rows == 0) return 0.0;
  const int32_t* tokens = grouped.device_row_tokens();
  const int64_t width = layout_.width;
  std::vector<double> hidden = plain_products(host, gate_->data(), activations_.data(), tokens, width, kHiddenSize);
  const std::vector<double> up = plain_products(host, up_->data(), activations_.data(), tokens, width, kHiddenSize);
  const std::vector<float> gate_scales = gate_scales_.to_host();
  const std::vector<float> up_scales = up_scales_.to_host();
  const std::vector<float> token_scales = token_scales_.to_host();
  for (size_t expert = 0; expert + 1 < host.expert_first.size(); ++expert) {
    for (int64_t row = host.expert_first[expert]; row < host.expert_first[expert + 1]; ++row) {
      const double token_scale = token_scales[static_cast<size_t>(host.row_tokens[static_cast<size_t>(row)])];
      for (int64_t unit = 0; unit < width; ++unit) {
        const auto index = static_cast<size_t>(row * width + unit);
        const auto scale_index = expert * static_cast<size_t>(width) + static_cast<size_t>(unit);
        const double gate = hidden[index] * token_scale * static_cast<double>(gate_scales[scale_index]);
        hidden[index] = gate / (1.0 + std::exp(-gate)) * up[index] * token_scale *
                        static_cast<double>(up_scales[scale_index]);
      }
    }
  }
  const DeviceArray<double> expected(hidden);
  const Difference difference = compare(hidden_.data(), expected.data(), num_rows * width);
  return difference.num_wrong > 0 ? NAN : difference.relative_error;
}

int64_t ExpertCase::wrong_codes(const HostGrouping& host, const GroupedCase& grouped) {
  const PackedTileShape shape = {plan_tiles(grouped.num_tokens()).down_tokens, layout_.width};
  const std::vector<uint8_t> records = records_.to_host();
  const std::vector<TokenTile> tiles = grouped.down_tiles();
  const std::vector<float> hidden = hidden_.to_host();
  const size_t num_rows = host.row_tokens.size();
  codes_.assign(num_rows * static_cast<size_t>(layout_.width), 0);
  code_scales_.assign(num_rows, 0.0F);
  size_t num_seen = 0;
  int64_t wrong = 0;
  for (size_t index = 0; num_seen < num_rows; ++index) {
    const TokenTile& tile = tiles[index];
    const uint8_t* record = records.data() + static_cast<int64_t>(index) * shape.bytes();
    for (int64_t slot = 0; slot < tile.row_count; ++slot, ++num_seen) {
      const int64_t row = tile.row_first + slot;
      const float* values = hidden.data() + row * layout_.width;
      float most = 0.0F;
      for (int64_t unit = 0; unit < layout_.width; ++unit) most = std::max(most, std::fabs(values[unit]));
      const float scale = most == 0.0F ? 1.0F : most / kE4m3Max;
      code_scales_[static_cast<size_t>(row)] = scale;
      const float stored = *reinterpret_cast<const float*>(record + scale_place(shape, slot));
      if (scale != stored) ++wrong;
      for (int64_t unit = 0; unit < layout_.width; ++unit) {
        const int64_t place = code_place(shape, tile.row_count, slot, unit);
        const uint8_t code = e4m3_from_float(values[unit] / scale);
        codes_[static_cast<size_t>(row * layout_.width + unit)] = code;
        if (code != record[place]) ++wrong;
      }
    }
  }
  return wrong;
}

double ExpertCase::out_error(const HostGrouping& host, const float* out, int64_t num_tokens) const {
  const std::vector<float> row_scales = down_scales_.to_host();
  const std::vector<float>& code_scales = code_scales_;
  if (codes_.empty()) return 0.0;
  const DeviceArray<uint8_t> codes(codes_);
  const std::vector<double> sums =
      plain_products(host, down_->data(), codes.data(), nullptr, kHiddenSize, layout_.width);
  std::vector<double> expected(static_cast<size_t>(num_tokens * kHiddenSize), 0.0);
  for (size_t expert = 0; expert + 1 < host.expert_first.size(); ++expert) {
    for (int64_t row = host.expert_first[expert]; row < host.expert_first[expert + 1]; ++row) {
      const auto place = static_cast<size_t>(row);
      const double factor = static_cast<double>(code_scales[place]) * static_cast<double>(host.row_weights[place]);
      double* target = expected.data() + host.row_tokens[place] * kHiddenSize;
      const float* scales = row_scales.data() + expert * kHiddenSize;
      for (int64_t unit = 0; unit < kHiddenSize; ++unit) {
        const double sum = sums[place * kHiddenSize + static_cast<size_t>(unit)];
        target[unit] += factor * static_cast<double>(scales[unit]) * sum;
      }
    }
  }
  const DeviceArray<double> reference(expected);
  const Difference difference = compare(out, reference.data(), num_tokens * kHiddenSize);
  return difference.num_wrong > 0 ? NAN : difference.relative_error;
}

}
