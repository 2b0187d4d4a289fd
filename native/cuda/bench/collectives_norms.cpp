#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cuda/bench/collectives_check.h"

namespace glint::cuda::bench {

namespace {

constexpr uint64_t kSeed = 77;
constexpr uint64_t kManyBytes = uint64_t{4} << 20;
constexpr int kTimedUses = 10;
constexpr int kTimedReplays = 50;

struct NormState {
  NormState(std::byte* base, int64_t given_rows, int64_t given_width, int32_t num_ranks)
      : rows(given_rows),
        width(given_width),
        shard_rows((given_rows + num_ranks - 1) / num_ranks),
        code_stride((given_width + 15) / 16 * 16) {
    Arena arena(base);
    const int64_t room = shard_rows * num_ranks;
    hidden = arena.take<float>(room * width);
    normed = arena.take<float>(room * width);
    codes = arena.take<uint8_t>(room * code_stride);
    scales = arena.take<float>(room);
    byte_count = arena.used();
  }

  NormCall call(const float* weight) const {
    NormCall norm{};
    norm.hidden = hidden;
    norm.normed = normed;
    norm.fp8 = codes;
    norm.scales = scales;
    norm.fp8_stride = code_stride;
    norm.weight = weight;
    norm.count = rows;
    norm.width = width;
    norm.epsilon = kEpsilon;
    return norm;
  }

  int64_t rows;
  int64_t width;
  int64_t shard_rows;
  int64_t code_stride;
  float* hidden;
  float* normed;
  uint8_t* codes;
  float* scales;
  uint64_t byte_count;
};

class NormPaths {
 public:
  NormPaths(RankTest& test, int64_t rows) : test_(test), rows_(rows) {}

  NormState state(uint64_t offset) const {
    return {test_.places.work + offset, rows_, test_.width, test_.num_ranks()};
  }
  int64_t part_floats() const { return rows_ * test_.width; }
  uint64_t part_bytes() const { return static_cast<uint64_t>(part_floats()) * sizeof(float); }
  float* parts() const { return reinterpret_cast<float*>(test_.places.scratch); }
  cudaStream_t stream() const { return test_.stream.get(); }

  void norm_gathered(const NormState& state) const {
    NormCall norm = state.call(test_.places.weight);
    norm.parts = parts();
    norm.part_stride = part_floats();
    norm.num_parts = test_.num_ranks();
    launch_norm(norm, stream());
  }
  void place_part(float* place, uint64_t first_byte) const {
    GLINT_CHECK_CUDA(cudaMemsetAsync(place, kPoison, part_bytes(), stream()));
    GLINT_CHECK_CUDA(cudaMemcpyAsync(place, test_.places.input + first_byte, part_bytes(), cudaMemcpyDeviceToDevice,
                                     stream()));
  }
  void replicated() const {
    test_.collectives.all_gather(parts(), part_bytes(), stream());
    norm_gathered(state(0));
  }
  void custom(int32_t slot, uint64_t offset) const {
    test_.peers.launch(state(offset).call(test_.places.weight), slot, stream());
  }
  void sharded() const {
    const NormState whole = state(0);
    const int64_t first = std::min(rows_, test_.rank * whole.shard_rows);
    const int64_t shard_floats = whole.shard_rows * whole.width;
    test_.collectives.all_to_all(parts(), test_.places.input, static_cast<uint64_t>(shard_floats) * sizeof(float),
                                 part_bytes(), stream());
    NormCall norm = whole.call(test_.places.weight);
    norm.hidden += first * whole.width;
    norm.normed += first * whole.width;
    norm.fp8 += first * whole.code_stride;
    norm.scales += first;
    norm.count = std::min(rows_, first + whole.shard_rows) - first;
    norm.parts = parts();
    norm.part_stride = shard_floats;
    norm.num_parts = test_.num_ranks();
    launch_norm(norm, stream());
    test_.collectives.all_gather({{whole.codes, static_cast<uint64_t>(whole.shard_rows * whole.code_stride)},
                                  {whole.scales, static_cast<uint64_t>(whole.shard_rows) * sizeof(float)}},
                                 stream());
  }

