#pragma once

#include <numbers>
#include <type_traits>

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
    for (int64_t first = tile.first_split(); first < positions; first += kSplitPositions) {
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

  template <typename Visit>
  static void with_queries(int64_t queries, const Visit& visit) {
    static_assert(kQueriesAtOnce == 4);
    if (queries == 4) return visit(std::integral_constant<int, 4>{});
    if (queries == 3) return visit(std::integral_constant<int, 3>{});
    if (queries == 2) return visit(std::integral_constant<int, 2>{});
    visit(std::integral_constant<int, 1>{});
  }

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

  static int64_t first_page(const AttentionTile& tile, int64_t first) {
    return first + tile.num_masked(first) / tile.page_tokens * tile.page_tokens;
  }

  static void score_split(const AttentionTile& tile, const Workspace& work, int64_t first, int64_t last) {
    const int64_t queries = tile.row_count * tile.group_heads;
    for (int64_t start = first_page(tile, first); start < last; start += tile.page_tokens) {
      const int64_t count = std::min(tile.page_tokens, last - start);
      const float* keys = load_keys(tile, start / tile.page_tokens, work.slab);
      for (int64_t query = 0; query < queries; query += kQueriesAtOnce) {
        const int64_t query_last = std::min(query + kQueriesAtOnce, queries) - 1;
        if (visible_positions(tile, query_last, start, start + count) == 0) continue;
        with_queries(query_last - query + 1, [&]<int kQueries>(std::integral_constant<int, kQueries>) {
          score_queries<kQueries>(tile, work.scores + (start - first), keys, count, query);
        });
      }
    }
  }

  template <int kQueries>
  static void score_queries(const AttentionTile& tile, float* scores, const float* keys, int64_t count,
                            int64_t query_first) {
    int64_t key = 0;
    for (; key + Isa::kLanes < count; key += 2 * Isa::kLanes) {
      score_keys<kQueries, 2>(tile, scores, keys, key, query_first);
    }
    if (key < count) score_keys<kQueries, 1>(tile, scores, keys, key, query_first);
  }

  template <int kQueries, int kVectors>
  static void score_keys(const AttentionTile& tile, float* scores, const float* keys, int64_t key,
                         int64_t query_first) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(tile.head_dim));
    const int64_t stride = round_up(tile.page_tokens, Isa::kLanes);
    const float* values[kQueries];
    for (int query = 0; query < kQueries; ++query) values[query] = tile.query + query_offset(tile, query_first + query);
    Floats sums[kQueries][kVectors] = {};
    for (int64_t dim = 0; dim < tile.head_dim; ++dim) {
      const float* source = keys + dim * stride + key;
#pragma GCC unroll 4
      for (int query = 0; query < kQueries; ++query) {
        const Floats value = Isa::broadcast(values[query][dim]);
#pragma GCC unroll 2
        for (int part = 0; part < kVectors; ++part) {
          sums[query][part] = Isa::multiply_add(value, Lane::load(source + part * Isa::kLanes), sums[query][part]);
        }
      }
    }
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 2
      for (int part = 0; part < kVectors; ++part) {
        Lane::store(scores + (query_first + query) * kScoreStride + key + part * Isa::kLanes,
                    sums[query][part] * scale);
      }
    }
  }

  static float highest_of(const float* scores, int64_t count) {
    float highest = -std::numeric_limits<float>::infinity();
    Floats lanes = Lane::broadcast(highest);
    int64_t index = 0;
    for (; index + Isa::kLanes <= count; index += Isa::kLanes) {
      const Floats values = Lane::load(scores + index);
      lanes = values > lanes ? values : lanes;
    }
    for (int lane = 0; lane < Isa::kLanes; ++lane) highest = std::max(highest, lanes[lane]);
    for (; index < count; ++index) highest = std::max(highest, scores[index]);
    return highest;
  }

  static void weigh_split(const AttentionTile& tile, const Workspace& work, int64_t query, int64_t first,
                          int64_t last) {
    const int64_t count = visible_positions(tile, query, first, last);
    float* scores = work.scores + query * kScoreStride;
    const int64_t masked = std::min(tile.num_masked(first), count);
    const float highest = highest_of(scores + masked, count - masked);
    std::fill_n(scores, masked, highest);
    for (int64_t index = count; index < round_up(count, Isa::kLanes); ++index) scores[index] = -1000.0F + highest;
    const double power = static_cast<double>(highest) * std::numbers::log2e;
    const double exponent = std::ceil(power);
    const auto largest_weight = static_cast<float>(std::exp2(power - exponent));
    Floats sums = {};
    const Floats zeros = {};
    for (int64_t index = 0; index < count; index += Isa::kLanes) {
      Floats weights = Lane::exponential(Lane::load(scores + index) - highest, largest_weight);
      for (int64_t lane = count - index; lane < Isa::kLanes; ++lane) weights[lane] = zeros[lane];
      for (int64_t lane = 0; lane < std::min<int64_t>(masked - index, Isa::kLanes); ++lane) weights[lane] = zeros[lane];
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
    for (int64_t start = first_page(tile, first); start < last; start += tile.page_tokens) {
      const int64_t count = std::min(tile.page_tokens, last - start);
      const int64_t masked = tile.num_masked(start);
      const float* values =
          load_page(tile, tile.values, start / tile.page_tokens, count, work.slab) + masked * tile.head_dim;
      const float* weights = work.scores + (start - first) + masked;
      const auto visible_to = [&](int64_t query) {
        return visible_positions(tile, query, start + masked, start + count);
      };
      int64_t width = 0;
      for (int64_t query = 0; query < queries; query += width) {
        const int64_t most = std::min(kQueriesAtOnce, queries - query);
        for (width = 1; width < most && visible_to(query + width) == visible_to(query);) ++width;
        with_queries(width, [&]<int kQueries>(std::integral_constant<int, kQueries>) {
          add_values<kQueries>(work.split_sums + query * tile.head_dim, weights + query * kScoreStride, values,
                               visible_to(query), tile.head_dim);
        });
      }
    }
  }

  template <int kQueries>
  static void add_values(float* sums, const float* weights, const float* values, int64_t count, int64_t head_dim) {
    constexpr int64_t kWholeStep = Isa::kLanes * 4;
    constexpr int kParts = kQueries == 1 ? 4 : 2;
    const int64_t whole = head_dim / kWholeStep * kWholeStep;
    for (int64_t dim = 0; dim < whole; dim += kParts * Isa::kLanes) {
      add_value_lanes<kQueries, kParts>(sums + dim, weights, values + dim, count, head_dim);
    }
    for (int query = 0; query < kQueries; ++query) {
      for (int64_t dim = whole; dim < head_dim; ++dim) {
        float& sum = sums[query * head_dim + dim];
        for (int64_t index = 0; index < count; ++index) {
          sum += weights[query * kScoreStride + index] * values[index * head_dim + dim];
        }
      }
    }
  }

  template <int kQueries, int kParts>
  static void add_value_lanes(float* sums, const float* weights, const float* values, int64_t count, int64_t head_dim) {
    Floats parts[kQueries][kParts];
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        parts[query][part] = Lane::load(sums + query * head_dim + part * Isa::kLanes);
      }
    }
    for (int64_t index = 0; index < count; ++index) {
#pragma GCC unroll 4
      for (int query = 0; query < kQueries; ++query) {
        const Floats weight = Isa::broadcast(weights[query * kScoreStride + index]);
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          const Floats value = Lane::load(values + index * head_dim + part * Isa::kLanes);
          parts[query][part] = Isa::multiply_add(weight, value, parts[query][part]);
        }
      }
    }
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        Lane::store(sums + query * head_dim + part * Isa::kLanes, parts[query][part]);
      }
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
