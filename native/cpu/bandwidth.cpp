#include <algorithm>
#include <chrono>
#include <cstring>

#include "cpu/backend.h"

namespace glint::ops {

namespace {

constexpr int64_t kChunkBytes = 1 << 20;
constexpr int kRepeats = 5;

uint64_t fold_chunk(const std::byte* source) {
  constexpr int64_t kWords = 16;
  uint64_t words[kWords] = {};
  for (int64_t offset = 0; offset < kChunkBytes; offset += kWords * 8) {
    uint64_t loaded[kWords];
    std::memcpy(loaded, source + offset, sizeof(loaded));
    for (int64_t word = 0; word < kWords; ++word) words[word] ^= loaded[word];
  }
  uint64_t folded = 0;
  for (const uint64_t word : words) folded ^= word;
  return folded;
}

}

double read_bytes_per_second(Backend& backend, uint64_t byte_count) {
  const int64_t num_chunks = std::max<int64_t>(1, static_cast<int64_t>(byte_count) / kChunkBytes);
  const ZeroedMemory memory(static_cast<uint64_t>(num_chunks * kChunkBytes));
  std::atomic<uint64_t> folded{0};
  backend.workers.team().run(num_chunks, [&](int64_t chunk, int) {
    std::memset(memory.data() + chunk * kChunkBytes, static_cast<int>(chunk & 0x7f), kChunkBytes);
  });
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    backend.workers.team().run(num_chunks, [&](int64_t chunk, int) {
      folded.fetch_xor(fold_chunk(memory.data() + chunk * kChunkBytes), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(num_chunks * kChunkBytes) / seconds.count());
  }
  return folded.load() == ~uint64_t{0} ? 0.0 : best;
}

}
