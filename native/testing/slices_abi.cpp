#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "base/contract.h"
#include "cpu/backend.h"
#include "engine/engine.h"
#include "include/glint.h"
#include "model/ops.h"
#include "testing/guarded.h"

namespace {

using glint::Backend;
using glint::FeedForwardWeights;
using glint::LayerWeights;
using glint::Weight;
using glint::testing::guarded;
using glint::testing::last_error;

struct TestSlice {
  int32_t rank;
  int32_t role;
  int32_t layer;
  int32_t expert;
  int64_t row_first;
  int64_t rows;
  int64_t col_first;
  int64_t cols;
  int32_t is_held;
};

const Backend& backend_of(glint_engine* handle, int32_t rank) {
  glint::Ranks& ranks = glint::engine_of(handle)->ranks();
  glint::require_argument(rank >= 0 && rank < ranks.count(), "rank ", rank, " is not one of ", ranks.count());
  return *ranks.rank(rank).backend;
}

const Weight& part_of(const FeedForwardWeights& weights, int32_t role, int32_t gate_role) {
  return role == gate_role ? weights.gate : role == gate_role + 1 ? weights.up : weights.down;
}

const Weight* find_in_layer(const Backend& backend, const TestSlice& wanted) {
  const LayerWeights& layer = backend.layer(wanted.layer);
  switch (wanted.role) {
    case GLINT_ROLE_QUERY:
      return &layer.query;
    case GLINT_ROLE_KEY:
      return &layer.key;
    case GLINT_ROLE_VALUE:
      return &layer.value;
    case GLINT_ROLE_OUTPUT:
      return &layer.output;
    case GLINT_ROLE_ROUTER:
      return &layer.router;
    default:
      break;
  }
  if (wanted.role >= GLINT_ROLE_SHARED_GATE) return &part_of(layer.shared, wanted.role, GLINT_ROLE_SHARED_GATE);
  if (wanted.expert < 0) return &part_of(layer.dense, wanted.role, GLINT_ROLE_GATE);
  const int32_t index = wanted.expert - backend.slice.expert_first;
  if (index < 0 || wanted.expert >= backend.slice.expert_last) return nullptr;
  return &part_of(layer.experts.at(static_cast<size_t>(index)), wanted.role, GLINT_ROLE_GATE);
}

const Weight* find_weight(const Backend& backend, const TestSlice& wanted) {
  const glint::MtpWeights& mtp = backend.weights.mtp;
  const bool is_mtp = wanted.layer == backend.model.num_layers;
  if (wanted.role == GLINT_ROLE_EMBEDDING) return is_mtp ? &mtp.embedding : &backend.weights.embedding;
  if (wanted.role == GLINT_ROLE_LM_HEAD) return is_mtp ? &mtp.head : &backend.weights.lm_head;
  if (wanted.role == GLINT_ROLE_EH_PROJ) return &mtp.eh_proj;
  return find_in_layer(backend, wanted);
}

const float* find_bias(const LayerWeights& layer, int32_t role) {
  return role == GLINT_ROLE_QUERY ? layer.query_bias : role == GLINT_ROLE_KEY ? layer.key_bias : layer.value_bias;
}

}

extern "C" {

GLINT_API const char* glint_testing_slices_error(void) { return last_error.c_str(); }

GLINT_API int32_t glint_testing_rank_slice(glint_engine* handle, TestSlice* slice) {
  return guarded([&] {
    const Weight* weight = find_weight(backend_of(handle, slice->rank), *slice);
    slice->is_held = weight == nullptr ? 0 : 1;
    if (weight == nullptr) return;
    slice->row_first = weight->row_first;
    slice->rows = weight->rows;
    slice->col_first = weight->col_first;
    slice->cols = weight->cols;
  });
}

GLINT_API int32_t glint_testing_rank_weight(glint_engine* handle, const TestSlice* slice, std::byte* elements,
                                            float* scales) {
  return guarded([&] {
    const Weight* weight = find_weight(backend_of(handle, slice->rank), *slice);
    glint::require_argument(weight != nullptr, "rank ", slice->rank, " holds nothing of expert ", slice->expert);
    const int64_t row_bytes = weight->cols * weight->element_bytes();
    for (int64_t row = 0; row < weight->rows; ++row) {
      std::copy_n(weight->row(row), row_bytes, elements + row * row_bytes);
      for (int64_t col = 0; col < weight->cols; ++col) scales[row * weight->cols + col] = weight->scale_at(row, col);
    }
  });
}

GLINT_API int32_t glint_testing_rank_bias(glint_engine* handle, const TestSlice* slice, float* out) {
  return guarded([&] {
    const Backend& backend = backend_of(handle, slice->rank);
    const float* bias = find_bias(backend.layer(slice->layer), slice->role);
    glint::require_argument(bias != nullptr, "role ", slice->role, " has no bias in this model");
    std::copy_n(bias, find_in_layer(backend, *slice)->rows, out);
  });
}

GLINT_API int32_t glint_testing_rank_logits(glint_engine* handle, float* out, const int32_t* rows, int64_t count) {
  return guarded([&] {
    glint::Ranks& ranks = glint::engine_of(handle)->ranks();
    ranks.run([&](glint::Rank& rank) { rank.forward->compute_logits({rows, static_cast<size_t>(count)}); });
    glint::ops::read_logits(ranks.first_backend(), out, count);
  });
}

GLINT_API int32_t glint_testing_poison_rank_pages(glint_engine* handle) {
  return guarded([&] {
    glint::Ranks& ranks = glint::engine_of(handle)->ranks();
    for (int32_t rank = 0; rank < ranks.count(); ++rank) {
      glint::ops::fill_pages(*ranks.rank(rank).backend, std::byte{0xff});
    }
  });
}
}
