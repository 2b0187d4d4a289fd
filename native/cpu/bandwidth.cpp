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

template <typename Compute>
double best_per_second(const Compute& compute) {
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t count = compute();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(count) / seconds.count());
  }
  return best;
}

class ResidentProduct {
 public:
  static constexpr int64_t kCols = 512;
  static constexpr int64_t kWeights = kTileRows * kCols;

  ResidentProduct() {
    constexpr std::byte kE4m3One{0x38};
    std::fill_n(memory_.data(), memory_.byte_count(), kE4m3One);
    std::fill_n(operand_.data(), operand_.byte_count(), std::byte{0});
    weight_.data = memory_.data();
    weight_.dtype = GLINT_DTYPE_F8_E4M3;
    weight_.rows = kTileRows;
    weight_.cols = kCols;
    weight_.stride = kCols;
  }

  void multiply(const KernelSet& kernels) {
    kernels.gemm_fp8({.out = out_,
                      .out_stride = kTileRows,
                      .operand = operand_.data(),
                      .operand_stride = kCols,
                      .input_scales = nullptr,
                      .input_groups = 1,
                      .input_rows = nullptr,
                      .count = 1,
                      .weight = &weight_,
                      .bias = nullptr,
                      .row_first = 0,
                      .row_count = kTileRows},
                     scratch_.data());
  }

 private:
  ZeroedMemory memory_{2 * kWeights};
  ZeroedMemory operand_{kCols * cpu::kOperandElementBytes};
  ZeroedMemory scratch_{static_cast<uint64_t>(gemm_scratch_bytes(kCols))};
  float out_[kTileRows] = {};
  Weight weight_;
};

}

double read_bytes_per_second(Backend& backend, uint64_t byte_count) {
  const int64_t num_chunks = std::max<int64_t>(1, static_cast<int64_t>(byte_count) / kChunkBytes);
  const ZeroedMemory memory(static_cast<uint64_t>(num_chunks * kChunkBytes));
  std::atomic<uint64_t> folded{0};
  backend.workers.team().run(num_chunks, [&](int64_t chunk, int) {
    std::memset(memory.data() + chunk * kChunkBytes, static_cast<int>(chunk & 0x7f), kChunkBytes);
  });
  const double best = best_per_second([&] {
    backend.workers.team().run(num_chunks, [&](int64_t chunk, int) {
      folded.fetch_xor(fold_chunk(memory.data() + chunk * kChunkBytes), std::memory_order_relaxed);
    });
    return num_chunks * kChunkBytes;
  });
  return folded.load() == ~uint64_t{0} ? 0.0 : best;
}

void measure_arithmetic(Backend& backend, glint_arithmetic& arithmetic) {
  constexpr int64_t kPieces = 64;
  constexpr int64_t kRounds = 20'000;
  constexpr int64_t kProducts = 20;
  ThreadTeam& team = backend.workers.team();
  const KernelSet& kernels = backend.workers.kernels();
  arithmetic.multiply_adds_per_second = best_per_second([&] {
    std::atomic<int64_t> done{0};
    team.run(kPieces * team.num_threads(), [&](int64_t, int) {
      alignas(64) float values[kPeakValues] = {};
      done.fetch_add(kernels.multiply_adds(values, kRounds), std::memory_order_relaxed);
    });
    return done.load();
  });
  std::vector<ResidentProduct> products(static_cast<size_t>(team.num_threads()));
  arithmetic.fp8_weights_per_second = best_per_second([&] {
    team.run(kPieces * team.num_threads(), [&](int64_t, int thread) {
      for (int64_t index = 0; index < kProducts; ++index) products[static_cast<size_t>(thread)].multiply(kernels);
    });
    return kPieces * team.num_threads() * kProducts * ResidentProduct::kWeights;
  });
}

}
