#pragma once

#include <numbers>

#include "cpu/lanes.h"

namespace glint {

namespace {

template <typename Isa>
class LaneAttention {
 public:
  using Lane = Lanes<Isa::kLanes>;
  using Floats = typename Lane::Floats;
  static constexpr int64_t kQueriesAtOnce = 4;
  static constexpr int64_t kScoreStride = kSplitPositions + kOperandAlignment;

  static void attend(const AttentionTile& tile, std::byte* scratch) {
    const Workspace work(tile, scratch);
    const int64_t queries = tile.row_count * tile.group_heads;
    for (int64_t query = 0; query < queries; ++query) {
      work.exponent[query] = -std::numeric_limits<float>::infinity();
      work.weight_sum[query] = 0.0F;
      std::fill_n(work.sums + query * tile.head_dim, tile.head_dim, 0.0F);
    }
    const int64_t positions = tile.first_position + tile.row_count;
    for (int64_t first = 0; first < positions; first += kSplitPositions) {
      const int64_t last = std::min(first + kSplitPositions, positions);
      score_split(tile, work, first, last);
      for (int64_t query = 0; query < queries; ++query) weigh_split(tile, work, query, first, last);
      sum_split(tile, work, first, last);
      for (int64_t query = 0; query < queries; ++query) reduce_split(tile, work, query, first);
    }
    for (int64_t query = 0; query < queries; ++query) {
      float* out = tile.out + query_offset(tile, query);
      for (int64_t dim = 0; dim < tile.head_dim; ++dim) {
        out[dim] = work.sums[query * tile.head_dim + dim] / work.weight_sum[query];
      }
    }
  }

 private:
  struct Workspace {
    Workspace(const AttentionTile& tile, std::byte* scratch) {
      const int64_t queries = tile.row_count * tile.group_heads;
      auto* next = reinterpret_cast<float*>(scratch);
      const auto take = [&next](int64_t count) {
        float* start = next;
        next += round_up(count, kOperandAlignment);
        return start;
      };
      scores = take(queries * kScoreStride);
      sums = take(queries * tile.head_dim);
      split_sums = take(queries * tile.head_dim);
      slab = take(round_up(tile.page_tokens, Isa::kLanes) * tile.head_dim);
      exponent = take(queries);
      weight_sum = take(queries);
      split_exponent = take(queries);
      split_weight_sum = take(queries);
    }
    float* scores;
    float* sums;
    float* split_sums;
    float* slab;
    float* exponent;
    float* weight_sum;
    float* split_exponent;
    float* split_weight_sum;
  };

  static int64_t query_offset(const AttentionTile& tile, int64_t query) {
    return query / tile.group_heads * tile.row_stride + query % tile.group_heads * tile.head_dim;
  }

  static int64_t visible_positions(const AttentionTile& tile, int64_t query, int64_t first, int64_t last) {
    const int64_t end = tile.first_position + query / tile.group_heads + 1;
    return std::max<int64_t>(0, std::min(end, last) - first);
  }

  static const float* load_page(const AttentionTile& tile, const std::byte* base, int64_t page, int64_t count,
                                float* slab) {
    const std::byte* source = base + tile.pages[page] * tile.page_bytes;
    if (tile.dtype == GLINT_DTYPE_F32) return reinterpret_cast<const float*>(source);
    const int64_t elements = count * tile.head_dim;
    int64_t index = 0;
    for (; index + Isa::kLanes <= elements; index += Isa::kLanes) {
      Lane::store(slab + index, Isa::load_bf16(source + 2 * index));
    }
    for (; index < elements; ++index) slab[index] = float_from_bf16(reinterpret_cast<const uint16_t*>(source)[index]);
    return slab;
  }

  static const float* load_keys(const AttentionTile& tile, int64_t page, float* slab) {
    const int64_t stride = round_up(tile.page_tokens, Isa::kLanes);
    if (stride == tile.page_tokens) return load_page(tile, tile.keys, page, tile.page_tokens, slab);
    const std::byte* source = tile.keys + tile.pages[page] * tile.page_bytes;
    for (int64_t dim = 0; dim < tile.head_dim; ++dim) {
      for (int64_t key = 0; key < stride; ++key) {
        const int64_t index = dim * tile.page_tokens + key;
        slab[dim * stride + key] = key < tile.page_tokens ? stored_value(tile, source, index) : 0.0F;
      }
    }
    return slab;
  }

  static float stored_value(const AttentionTile& tile, const std::byte* source, int64_t index) {
    if (tile.dtype == GLINT_DTYPE_F32) return reinterpret_cast<const float*>(source)[index];
    return float_from_bf16(reinterpret_cast<const uint16_t*>(source)[index]);
  }

  static void score_split(const AttentionTile& tile, const Workspace& work, int64_t first, int64_t last) {
    const int64_t queries = tile.row_count * tile.group_heads;
    for (int64_t start = first; start < last; start += tile.page_tokens) {
      const int64_t count = std::min(tile.page_tokens, last - start);
      const float* keys = load_keys(tile, start / tile.page_tokens, work.slab);
      for (int64_t query = 0; query < queries; query += kQueriesAtOnce) {
        const int64_t query_last = std::min(query + kQueriesAtOnce, queries) - 1;
        if (visible_positions(tile, query_last, start, start + count) == 0) continue;
        score_page(tile, work.scores + (start - first), keys, count, query, query_last);
      }
    }
  }