 private:
  RankTest& test_;
  int64_t rows_;
};

Bytes state_before(const NormState& state, uint64_t seed) {
  Bytes bytes(state.byte_count, kPoison);
  const Bytes hidden = bytes_of(random_floats(seed, kMaxParts, state.rows * state.width));
  std::copy(hidden.begin(), hidden.end(), bytes.begin());
  return bytes;
}

Bytes reference_state(RankTest& test, const NormPaths& paths, uint64_t seed, Verdict& verdict) {
  const NormState state = paths.state(0);
  const Bytes before = state_before(state, seed);
  std::vector<std::vector<float>> parts;
  test.upload(test.places.work, before.data(), before.size());
  for (int32_t rank = 0; rank < test.num_ranks(); ++rank) {
    parts.push_back(random_floats(seed, rank, paths.part_floats()));
    test.upload(test.places.scratch + static_cast<uint64_t>(rank) * paths.part_bytes(), parts.back().data(),
                paths.part_bytes());
  }
  paths.norm_gathered(state);
  Bytes wanted = test.download(test.places.work, state.byte_count);
  for (int64_t index = 0; index < paths.part_floats(); ++index) {
    const auto place = static_cast<size_t>(index);
    std::vector<float> terms;
    for (const std::vector<float>& part : parts) terms.push_back(part[place]);
    float base = 0;
    float seen = 0;
    std::memcpy(&base, before.data() + place * sizeof(float), sizeof(float));
    std::memcpy(&seen, wanted.data() + place * sizeof(float), sizeof(float));
    verdict.add(seen == base + tree_sum(terms) ? 0 : 1);
  }
  return wanted;
}

Bytes own_rows_only(const NormState& state, const Bytes& before, const Bytes& wanted, int32_t rank) {
  Bytes bytes = wanted;
  const auto row_bytes = static_cast<int64_t>(sizeof(float)) * state.width;
  const int64_t first = std::min(state.rows, rank * state.shard_rows);
  const int64_t last = std::min(state.rows, first + state.shard_rows);
  for (const float* array : {state.hidden, state.normed}) {
    const int64_t start = (array - state.hidden) * static_cast<int64_t>(sizeof(float));
    for (int64_t row = 0; row < state.rows; ++row) {
      if (row >= first && row < last) continue;
      std::copy_n(before.begin() + start + row * row_bytes, row_bytes, bytes.begin() + start + row * row_bytes);
    }
  }
  return bytes;
}

void check_paths(RankTest& test, Verdict& verdict, int64_t rows) {
  const NormPaths paths(test, rows);
  const NormState state = paths.state(0);
  const uint64_t size = state.byte_count;
  const std::string shape = text(rows, "x", test.width);
  Case given;
  given.repeats = paths.part_bytes() * static_cast<uint64_t>(test.num_ranks()) > kManyBytes ? kFewRepeats : kRepeats;
  given.before = state_before(state, kSeed);
  given.input = bytes_of(random_floats(kSeed, test.rank, paths.part_floats()));
  given.wanted = reference_state(test, paths, kSeed, verdict);
  given.name = text("all-gather and norm, ", shape);
  given.run = [&] {
    paths.place_part(paths.parts() + test.rank * paths.part_floats(), 0);
    paths.replicated();
  };
  check_case(test, given, verdict);
  const Bytes whole = given.wanted;
  given.name = text("all-to-all, norm and all-gather, ", shape);
  given.wanted = own_rows_only(state, given.before, whole, test.rank);
  given.run = [&] { paths.sharded(); };
  check_case(test, given, verdict);
  const Bytes second = reference_state(test, paths, kSeed + 1, verdict);
  const Bytes second_before = state_before(state, kSeed + 1);
  const Bytes second_part = bytes_of(random_floats(kSeed + 1, test.rank, paths.part_floats()));
  given.name = text("peer memory, two slots in turn, ", shape);
  given.wanted = whole;
  given.wanted.insert(given.wanted.end(), second.begin(), second.end());
  given.before.insert(given.before.end(), second_before.begin(), second_before.end());
  given.input.insert(given.input.end(), second_part.begin(), second_part.end());
  given.run = [&] {
    paths.place_part(test.peers.part(0), 0);
    paths.custom(0, 0);
    paths.place_part(test.peers.part(1), paths.part_bytes());
    paths.custom(1, size);
  };
  check_case(test, given, verdict);
}

double microseconds_per_use(RankTest& test, const std::function<void(int)>& use) {
  cudaEvent_t first = nullptr;
  cudaEvent_t last = nullptr;
  float milliseconds = 0;
  GLINT_CHECK_CUDA(cudaEventCreate(&first));
  GLINT_CHECK_CUDA(cudaEventCreate(&last));
  {
    const CapturedRun captured(test, [&] {
      for (int index = 0; index < kTimedUses; ++index) use(index);
    });
    for (int index = 0; index < 3; ++index) captured.replay();
    GLINT_CHECK_CUDA(cudaEventRecord(first, test.stream.get()));
    for (int index = 0; index < kTimedReplays; ++index) captured.replay();
    GLINT_CHECK_CUDA(cudaEventRecord(last, test.stream.get()));
    test.group.wait_for_stream(test.stream.get());
    test.group.wait(test.rank, "the end of a measurement", deadline_after(kDeadlineSeconds));
  }
  GLINT_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, first, last));
  cudaEventDestroy(first);
  cudaEventDestroy(last);
  return static_cast<double>(milliseconds) * 1000.0 / (kTimedUses * kTimedReplays);
}

}

void check_norms(RankTest& test, Verdict& verdict) {
  const std::vector<float> weight = random_floats(1, 0, test.width);
  test.upload(reinterpret_cast<std::byte*>(test.places.weight), weight.data(), weight.size() * sizeof(float));
  for (const int64_t rows : {1, 2, 7, 17, 64, 256}) check_paths(test, verdict, rows);
}

void measure(RankTest& test) {
  for (const int64_t rows : {1, 8, 64, 256}) {
    const NormPaths paths(test, rows);
    const double alone = microseconds_per_use(test, [&](int) { paths.norm_gathered(paths.state(0)); });
    const double replicated = microseconds_per_use(test, [&](int) { paths.replicated(); });
    const double sharded = microseconds_per_use(test, [&](int) { paths.sharded(); });
    const double custom = microseconds_per_use(test, [&](int index) { paths.custom(index % 2, 0); });
    if (test.rank != 0) continue;
    std::printf("time %d ranks, %lld x %lld, us: sum and norm alone %.1f, all-gather path %.1f, all-to-all path %.1f, "
                "peer memory %.1f\n",
                test.num_ranks(), static_cast<long long>(rows), static_cast<long long>(test.width), alone, replicated,
                sharded, custom);
    std::fflush(stdout);
  }
}

}
