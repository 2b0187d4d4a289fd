#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/check.h"
#include "cuda/comm/collectives.h"
#include "cuda/memory/device_memory.h"
#include "cuda/comm/peer_sum.h"

namespace glint::cuda::bench {

inline constexpr int64_t kWidth = 5120;
inline constexpr int64_t kOddWidth = 1003;
inline constexpr int64_t kMaxRows = 256;
inline constexpr int kRepeats = 1000;
inline constexpr int kFewRepeats = 100;
inline constexpr double kDeadlineSeconds = 20.0;
inline constexpr uint8_t kPoison = 0xa5;
inline constexpr float kEpsilon = 1e-5F;

using Bytes = std::vector<uint8_t>;

class Verdict {
 public:
  explicit Verdict(int most_repeats) : most_repeats_(most_repeats) {}
  int most_repeats() const { return most_repeats_; }
  void add(uint64_t differences) { differences_ += differences; }
  void print(const std::string& name, const std::string& detail);
  void state(bool holds, const std::string& name, const std::string& detail);
  int num_failures() const { return num_failures_; }

 private:
  std::atomic<uint64_t> differences_ = 0;
  int most_repeats_;
  int num_failures_ = 0;
};

class RankStream {
 public:
  explicit RankStream(int32_t rank);
  ~RankStream();
  RankStream(const RankStream&) = delete;
  RankStream& operator=(const RankStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

struct RankPlaces {
  std::byte* work;
  std::byte* before;
  std::byte* input;
  std::byte* wanted;
  std::byte* scratch;
  float* weight;
  uint64_t* differences;
  PeerSumBuffers peers;
};

struct RankTest {
  RankTest(RankGroup& given_group, int32_t given_rank, int64_t given_width);
  void open(double seconds);
  void upload(std::byte* place, const void* data, uint64_t byte_count);
  Bytes download(const std::byte* place, uint64_t byte_count);
  int32_t num_ranks() const { return group.num_ranks(); }

  RankGroup& group;
  int32_t rank;
  int64_t width;
  uint64_t room;
  RankStream stream;
  DeviceMemory memory;
  RankPlaces places;
  Collectives collectives;
  PeerSum peers;
};

struct Case {
  std::string name;
  Bytes before;
  Bytes input;
  Bytes wanted;
  std::function<void()> run;
  int repeats = kRepeats;
};

class CapturedRun {
 public:
  CapturedRun(RankTest& test, const std::function<void()>& run);
  ~CapturedRun();
  CapturedRun(const CapturedRun&) = delete;
  CapturedRun& operator=(const CapturedRun&) = delete;
  void replay() const;

 private:
  RankTest& test_;
  cudaGraphExec_t captured_ = nullptr;
};

using RankBody = std::function<void(RankTest&)>;

uint64_t rank_room(int32_t num_ranks, int64_t width);
Bytes random_bytes(uint64_t seed, int32_t rank, uint64_t count);
std::vector<float> random_floats(uint64_t seed, int32_t rank, int64_t count);
float tree_sum(std::vector<float> parts);
Bytes bytes_of(const std::vector<float>& values);

void count_differences(const std::byte* seen, const std::byte* wanted, uint64_t byte_count, uint64_t* differences,
                       cudaStream_t stream);
void check_case(RankTest& test, const Case& given, Verdict& verdict);
std::vector<std::string> run_ranks(RankGroup& group, int64_t width, const RankBody& body);

void check_movement(RankTest& test, Verdict& verdict);
void check_sums(RankTest& test, Verdict& verdict);
void check_norms(RankTest& test, Verdict& verdict);
void measure(RankTest& test);
void check_faults(int32_t num_ranks, bool shares_devices, Verdict& verdict);

}
