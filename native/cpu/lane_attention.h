#pragma once

#include <numbers>
#include <type_traits>

#include "cpu/lanes.h"
#include "cpu/row_kernels.h"

namespace glint {

namespace {

template <typename Isa>
class LaneAttention {
 public:
  using Lane = Lanes<Isa::kLanes>;
  using Floats = typename Lane::Floats;
  static constexpr int64_t kQueriesAtOnce = 4;
  static constexpr int64_t kScoreStride = kSplitPositions + kOperandAlignment;
  static constexpr int64_t kQueriesFromPages = Isa::kLanes == 16 ? 16 : 8;
  static constexpr int kMostVectors = Isa::kLanes == 16 ? 4 : 2;

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

  struct FloatValues {
    const float* data;
    Floats load(int64_t index) const { return Lane::load(data + index); }
    float at(int64_t index) const { return data[index]; }
    FloatValues after(int64_t count) const { return {data + count}; }
    void prefetch(int64_t) const {}
  };

  struct Bf16Values {
    const std::byte* data;
    Floats load(int64_t index) const { return Isa::load_bf16(data + 2 * index); }
    float at(int64_t index) const { return float_from_bf16(reinterpret_cast<const uint16_t*>(data)[index]); }
    Bf16Values after(int64_t count) const { return {data + 2 * count}; }
    void prefetch(int64_t index) const { __builtin_prefetch(data + 2 * index); }
  };

  struct Positions {
    int64_t first;
    int64_t last;
  };

  struct SeenPositions {
    int64_t split_first;
    int64_t first;
    int64_t last;
  };

  struct KeyShape {
    int64_t count;
    int64_t stride;
  };

  struct KeyPlace {
    int64_t key;
    int64_t last_key;
    int64_t query;
    int64_t stride;
  };

  struct ValuePlace {
    SeenPositions seen;
    int64_t dim;
  };

  static const std::byte* page_at(const AttentionTile& tile, const std::byte* base, int64_t page) {
    return base + tile.pages[page] * tile.page_bytes;
  }

  static bool reads_pages(const AttentionTile& tile) {
    return tile.dtype == GLINT_DTYPE_BF16 && tile.page_tokens % Isa::kLanes == 0 &&
           tile.row_count * tile.group_heads <= kQueriesFromPages;
  }

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
    const std::byte* source = page_at(tile, base, page);
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
    const std::byte* source = page_at(tile, tile.keys, page);
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
    if (reads_pages(tile)) return score_positions(tile, work.scores, {first, last});
    const int64_t stride = round_up(tile.page_tokens, Isa::kLanes);
    for (int64_t start = first_page(tile, first); start < last; start += tile.page_tokens) {
      const int64_t count = std::min(tile.page_tokens, last - start);
      const float* keys = load_keys(tile, start / tile.page_tokens, work.slab);
      const auto keys_at = [&](int64_t key) { return FloatValues{keys + key}; };
      const auto is_seen = [&](int64_t query) { return visible_positions(tile, query, start, start + count) > 0; };
      score_keys(tile, work.scores + (start - first), keys_at, is_seen, {count, stride});
    }
  }

  static void score_positions(const AttentionTile& tile, float* scores, Positions positions) {
    const int64_t start = first_page(tile, positions.first);
    const auto keys_at = [&](int64_t key) {
      const int64_t position = start + key;
      const std::byte* page = page_at(tile, tile.keys, position / tile.page_tokens);
      return Bf16Values{page}.after(position % tile.page_tokens);
    };
    const auto is_seen = [](int64_t) { return true; };
    score_keys(tile, scores + (start - positions.first), keys_at, is_seen,
               {positions.last - start, tile.page_tokens});
  }

  template <typename KeysAt, typename IsSeen>
  static void score_keys(const AttentionTile& tile, float* scores, const KeysAt& keys_at, const IsSeen& is_seen,
                         KeyShape shape) {
    const int64_t queries = tile.row_count * tile.group_heads;
    for (int64_t query = 0; query < queries; query += kQueriesAtOnce) {
      const int64_t width = std::min(kQueriesAtOnce, queries - query);
      if (!is_seen(query + width - 1)) continue;
      with_queries(width, [&]<int kQueries>(std::integral_constant<int, kQueries>) {
        int64_t key = 0;
        for (; key + (kMostVectors - 1) * Isa::kLanes < shape.count; key += kMostVectors * Isa::kLanes) {
          score_vectors<kQueries, kMostVectors>(tile, scores, keys_at, {key, shape.count - 1, query, shape.stride});
        }
        for (; key < shape.count; key += Isa::kLanes) {
          score_vectors<kQueries, 1>(tile, scores, keys_at, {key, shape.count - 1, query, shape.stride});
        }
      });
    }
  }

