#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/contract.h"
#include "engine/engine.h"
#include "include/glint.h"
#include "model/ops.h"
#include "testing/guarded.h"

namespace {

using glint::testing::guarded;
using glint::testing::last_error;

struct LayerRows {
  std::vector<float> seen;
  std::vector<float> replacement;
};

class HiddenRecord {
 public:
  HiddenRecord(int64_t num_layers, int64_t hidden_size)
      : layers_(static_cast<size_t>(num_layers) + 1), hidden_size_(static_cast<size_t>(hidden_size)) {}

  void take(glint::Backend& backend, glint::StepState& step, int64_t layer, int64_t count) {
    LayerRows& rows = layers_.at(static_cast<size_t>(layer));
    const size_t floats = static_cast<size_t>(count) * hidden_size_;
    const size_t first = rows.seen.size();
    rows.seen.resize(first + floats);
    glint::ops::read_hidden(backend, step, rows.seen.data() + first);
    if (rows.replacement.empty()) return;
    if (first + floats > rows.replacement.size()) {
      throw std::out_of_range(glint::text("layer ", layer, " has ", rows.replacement.size() / hidden_size_,
                                          " rows to put in, but ", (first + floats) / hidden_size_, " came by"));
    }
    glint::ops::write_hidden(backend, step, rows.replacement.data() + first);
  }

  void replace(int64_t layer, const float* rows, int64_t count) {
    layers_.at(static_cast<size_t>(layer)).replacement.assign(rows, rows + static_cast<size_t>(count) * hidden_size_);
  }

  const std::vector<float>& seen(int64_t layer) const { return layers_.at(static_cast<size_t>(layer)).seen; }
  int64_t hidden_size() const { return static_cast<int64_t>(hidden_size_); }

 private:
  std::vector<LayerRows> layers_;
  size_t hidden_size_;
};

struct TestTap {
  std::shared_ptr<HiddenRecord> record;
};

std::shared_ptr<glint::Engine> one_rank_engine(glint_engine* handle) {
  std::shared_ptr<glint::Engine> engine = glint::engine_of(handle);
  glint::require_argument(engine->ranks().count() == 1, "taps need one rank, this engine has ",
                          engine->ranks().count());
  return engine;
}

}

extern "C" {

GLINT_API const char* glint_testing_taps_error(void) { return last_error.c_str(); }

GLINT_API TestTap* glint_testing_tap_new(glint_engine* handle) {
  std::unique_ptr<TestTap> tap;
  guarded([&] {
    const std::shared_ptr<glint::Engine> engine = one_rank_engine(handle);
    auto record = std::make_shared<HiddenRecord>(engine->model().num_layers, engine->model().hidden_size);
    engine->forward().set_tap(
        [record, &backend = engine->backend()](glint::StepState& step, int64_t layer, int64_t count) {
          record->take(backend, step, layer, count);
        });
    tap = std::make_unique<TestTap>(TestTap{std::move(record)});
  });
  return tap.release();
}

GLINT_API int32_t glint_testing_tap_remove(glint_engine* handle) {
  return guarded([&] { one_rank_engine(handle)->forward().set_tap({}); });
}

GLINT_API void glint_testing_tap_free(TestTap* tap) { delete tap; }

GLINT_API int32_t glint_testing_tap_replace(TestTap* tap, int64_t layer, const float* rows, int64_t count) {
  return guarded([&] { tap->record->replace(layer, rows, count); });
}

GLINT_API int64_t glint_testing_tap_count(TestTap* tap, int64_t layer) {
  return static_cast<int64_t>(tap->record->seen(layer).size()) / tap->record->hidden_size();
}

GLINT_API void glint_testing_tap_read(TestTap* tap, int64_t layer, float* rows) {
  std::ranges::copy(tap->record->seen(layer), rows);
}

GLINT_API int32_t glint_testing_logits(glint_engine* handle, float* out, const int32_t* rows, int64_t count) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> engine = one_rank_engine(handle);
    engine->forward().compute_logits({rows, static_cast<size_t>(count)});
    glint::ops::read_logits(engine->backend(), out, count);
  });
}

GLINT_API int32_t glint_testing_draft_logits(glint_engine* handle, float* out, const int32_t* tokens, int32_t count,
                                             int32_t with_hidden, int32_t page_tokens, int32_t first_position) {
  return guarded([&] {
    const std::shared_ptr<glint::Engine> engine = glint::engine_of(handle);
    std::vector<int32_t> pages(static_cast<size_t>((first_position + count) / page_tokens + 1));
    std::iota(pages.rbegin(), pages.rend(), 0);
    const auto run = [&](int32_t first, int32_t row_count, int32_t first_row, bool is_first_draft) {
      std::vector<int32_t> positions(static_cast<size_t>(row_count));
      std::iota(positions.begin(), positions.end(), first_position + first);
      std::vector<int32_t> rows(positions.size());
      std::iota(rows.begin(), rows.end(), first_row);
      const std::vector<int32_t> known(positions.size(), glint::kNoSampledRow);
      const std::vector<glint::BatchRequest> requests = {{.row_first = 0,
                                                          .row_count = row_count,
                                                          .first_position = first_position + first,
                                                          .context_first = first_position,
                                                          .pages = pages.data()}};
      const glint::StepBatch batch{.tokens = {tokens + first, positions.size()},
                                   .sampled_rows = known,
                                   .positions = positions,
                                   .requests = requests,
                                   .logit_rows = {}};
      engine->ranks().run([&](glint::Rank& rank) { rank.forward->run_mtp(batch, rows, {}, is_first_draft); });
    };
    const auto read = [&](int32_t first, int32_t row) {
      const std::vector<int32_t> wanted = {row};
      engine->ranks().run([&](glint::Rank& rank) { rank.forward->compute_draft_logits(wanted); });
      glint::ops::read_logits(engine->backend(), out + int64_t{first + row} * engine->model().vocab_size, 1);
    };
    run(0, with_hidden, first_position - 1, true);
    for (int32_t row = 0; row < with_hidden; ++row) read(0, row);
    for (int32_t token = with_hidden; token < count; ++token) {
      run(token, 1, token == with_hidden ? with_hidden - 1 : 0, false);
      read(token, 0);
    }
  });
}

GLINT_API int32_t glint_testing_poison_pages(glint_engine* handle) {
  return guarded([&] { glint::ops::fill_pages(one_rank_engine(handle)->backend(), std::byte{0xff}); });
}
}
