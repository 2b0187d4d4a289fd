#include "cpu/sampling.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <type_traits>

#include "base/rng.h"

namespace glint::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kGumbelReach = 40.35F;
constexpr size_t kChunkTokens = 128;
constexpr size_t kSumLanes = 8;

struct RowScan {
  float highest = -kInfinity;
  int32_t token = 0;
  bool is_usable = false;
};

struct ChunkRange {
  int32_t lowest;
  int32_t highest;
};

int32_t ordered_bits(float value) {
  const auto bits = std::bit_cast<int32_t>(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

float from_ordered_bits(int32_t ordered) { return std::bit_cast<float>(ordered ^ ((ordered >> 31) & 0x7fffffff)); }

template <typename Visit>
void for_each_chunk(size_t count, Visit visit) {
  size_t start = 0;
  for (; start + kChunkTokens <= count; start += kChunkTokens) {
    visit(start, std::integral_constant<size_t, kChunkTokens>());
  }
  if (start < count) visit(start, count - start);
}

template <typename Count>
ChunkRange chunk_range(const float* values, Count count) {
  ChunkRange range{std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
  for (size_t index = 0; index < count; ++index) {
    const int32_t ordered = ordered_bits(values[index]);
    range.lowest = std::min(range.lowest, ordered);
    range.highest = std::max(range.highest, ordered);
  }
  return range;
}

RowScan scan_row(std::span<const float> logits) {
  RowScan scan;
  ChunkRange whole{0, std::numeric_limits<int32_t>::min()};
  size_t best_start = 0;
  for_each_chunk(logits.size(), [&](size_t start, auto count) {
    const ChunkRange range = chunk_range(logits.data() + start, count);
    whole = {std::min(whole.lowest, range.lowest), std::max(whole.highest, range.highest)};
    if (const float highest = from_ordered_bits(range.highest); highest > scan.highest) {
      scan.highest = highest;
      best_start = start;
    }
  });
  scan.is_usable = whole.lowest >= ordered_bits(-kInfinity) && whole.highest < ordered_bits(kInfinity) &&
                   whole.highest > ordered_bits(-kInfinity);
  if (scan.is_usable) {
    const auto first = logits.begin() + static_cast<int64_t>(best_start);
    scan.token = static_cast<int32_t>(std::find(first, logits.end(), scan.highest) - logits.begin());
  }
  return scan;
}

float weight_of_gap(float gap) {
  constexpr float kRounder = 12582912.0F;
  constexpr auto kFurthest = std::bit_cast<uint32_t>(87.0F);
  const float value = -std::bit_cast<float>(std::min(std::bit_cast<uint32_t>(gap), kFurthest));
  const float shifted = value * 1.44269504F + kRounder;
  const float whole = shifted - kRounder;
  const float rest = (value - whole * 0.693359375F) + whole * 2.12194440e-4F;
  float series = 1.0F / 5040.0F;
  series = series * rest + 1.0F / 720.0F;
  series = series * rest + 1.0F / 120.0F;
  series = series * rest + 1.0F / 24.0F;
  series = series * rest + 1.0F / 6.0F;
  series = series * rest + 0.5F;
  series = series * rest + 1.0F;
  series = series * rest + 1.0F;
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRounder) + 127;
  return series * std::bit_cast<float>(exponent << 23);
}

template <typename GapAt>
double total_weight(size_t total_count, GapAt gap_at) {
  double total = 0.0;
  for_each_chunk(total_count, [&](size_t start, auto count) {
    std::array<float, kChunkTokens> weights{};
    for (size_t index = 0; index < count; ++index) weights[index] = weight_of_gap(gap_at(start + index));
    std::array<float, kSumLanes> lanes{};
    for (size_t index = 0; index < kChunkTokens; index += kSumLanes) {
      for (size_t lane = 0; lane < kSumLanes; ++lane) lanes[lane] += weights[index + lane];
    }
    for (const float lane : lanes) total += static_cast<double>(lane);
  });
  return total;
}

double log_sum_exp(std::span<const float> logits, float highest) {
  const double total = total_weight(logits.size(), [&](size_t token) { return highest - logits[token]; });
  return static_cast<double>(highest) + std::log(total);
}

void insert_top(SampledRow& out, size_t limit, int32_t token, float logit) {
  size_t place = std::min(static_cast<size_t>(out.top_count), limit - 1);
  out.top_count = static_cast<int32_t>(place + 1);
  for (; place > 0 && out.top_logprobs[place - 1] < logit; --place) {
    out.top_logprobs[place] = out.top_logprobs[place - 1];
    out.top_tokens[place] = out.top_tokens[place - 1];
  }
  out.top_logprobs[place] = logit;
  out.top_tokens[place] = token;
}

void list_top(SampledRow& out, std::span<const float> logits, int32_t num_top, double log_total) {
  const auto limit = static_cast<size_t>(num_top);
  float threshold = -kInfinity;
  for_each_chunk(limit > 0 ? logits.size() : 0, [&](size_t start, auto count) {
    if (from_ordered_bits(chunk_range(logits.data() + start, count).highest) <= threshold) return;
    for (size_t token = start; token < start + count; ++token) {
      if (logits[token] > threshold) {
        insert_top(out, limit, static_cast<int32_t>(token), logits[token]);
        threshold = out.top_count == num_top ? out.top_logprobs[limit - 1] : threshold;
      }
    }
  });
  for (size_t index = 0; index < static_cast<size_t>(out.top_count); ++index) {
    out.top_logprobs[index] = static_cast<float>(static_cast<double>(out.top_logprobs[index]) - log_total);
  }
}

void apply_bias(std::span<float> logits, const SamplingSettings& settings) {
  for (const TokenBias& bias : settings.bias) logits[static_cast<size_t>(bias.token)] += bias.value;
}

void apply_mask(std::span<float> logits, const uint32_t* allowed_words) {
  for (size_t start = 0; start < logits.size(); start += 32) {
    const uint32_t word = allowed_words[start / 32];
    const size_t count = std::min<size_t>(32, logits.size() - start);
    if (word == 0) {
      std::fill_n(logits.data() + start, count, -kInfinity);
    } else if (word != ~uint32_t{0}) {
      for (size_t bit = 0; bit < count; ++bit) {
        logits[start + bit] = ((word >> bit) & 1U) != 0 ? logits[start + bit] : -kInfinity;
      }
    }
  }
}

void apply_repetition(std::span<float> logits, std::span<const int32_t> history, float penalty,
                      std::span<int32_t> counts) {
  for (const int32_t token : history) {
    if (counts[static_cast<size_t>(token)]++ == 0) {
      float& logit = logits[static_cast<size_t>(token)];
      const float changed = logit > 0.0F ? logit / penalty : logit * penalty;
      logit = logit == -kInfinity ? logit : std::clamp(changed, -kLargest, kLargest);
    }
  }
  for (const int32_t token : history) counts[static_cast<size_t>(token)] = 0;
}

void apply_counts(std::span<float> logits, std::span<const int32_t> generated, const SamplingSettings& settings,
                  std::span<int32_t> counts) {
  for (const int32_t token : generated) ++counts[static_cast<size_t>(token)];
  for (const int32_t token : generated) {
    int32_t& count = counts[static_cast<size_t>(token)];
    if (count > 0) {
      logits[static_cast<size_t>(token)] -=
          settings.frequency_penalty * static_cast<float>(count) + settings.presence_penalty;
      count = 0;
    }
  }
}

uint64_t pack(float gap, size_t token) { return (uint64_t{std::bit_cast<uint32_t>(gap)} << 32) | token; }
float gap_of(uint64_t candidate) { return std::bit_cast<float>(static_cast<uint32_t>(candidate >> 32)); }
int32_t token_of(uint64_t candidate) { return static_cast<int32_t>(candidate & 0xffffffffU); }

double mass_of(std::span<const uint64_t> candidates) {
  return total_weight(candidates.size(), [&](size_t index) { return gap_of(candidates[index]); });
}

}

struct SamplerScratch::Buffers {
  explicit Buffers(size_t vocab_size)
      : raw(vocab_size),
        gaps(vocab_size),
        counts(vocab_size),
        candidates(vocab_size),
        nearest((vocab_size + kChunkTokens - 1) / kChunkTokens),
        ranked(nearest.size()) {}

  std::vector<float> raw;
  std::vector<float> gaps;
  std::vector<int32_t> counts;
  std::vector<uint64_t> candidates;
  std::vector<float> nearest;
  std::vector<float> ranked;
  size_t num_candidates = 0;

  std::span<uint64_t> kept() { return std::span(candidates).first(num_candidates); }
};

SamplerScratch::SamplerScratch(int32_t vocab_size)
    : buffers_(std::make_unique<Buffers>(static_cast<size_t>(vocab_size))) {}
SamplerScratch::SamplerScratch(SamplerScratch&& other) noexcept = default;
SamplerScratch& SamplerScratch::operator=(SamplerScratch&& other) noexcept = default;
SamplerScratch::~SamplerScratch() = default;

uint64_t SamplerScratch::bytes_for(int32_t vocab_size) {
  const auto tokens = static_cast<uint64_t>(vocab_size);
  const uint64_t chunks = (tokens + kChunkTokens - 1) / kChunkTokens;
  return tokens * (2 * sizeof(float) + sizeof(int32_t) + sizeof(uint64_t)) + chunks * 2 * sizeof(float);
}

std::vector<int32_t> SamplerScratch::kept_tokens() const {
  std::vector<int32_t> tokens;
  std::ranges::transform(buffers_->kept(), std::back_inserter(tokens), token_of);
  std::ranges::sort(tokens);
  return tokens;
}

namespace {

using Buffers = SamplerScratch::Buffers;

bool change_logits(std::span<float> logits, const SamplingRow& row, Buffers& buffers) {
  const SamplingSettings& settings = *row.settings;
  const bool has_repetition = settings.repetition_penalty != 1.0F;
  const bool has_counts = settings.frequency_penalty != 0.0F || settings.presence_penalty != 0.0F;
  apply_bias(logits, settings);
  if (row.allowed_words != nullptr) apply_mask(logits, row.allowed_words);
  if (has_repetition) apply_repetition(logits, row.history, settings.repetition_penalty, buffers.counts);
  if (has_counts) {
    apply_counts(logits, row.history.subspan(static_cast<size_t>(row.prompt_count)), settings, buffers.counts);
  }
  return !settings.bias.empty() || row.allowed_words != nullptr || has_repetition || has_counts;
}

void measure_gaps(std::span<const float> logits, float highest, float temperature, Buffers& buffers) {
  const float inverse = std::min(1.0F / temperature, kLargest);
  for_each_chunk(logits.size(), [&](size_t start, auto count) {
    uint32_t nearest = std::bit_cast<uint32_t>(kInfinity);
    for (size_t index = start; index < start + count; ++index) {
      const float gap = (highest - logits[index]) * inverse;
      buffers.gaps[index] = gap;
      nearest = std::min(nearest, std::bit_cast<uint32_t>(gap));
    }
    buffers.nearest[start / kChunkTokens] = std::bit_cast<float>(nearest);
  });
}

float top_k_reach(Buffers& buffers, size_t top_k) {
  if (top_k > buffers.nearest.size()) return kInfinity;
  std::ranges::copy(buffers.nearest, buffers.ranked.begin());
  const auto place = buffers.ranked.begin() + static_cast<int64_t>(top_k) - 1;
  std::ranges::nth_element(buffers.ranked, place);
  return *place;
}

float top_p_reach(double top_p, double total, size_t vocab_size) {
  constexpr double kMargin = 1e-3;
  return static_cast<float>(kMargin - std::log((1.0 - top_p) * total / static_cast<double>(vocab_size)));
}

void collect_candidates(Buffers& buffers, float reach) {
  size_t found = 0;
  for_each_chunk(buffers.gaps.size(), [&](size_t start, auto count) {
    if (buffers.nearest[start / kChunkTokens] > reach) return;
    for (size_t token = start; token < start + count; ++token) {
      buffers.candidates[found] = pack(buffers.gaps[token], token);
      found += static_cast<size_t>(buffers.gaps[token] <= reach);
    }
  });
  buffers.num_candidates = found;
}

size_t count_to_mass(std::span<uint64_t> candidates, double target) {
  constexpr int64_t kSmall = 16;
  double mass = 0.0;
  auto first = candidates.begin();
  auto last = candidates.end();
  while (last - first > kSmall) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last);
    const double half = mass_of({first, middle + 1});
    if (mass + half >= target) {
      last = middle + 1;
    } else {
      mass += half;
      first = middle + 1;
    }
  }
  std::sort(first, last);
  while (first != last && mass < target) mass += static_cast<double>(weight_of_gap(gap_of(*first++)));
  return static_cast<size_t>(first - candidates.begin());
}

