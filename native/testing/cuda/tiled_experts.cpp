#include <algorithm>
#include <bit>
#include <cstring>

#include "base/contract.h"
#include "cuda/check.h"
#include "testing/cuda/experts.h"

namespace {

using glint::testing::DeviceArray;
using glint::testing::Grouping;
using glint::testing::guarded;
using glint::testing::Operand;
using glint::testing::Runner;
using glint::testing::TestExperts;

glint::cuda::PackedTileShape packed_tile_shape(const TestExperts& test, int64_t num_tokens) {
  return {glint::cuda::plan_tiles(num_tokens).down_tokens,
          glint::cuda::plan_down_tile(test.width).packed_width(test.width)};
}

int64_t packed_tile_bytes(const TestExperts& test) {
  int64_t most = 0;
  for (int64_t tokens = 1; tokens <= test.num_tokens(); ++tokens) {
    const int64_t tiles =
        glint::cuda::max_token_tiles(tokens, test.grouping->experts_per_token, test.grouping->num_local());
    most = std::max(most, tiles * packed_tile_shape(test, tokens).bytes());
  }
  return most;
}

constexpr int64_t kWideTileTokens = 64;

int64_t fp8_place(const glint::cuda::PackedTileShape& shape, int64_t count, int64_t slot, int64_t unit) {
  if (shape.max_tokens == kWideTileTokens) {
    const int64_t lane = slot % 8 * 4 + unit % 16 / 4;
    const int64_t word = unit / 16 % 2 * 2 + slot % 16 / 8;
    return slot / 16 * 16 * shape.width + unit / 32 * 512 + lane * 16 + word * 4 + unit % 4;
  }
  return glint::cuda::kPackedTileHeadBytes + count * glint::cuda::kTokenMetadataBytes +
         (unit / 16 * count + slot) * 16 + unit % 16;
}

int64_t scale_place(const glint::cuda::PackedTileShape& shape, int64_t slot) {
  if (shape.max_tokens == kWideTileTokens) {
    return shape.metadata_offset() + glint::cuda::kPackedTileHeadBytes + (2 * shape.max_tokens + slot) * 4;
  }
  return glint::cuda::kPackedTileHeadBytes + slot * glint::cuda::kTokenMetadataBytes + 8;
}

int64_t streamed_rows(const TestExperts& test) {
  return glint::cuda::max_streamed_rows(test.num_tokens(), test.grouping->experts_per_token);
}

bool stores_rows(const TestExperts& test, glint::cuda::Multiply multiply) {
  return test.num_tokens() > glint::cuda::kSplitKTokens &&
         glint::cuda::stores_down_rows(test.hidden_size, test.width, multiply);
}

class TiledExperts {
 public:
  TiledExperts(const Runner& runner, const TestExperts& test)
      : test_(test),
        multiply_(runner.multiply()),
        grouping_(*test.grouping),
        operand_({.out = nullptr,
                  .scales = nullptr,
                  .in = test.in,
                  .count = test.num_tokens(),
                  .width = test.hidden_size,
                  .row_slices = 1,
                  .has_fp8 = 1}),
        gate_up_(test.num_matrices() * glint::cuda::packed_gate_up_bytes(test.width, test.hidden_size)),
        down_(test.num_matrices() * glint::cuda::packed_down_bytes(test.hidden_size, test.width)),
        gate_scales_(test.gate_scales, test.num_matrices() * test.width),
        up_scales_(test.up_scales, test.num_matrices() * test.width),
        down_scales_(test.down_scales, test.num_matrices() * test.hidden_size),
        hidden_((test.num_pairs() + test.num_tokens()) * test.width),
        streamed_(std::vector<float>(static_cast<size_t>(streamed_rows(test) * test.width))),
        packed_tiles_(packed_tile_bytes(test)),
        arrivals_(std::vector<uint32_t>{0}),
        tiles_taken_(std::vector<uint32_t>{0}),
        routed_(stores_rows(test, multiply_) ? max_rows(test.num_tokens()) * test.hidden_size : 1),
        out_(test.num_tokens() * test.hidden_size) {
    pack();
    operand_.launch();
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  }

  void launch(int64_t num_tokens) const {
    launch_gate_up(num_tokens);
    launch_down(num_tokens);
  }

  void run(Runner& runner) const {
    if (runner.is_timing()) time_gate_up(runner);
    runner.run([&] { launch(test_.num_tokens()); }, {&hidden_, &streamed_, &out_, &grouping_.touched()});
    grouping_.download_touched();
    out_.download(test_.out);
    require_streamed_is_clear();
    download_fp8();
    download_hidden();
  }

  void run_row_counts(Runner& runner) const {
    runner.run_row_counts([&](int64_t count) { launch(count); }, out_, test_.num_tokens());
    require_streamed_is_clear();
  }

 private:
  int64_t max_rows(int64_t num_tokens) const { return num_tokens * (test_.grouping->experts_per_token + 1); }
  bool is_streamed(int64_t num_tokens) const { return glint::cuda::streams_gate_up(num_tokens); }

  void launch_gate_up(int64_t num_tokens) const {
    grouping_.launch(num_tokens);
    glint::cuda::launch_expert_gate_up({.hidden = (is_streamed(num_tokens) ? streamed_ : hidden_).data(),
                                        .grouped = grouping_.grouped(),
                                        .packed_weights = gate_up_.data(),
                                        .gate_scales = gate_scales_.data(),
                                        .up_scales = up_scales_.data(),
                                        .activations = operand_.row_data(),
                                        .token_scales = operand_.scale_data(),
                                        .width = test_.width,
                                        .k_bytes = test_.hidden_size,
                                        .num_tokens = num_tokens,
                                        .max_tiles = grouping_.max_tiles(num_tokens),
                                        .multiply = multiply_,
                                        .tiles_taken = tiles_taken_.data()},
                                       nullptr);
  }