  template <int kQueries, int kVectors, typename KeysAt>
  static void score_vectors(const AttentionTile& tile, float* scores, const KeysAt& keys_at, KeyPlace place) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(tile.head_dim));
    const float* values[kQueries];
    decltype(keys_at(0)) keys[kVectors];
    decltype(keys_at(0)) later_keys[kVectors];
    for (int query = 0; query < kQueries; ++query) values[query] = tile.query + query_offset(tile, place.query + query);
    for (int part = 0; part < kVectors; ++part) {
      const int64_t key = place.key + part * Isa::kLanes;
      keys[part] = keys_at(key);
      later_keys[part] = keys_at(std::min(key + kVectors * Isa::kLanes, place.last_key));
    }
    Floats sums[kQueries][kVectors] = {};
    for (int64_t dim = 0; dim < tile.head_dim; ++dim) {
      Floats parts[kVectors];
#pragma GCC unroll 4
      for (int part = 0; part < kVectors; ++part) {
        parts[part] = keys[part].load(dim * place.stride);
        later_keys[part].prefetch(dim * place.stride);
      }
#pragma GCC unroll 4
      for (int query = 0; query < kQueries; ++query) {
        const Floats value = Isa::broadcast(values[query][dim]);
#pragma GCC unroll 4
        for (int part = 0; part < kVectors; ++part) {
          sums[query][part] = Isa::multiply_add(value, parts[part], sums[query][part]);
        }
      }
    }
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
      for (int part = 0; part < kVectors; ++part) {
        Lane::store(scores + (place.query + query) * kScoreStride + place.key + part * Isa::kLanes,
                    sums[query][part] * scale);
      }
    }
  }

  static float highest_of(const float* scores, Positions seen) {
    const Floats lowest = Lane::broadcast(-std::numeric_limits<float>::infinity());
    Floats highest = lowest;
    for (int64_t index = seen.first; index < seen.last; index += Isa::kLanes) {
      const Floats values = Lane::load(scores + index);
      const Floats known = Lane::places(index) < static_cast<int32_t>(seen.last) ? values : lowest;
      highest = known > highest ? known : highest;
    }
    return Lane::highest(highest);
  }

  static void weigh_split(const AttentionTile& tile, const Workspace& work, int64_t query, int64_t first,
                          int64_t last) {
    const int64_t count = visible_positions(tile, query, first, last);
    float* scores = work.scores + query * kScoreStride;
    const Positions seen{std::min(tile.num_masked(first), count), count};
    const float highest = highest_of(scores, seen);
    const double power = static_cast<double>(highest) * std::numbers::log2e;
    const double exponent = std::ceil(power);
    const auto largest_weight = static_cast<float>(std::exp2(power - exponent));
    const bool is_bf16 = tile.dtype == GLINT_DTYPE_BF16;
    Floats sums = {};
    const Floats zeros = {};
    for (int64_t index = 0; index < count; index += Isa::kLanes) {
      const auto places = Lane::places(index);
      const auto is_seen =
          (places >= static_cast<int32_t>(seen.first)) & (places < static_cast<int32_t>(seen.last));
      const Floats distances = is_seen ? Lane::load(scores + index) - highest : zeros;
      const Floats weights = is_seen ? Lane::exponential(distances, largest_weight) : zeros;
      sums += weights;
      Lane::store(scores + index, is_bf16 ? Lane::round_to_bf16(weights) : weights);
    }
    work.split_exponent[query] = static_cast<float>(exponent);
    work.split_weight_sum[query] = Isa::sum(sums);
  }

  static void sum_split(const AttentionTile& tile, const Workspace& work, int64_t first, int64_t last) {
    std::fill_n(work.split_sums, tile.row_count * tile.group_heads * tile.head_dim, 0.0F);
    if (reads_pages(tile)) return sum_seen(tile, work, {first, first + tile.num_masked(first), last}, nullptr);
    for (int64_t start = first_page(tile, first); start < last; start += tile.page_tokens) {
      const int64_t end = std::min(start + tile.page_tokens, last);
      const float* values = load_page(tile, tile.values, start / tile.page_tokens, end - start, work.slab);
      sum_seen(tile, work, {first, start + tile.num_masked(start), end}, values);
    }
  }

  static void sum_seen(const AttentionTile& tile, const Workspace& work, SeenPositions seen, const float* page) {
    const int64_t queries = tile.row_count * tile.group_heads;
    const auto visible_to = [&](int64_t query) { return visible_positions(tile, query, seen.first, seen.last); };
    int64_t width = 0;
    for (int64_t query = 0; query < queries; query += width) {
      const int64_t most = std::min(kQueriesAtOnce, queries - query);
      for (width = 1; width < most && visible_to(query + width) == visible_to(query);) ++width;
      with_queries(width, [&]<int kQueries>(std::integral_constant<int, kQueries>) {
        float* sums = work.split_sums + query * tile.head_dim;
        const float* weights = work.scores + query * kScoreStride;
        const SeenPositions positions{seen.split_first, seen.first, seen.first + visible_to(query)};
        if (page == nullptr) {
          const auto values_of = [&](int64_t index) { return Bf16Values{page_at(tile, tile.values, index)}; };
          add_values<kQueries>(tile, sums, weights, values_of, positions);
        } else {
          const auto values_of = [&](int64_t) { return FloatValues{page}; };
          add_values<kQueries>(tile, sums, weights, values_of, positions);
        }
      });
    }
  }

  template <int kQueries, typename ValuesOf>
  static void add_values(const AttentionTile& tile, float* sums, const float* weights, const ValuesOf& values_of,
                         SeenPositions seen) {
    constexpr int64_t kWholeStep = Isa::kLanes * 4;
    constexpr int kParts = kQueries == 1 ? 4 : kMostVectors;
    const int64_t whole = tile.head_dim / kWholeStep * kWholeStep;
    for (int64_t dim = 0; dim < whole; dim += kParts * Isa::kLanes) {
      add_value_lanes<kQueries, kParts>(tile, sums + dim, weights, values_of, {seen, dim});
    }
    if (whole < tile.head_dim) add_last_dims<kQueries>(tile, sums, weights, values_of, {seen, whole});
  }

  template <int kQueries, typename ValuesOf>
  static void add_last_dims(const AttentionTile& tile, float* sums, const float* weights, const ValuesOf& values_of,
                            ValuePlace place) {
    const SeenPositions& seen = place.seen;
    for (int64_t position = seen.first; position < seen.last;) {
      const int64_t page = position / tile.page_tokens;
      const int64_t count = std::min(seen.last, (page + 1) * tile.page_tokens) - position;
      const auto values = values_of(page).after(position % tile.page_tokens * tile.head_dim);
      for (int query = 0; query < kQueries; ++query) {
        const float* query_weights = weights + query * kScoreStride + position - seen.split_first;
        for (int64_t dim = place.dim; dim < tile.head_dim; ++dim) {
          float sum = sums[query * tile.head_dim + dim];
          for (int64_t index = 0; index < count; ++index) {
            sum += query_weights[index] * values.at(index * tile.head_dim + dim);
          }
          sums[query * tile.head_dim + dim] = sum;
        }
      }
      position += count;
    }
  }

  template <int kQueries, int kParts, typename ValuesOf>
  static void add_value_lanes(const AttentionTile& tile, float* sums, const float* weights, const ValuesOf& values_of,
                              ValuePlace place) {
    Floats parts[kQueries][kParts];
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        parts[query][part] = Lane::load(sums + query * tile.head_dim + part * Isa::kLanes);
      }
    }
    for (int64_t position = place.seen.first; position < place.seen.last;) {
      const int64_t page = position / tile.page_tokens;
      const int64_t last = std::min(place.seen.last, (page + 1) * tile.page_tokens);
      const int64_t offset = position % tile.page_tokens * tile.head_dim + place.dim;
      auto values = values_of(page).after(offset);
      auto later_values = values_of(last < place.seen.last ? page + 1 : page).after(offset);
      for (; position < last; ++position) {
        Floats row[kParts];
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          row[part] = values.load(part * Isa::kLanes);
          if (part % 2 == 0) later_values.prefetch(part * Isa::kLanes);
        }
        values = values.after(tile.head_dim);
        later_values = later_values.after(tile.head_dim);
#pragma GCC unroll 4
        for (int query = 0; query < kQueries; ++query) {
          const Floats weight = Isa::broadcast(weights[query * kScoreStride + position - place.seen.split_first]);
#pragma GCC unroll 4
          for (int part = 0; part < kParts; ++part) {
            parts[query][part] = Isa::multiply_add(weight, row[part], parts[query][part]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        Lane::store(sums + query * tile.head_dim + part * Isa::kLanes, parts[query][part]);
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