void keep_candidates(const SamplingSettings& settings, Buffers& buffers) {
  const auto top_p = static_cast<double>(settings.top_p);
  const auto top_k = static_cast<size_t>(settings.top_k);
  const bool has_min_p = settings.min_p > 0.0F;
  const bool has_top_k = top_k > 0;
  const bool has_top_p = top_p < 1.0;
  const bool is_top_p_alone = has_top_p && !has_top_k && !has_min_p;
  float reach = kGumbelReach;
  double total = 0.0;
  if (has_min_p) reach = std::min(reach, static_cast<float>(-std::log(static_cast<double>(settings.min_p))));
  if (has_top_k) reach = std::min(reach, top_k_reach(buffers, top_k));
  if (is_top_p_alone) {
    total = total_weight(buffers.gaps.size(), [&](size_t token) { return buffers.gaps[token]; });
    reach = std::min(reach, top_p_reach(top_p, total, buffers.gaps.size()));
  }
  collect_candidates(buffers, reach);
  if (has_top_k && top_k < buffers.num_candidates) {
    std::ranges::nth_element(buffers.kept(), buffers.kept().begin() + settings.top_k);
    buffers.num_candidates = top_k;
  }
  if (has_top_p) {
    total = is_top_p_alone ? total : mass_of(buffers.kept());
    buffers.num_candidates = count_to_mass(buffers.kept(), top_p * total);
  }
}