  void launch_down(int64_t num_tokens) const {
    glint::cuda::launch_expert_down({.out = out_.data(),
                                     .packed_tiles = packed_tiles_.data(),
                                     .arrivals = arrivals_.data(),
                                     .grouped = grouping_.grouped(),
                                     .packed_weights = down_.data(),
                                     .row_scales = down_scales_.data(),
                                     .hidden = (is_streamed(num_tokens) ? streamed_ : hidden_).data(),
                                     .width = test_.width,
                                     .hidden_size = test_.hidden_size,
                                     .num_tokens = num_tokens,
                                     .max_rows = max_rows(num_tokens),
                                     .streams_gate_up = is_streamed(num_tokens),
                                     .multiply = multiply_,
                                     .routed = stores_rows(test_, multiply_) ? routed_.data() : nullptr},
                                    nullptr);
  }

  void time_gate_up(Runner& runner) const {
    runner.run([&] { launch_gate_up(test_.num_tokens()); }, {});
    streamed_.fill(0, streamed_.byte_count());
  }

  void download_fp8() const {
    if (stores_rows(test_, multiply_)) return download_quantised_rows();
    if (test_.num_tokens() > glint::cuda::kDownBlockTokens) return;
    const glint::cuda::PackedTileShape shape = packed_tile_shape(test_, test_.num_tokens());
    const std::vector<uint8_t> packed_tiles = packed_tiles_.to_host();
    const std::vector<glint::cuda::TokenTile> tiles = grouping_.down_tiles();
    for (size_t index = 0; index < tiles.size(); ++index) {
      const uint8_t* packed_tile = packed_tiles.data() + static_cast<int64_t>(index) * shape.bytes();
      for (int64_t slot = 0; slot < tiles[index].row_count; ++slot) {
        const int64_t row = tiles[index].row_first + slot;
        std::memcpy(test_.fp8_scales + row, packed_tile + scale_place(shape, slot), sizeof(float));
        for (int64_t unit = 0; unit < test_.width; ++unit) {
          test_.fp8[row * test_.width + unit] =
              glint::float_from_e4m3(packed_tile[fp8_place(shape, tiles[index].row_count, slot, unit)]);
        }
      }
    }
  }

  void download_quantised_rows() const {
    const int64_t num_rows = max_rows(test_.num_tokens());
    const std::vector<uint8_t> packed = packed_tiles_.to_host();
    std::memcpy(test_.fp8_scales, packed.data() + num_rows * test_.width, num_rows * sizeof(float));
    std::transform(packed.begin(), packed.begin() + num_rows * test_.width, test_.fp8, glint::float_from_e4m3);
  }

  void require_streamed_is_clear() const {
    const std::vector<float> rows = streamed_.to_host();
    const auto found = std::ranges::find_if(rows, [](float value) { return std::bit_cast<uint32_t>(value) != 0U; });
    glint::require(found == rows.end(), GLINT_STATUS_INTERNAL, "down left value ", found - rows.begin(), " of ",
                   rows.size(), " that were streamed; it sets all that it took to zero");
  }

  void download_hidden() const {
    if (!is_streamed(test_.num_tokens())) return hidden_.download(test_.hidden);
    launch_gate_up(test_.num_tokens());
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<float> rows = streamed_.to_host();
    std::copy_n(rows.begin(), hidden_.count(), test_.hidden);
  }

  void pack() const {
    const int64_t bytes = test_.num_matrices() * test_.matrix_bytes();
    const DeviceArray<std::byte> gate(test_.gate_weights, bytes);
    const DeviceArray<std::byte> up(test_.up_weights, bytes);
    const DeviceArray<std::byte> down(test_.down_weights, bytes);
    glint::cuda::launch_pack_gate_up({.packed = gate_up_.data(),
                                      .weights = reinterpret_cast<const uint8_t*>(gate.data()),
                                      .up_weights = reinterpret_cast<const uint8_t*>(up.data()),
                                      .rows = test_.width,
                                      .k_bytes = test_.hidden_size,
                                      .num_matrices = test_.num_matrices()},
                                     nullptr);
    glint::cuda::launch_pack_down({.packed = down_.data(),
                                   .weights = reinterpret_cast<const uint8_t*>(down.data()),
                                   .up_weights = nullptr,
                                   .rows = test_.hidden_size,
                                   .k_bytes = test_.width,
                                   .num_matrices = test_.num_matrices()},
                                  nullptr);
    GLINT_CHECK_CUDA(cudaDeviceSynchronize());
  }

  const TestExperts& test_;
  glint::cuda::Multiply multiply_;
  Grouping grouping_;
  Operand operand_;
  DeviceArray<uint8_t> gate_up_;
  DeviceArray<uint8_t> down_;
  DeviceArray<float> gate_scales_;
  DeviceArray<float> up_scales_;
  DeviceArray<float> down_scales_;
  DeviceArray<float> hidden_;
  DeviceArray<float> streamed_;
  DeviceArray<uint8_t> packed_tiles_;
  DeviceArray<uint32_t> arrivals_;
  DeviceArray<uint32_t> tiles_taken_;
  DeviceArray<float> routed_;
  DeviceArray<float> out_;
};

}

extern "C" {

GLINT_API int32_t glint_testing_tiled_experts(Runner* runner, const TestExperts* test) {
  return guarded([&] { TiledExperts(*runner, *test).run(*runner); });
}

GLINT_API int32_t glint_testing_tiled_expert_row_counts(Runner* runner, const TestExperts* test) {
  return guarded([&] { TiledExperts(*runner, *test).run_row_counts(*runner); });
}
}