  static void score_page(const AttentionTile& tile, float* scores, const float* keys, int64_t count,
                         int64_t query_first, int64_t query_last) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(tile.head_dim));
    const int64_t stride = round_up(tile.page_tokens, Isa::kLanes);
    const float* values[kQueriesAtOnce];
    for (int64_t index = 0; index < kQueriesAtOnce; ++index) {
      values[index] = tile.query + query_offset(tile, std::min(query_first + index, query_last));
    }
    for (int64_t key = 0; key < count; key += Isa::kLanes) {
      Floats sums[kQueriesAtOnce] = {};
      for (int64_t dim = 0; dim < tile.head_dim; ++dim) {
        const Floats lane_keys = Lane::load(keys + dim * stride + key);
#pragma GCC unroll 8
        for (int64_t index = 0; index < kQueriesAtOnce; ++index) {
          sums[index] = Isa::multiply_add(Isa::broadcast(values[index][dim]), lane_keys, sums[index]);
        }
      }
      for (int64_t query = query_first; query <= query_last; ++query) {
        Lane::store(scores + query * kScoreStride + key, sums[query - query_first] * scale);
      }
    }
  }

  static void weigh_split(const AttentionTile& tile, const Workspace& work, int64_t query, int64_t first,
                          int64_t last) {
    const int64_t count = visible_positions(tile, query, first, last);
    float* scores = work.scores + query * kScoreStride;
    float highest = -std::numeric_limits<float>::infinity();
    for (int64_t index = 0; index < count; ++index) highest = std::max(highest, scores[index]);
    for (int64_t index = count; index < round_up(count, Isa::kLanes); ++index) scores[index] = -1000.0F + highest;
    const double power = static_cast<double>(highest) * std::numbers::log2e;
    const double exponent = std::ceil(power);
    const auto largest_weight = static_cast<float>(std::exp2(power - exponent));
    Floats sums = {};
    const Floats zeros = {};
    for (int64_t index = 0; index < count; index += Isa::kLanes) {
      Floats weights = Lane::exponential(Lane::load(scores + index) - highest, largest_weight);
      for (int64_t lane = count - index; lane < Isa::kLanes; ++lane) weights[lane] = zeros[lane];
      sums += weights;
      Lane::store(scores + index, weights);
    }
    if (tile.dtype == GLINT_DTYPE_BF16) {
      for (int64_t index = 0; index < count; ++index) scores[index] = round_to_bf16(scores[index]);
    }
    work.split_exponent[query] = static_cast<float>(exponent);
    work.split_weight_sum[query] = Isa::sum(sums);
  }

  static void sum_split(const AttentionTile& tile, const Workspace& work, int64_t first, int64_t last) {
    const int64_t queries = tile.row_count * tile.group_heads;
    std::fill_n(work.split_sums, queries * tile.head_dim, 0.0F);
    for (int64_t start = first; start < last; start += tile.page_tokens) {
      const int64_t count = std::min(tile.page_tokens, last - start);
      const float* values = load_page(tile, tile.values, start / tile.page_tokens, count, work.slab);
      for (int64_t query = 0; query < queries; ++query) {
        const float* weights = work.scores + query * kScoreStride + (start - first);
        const int64_t visible = visible_positions(tile, query, start, start + count);
        add_values(work.split_sums + query * tile.head_dim, weights, values, visible, tile.head_dim);
      }
    }
  }

  static void add_values(float* sums, const float* weights, const float* values, int64_t count, int64_t head_dim) {
    constexpr int64_t kStep = Isa::kLanes * 4;
    int64_t dim = 0;
    for (; dim + kStep <= head_dim; dim += kStep) {
      Floats parts[4];
      for (int part = 0; part < 4; ++part) parts[part] = Lane::load(sums + dim + part * Isa::kLanes);
      for (int64_t index = 0; index < count; ++index) {
        const float* row = values + index * head_dim + dim;
        const Floats weight = Isa::broadcast(weights[index]);
        for (int part = 0; part < 4; ++part) {
          parts[part] = Isa::multiply_add(weight, Lane::load(row + part * Isa::kLanes), parts[part]);
        }
      }
      for (int part = 0; part < 4; ++part) Lane::store(sums + dim + part * Isa::kLanes, parts[part]);
    }
    for (; dim < head_dim; ++dim) {
      for (int64_t index = 0; index < count; ++index) sums[dim] += weights[index] * values[index * head_dim + dim];
    }
  }

  static void reduce_split(const AttentionTile& tile, const Workspace& work, int64_t query, int64_t first) {
    if (visible_positions(tile, query, first, first + 1) == 0) return;
    const float exponent = std::max(work.exponent[query], work.split_exponent[query]);
    const float keep = std::exp2(work.exponent[query] - exponent);
    const float take = std::exp2(work.split_exponent[query] - exponent);
    float* sums = work.sums + query * tile.head_dim;
    const float* split_sums = work.split_sums + query * tile.head_dim;
    for (int64_t dim = 0; dim < tile.head_dim; ++dim) sums[dim] = sums[dim] * keep + split_sums[dim] * take;
    work.weight_sum[query] = work.weight_sum[query] * keep + work.split_weight_sum[query] * take;
    work.exponent[query] = exponent;
  }
};

template <typename Isa>
void lane_swiglu(float* out, const float* gate, const float* up, int64_t count) {
  using Lane = Lanes<Isa::kLanes>;
  using Floats = typename Lane::Floats;
  const auto activate = [](Floats g, Floats u) { return g / (1.0F + Lane::exponential(-g)) * u; };
  int64_t index = 0;
  for (; index + Isa::kLanes <= count; index += Isa::kLanes) {
    Lane::store(out + index, activate(Lane::load(gate + index), Lane::load(up + index)));
  }
  if (index == count) return;
  float gates[Isa::kLanes] = {};
  float ups[Isa::kLanes] = {};
  std::copy(gate + index, gate + count, gates);
  std::copy(up + index, up + count, ups);
  const Floats rest = activate(Lane::load(gates), Lane::load(ups));
  for (int64_t lane = 0; index + lane < count; ++lane) out[index + lane] = rest[lane];
}

}

}