double gumbel_bound(uint64_t bits) {
  constexpr double kMargin = 1e-9;
  const int zeros = std::countl_zero(~bits | 0xfffU);
  return (zeros + 1) * std::numbers::ln2 + kMargin;
}

int32_t draw_token(uint64_t key, int32_t best_token, std::span<const uint64_t> candidates) {
  double best = gumbel(token_bits(key, best_token));
  for (const uint64_t candidate : candidates) {
    const int32_t token = token_of(candidate);
    const auto gap = static_cast<double>(gap_of(candidate));
    const uint64_t bits = token_bits(key, token);
    if (gumbel_bound(bits) - gap < best) continue;
    const double score = gumbel(bits) - gap;
    if (score > best || (score == best && token < best_token)) {
      best = score;
      best_token = token;
    }
  }
  return best_token;
}

int32_t choose_token(std::span<const float> logits, const SamplingRow& row, const RowScan& scan, Buffers& buffers) {
  const SamplingSettings& settings = *row.settings;
  if (settings.temperature == 0.0F) return scan.token;
  measure_gaps(logits, scan.highest, settings.temperature, buffers);
  keep_candidates(settings, buffers);
  return draw_token(row_key(settings.seed, settings.choice_index, row.position), scan.token, buffers.kept());
}

}

