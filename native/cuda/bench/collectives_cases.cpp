#include <algorithm>
#include <cstring>

#include "cuda/bench/collectives_check.h"

namespace glint::cuda::bench {

namespace {

void append(Bytes& bytes, const Bytes& more) { bytes.insert(bytes.end(), more.begin(), more.end()); }

Bytes of_all_ranks(int32_t num_ranks, uint64_t seed, uint64_t count) {
  Bytes bytes;
  for (int32_t rank = 0; rank < num_ranks; ++rank) append(bytes, random_bytes(seed, rank, count));
  return bytes;
}

void gather_case(RankTest& test, Verdict& verdict, uint64_t count) {
  Case given{.name = text("all_gather of ", count, " bytes a rank"), .before = {}, .input = {}, .wanted = {}, .run = {}};
  given.wanted = of_all_ranks(test.num_ranks(), count, count);
  given.before = Bytes(given.wanted.size(), kPoison);
  const uint64_t first = static_cast<uint64_t>(test.rank) * count;
  std::copy_n(given.wanted.begin() + static_cast<int64_t>(first), count,
              given.before.begin() + static_cast<int64_t>(first));
  given.run = [&] { test.collectives.all_gather(test.places.work, count, test.stream.get()); };
  check_case(test, given, verdict);
}

void all_to_all_case(RankTest& test, Verdict& verdict, int64_t rows, uint64_t row_bytes) {
  const auto ranks = static_cast<uint64_t>(test.num_ranks());
  const auto total = static_cast<uint64_t>(rows) * row_bytes;
  const uint64_t shard = (static_cast<uint64_t>(rows) + ranks - 1) / ranks * row_bytes;
  Case given{.name = text("all_to_all of ", rows, " rows of ", row_bytes, " bytes"),
             .before = Bytes(ranks * shard, kPoison),
             .input = random_bytes(total, test.rank, total),
             .wanted = Bytes(ranks * shard, kPoison),
             .run = {}};
  const uint64_t first = std::min(total, static_cast<uint64_t>(test.rank) * shard);
  const uint64_t last = std::min(total, first + shard);
  for (uint64_t peer = 0; peer < ranks; ++peer) {
    const Bytes sent = random_bytes(total, static_cast<int32_t>(peer), total);
    std::copy(sent.begin() + static_cast<int64_t>(first), sent.begin() + static_cast<int64_t>(last),
              given.wanted.begin() + static_cast<int64_t>(peer * shard));
  }
  given.run = [&, total, shard] {
    test.collectives.all_to_all(test.places.work, test.places.input, shard, total, test.stream.get());
  };
  check_case(test, given, verdict);
}

void broadcast_case(RankTest& test, Verdict& verdict, uint64_t count, int32_t root) {
  const Case given{.name = text("broadcast of ", count, " bytes from rank ", root),
                   .before = random_bytes(count, test.rank, count),
                   .input = {},
                   .wanted = random_bytes(count, root, count),
                   .run = [&] { test.collectives.broadcast(test.places.work, count, root, test.stream.get()); }};
  check_case(test, given, verdict);
}

void gather_to_root_case(RankTest& test, Verdict& verdict, uint64_t count, int32_t root) {
  Case given{.name = text("gather of ", count, " bytes a rank to rank ", root),
             .before = Bytes(count * static_cast<uint64_t>(test.num_ranks()), kPoison),
             .input = random_bytes(count, test.rank, count),
             .wanted = of_all_ranks(test.num_ranks(), count, count),
             .run = {}};
  if (test.rank != root) given.wanted = given.before;
  given.run = [&] {
    test.collectives.gather(test.places.work, test.places.input, count, root, test.stream.get());
  };
  check_case(test, given, verdict);
}

std::vector<float> sums_of_all(int32_t num_ranks, uint64_t seed, int64_t count) {
  std::vector<std::vector<float>> parts;
  for (int32_t rank = 0; rank < num_ranks; ++rank) parts.push_back(random_floats(seed, rank, count));
  std::vector<float> sums(static_cast<size_t>(count));
  for (size_t index = 0; index < sums.size(); ++index) {
    std::vector<float> terms;
    for (const std::vector<float>& part : parts) terms.push_back(part[index]);
    sums[index] = tree_sum(terms);
  }
  return sums;
}

FloatScratch scratch_of(RankTest& test) {
  return {reinterpret_cast<float*>(test.places.scratch), static_cast<int64_t>(test.room / sizeof(float))};
}

void all_reduce_case(RankTest& test, Verdict& verdict, int64_t count) {
  const auto seed = static_cast<uint64_t>(count);
  const Case given{.name = text("all_reduce of ", count, " floats"),
                   .before = bytes_of(random_floats(seed, test.rank, count)),
                   .input = {},
                   .wanted = bytes_of(sums_of_all(test.num_ranks(), seed, count)),
                   .run = [&] {
                     test.collectives.all_reduce(reinterpret_cast<float*>(test.places.work), count, scratch_of(test),
                                                 test.stream.get());
                   }};
  check_case(test, given, verdict);
}

void reduce_scatter_case(RankTest& test, Verdict& verdict, int64_t count) {
  const int64_t total = count * test.num_ranks();
  const auto seed = static_cast<uint64_t>(total);
  const std::vector<float> sums = sums_of_all(test.num_ranks(), seed, total);
  const auto first = sums.begin() + test.rank * count;
  const Case given{.name = text("reduce_scatter of ", count, " floats a rank"),
                   .before = Bytes(static_cast<uint64_t>(count) * sizeof(float), kPoison),
                   .input = bytes_of(random_floats(seed, test.rank, total)),
                   .wanted = bytes_of(std::vector<float>(first, first + count)),
                   .run = [&] {
                     test.collectives.reduce_scatter(reinterpret_cast<float*>(test.places.work),
                                                     reinterpret_cast<const float*>(test.places.input), count,
                                                     scratch_of(test), test.stream.get());
                   }};
  check_case(test, given, verdict);
}

}

void check_movement(RankTest& test, Verdict& verdict) {
  for (const uint64_t count : {1, 7, 1000, 65537}) gather_case(test, verdict, count);
  for (const int64_t rows : {1, 2, 7, 64}) all_to_all_case(test, verdict, rows, 4012);
  all_to_all_case(test, verdict, 13, 3);
  const int32_t last = test.num_ranks() - 1;
  for (const uint64_t count : {3, 40001}) {
    broadcast_case(test, verdict, count, 0);
    gather_to_root_case(test, verdict, count, 0);
  }
  broadcast_case(test, verdict, 515, last);
  gather_to_root_case(test, verdict, 515, last);
}

void check_sums(RankTest& test, Verdict& verdict) {
  for (const int64_t count : {1, 5, 20480}) all_reduce_case(test, verdict, count);
  all_reduce_case(test, verdict, Collectives::kMostGatheredFloats + 1);
  all_reduce_case(test, verdict, test.num_ranks() * (Collectives::kMostGatheredFloats / test.num_ranks() + 3));
  reduce_scatter_case(test, verdict, 17);
  reduce_scatter_case(test, verdict, 4096);
}

}