void sample_row(SampledRow& out, std::span<float> logits, const SamplingRow& row, SamplerScratch& scratch) {
  Buffers& buffers = scratch.buffers();
  if (logits.size() != buffers.gaps.size()) {
    throw std::logic_error("a row has " + std::to_string(logits.size()) + " logits; the scratch was made for " +
                           std::to_string(buffers.gaps.size()));
  }
  out = {};
  RowScan scan = scan_row(logits);
  if (!scan.is_usable) {
    out.failure = GLINT_FAILURE_NOT_FINITE;
    return;
  }
  const bool has_logprobs = row.settings->has_logprobs && !row.is_draft;
  double log_total = 0.0;
  if (has_logprobs) {
    log_total = log_sum_exp(logits, scan.highest);
    list_top(out, logits, row.settings->num_logprobs, log_total);
    std::ranges::copy(logits, buffers.raw.begin());
  }
  if (change_logits(logits, row, buffers)) scan = scan_row(logits);
  if (!scan.is_usable) {
    out.failure = GLINT_FAILURE_NOTHING_ALLOWED;
    return;
  }
  out.token = choose_token(logits, row, scan, buffers);
  if (has_logprobs) {
    const float logit = buffers.raw[static_cast<size_t>(out.token)];
    out.logprob = static_cast<float>(static_cast<double>(logit) - log_total);
  }
}

void logprobs_row(SampledRow& out, std::span<const float> logits, int32_t actual_token, int32_t num_top) {
  out = {};
  out.token = actual_token;
  const RowScan scan = scan_row(logits);
  if (!scan.is_usable) {
    out.failure = GLINT_FAILURE_NOT_FINITE;
    return;
  }
  const double log_total = log_sum_exp(logits, scan.highest);
  const float logit = logits[static_cast<size_t>(actual_token)];
  out.logprob = static_cast<float>(static_cast<double>(logit) - log_total);
  list_top(out, logits, num_top, log_total);
}

}
