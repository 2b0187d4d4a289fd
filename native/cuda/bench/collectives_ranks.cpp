#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "base/rng.h"
#include "cuda/bench/collectives_check.h"

namespace glint::cuda::bench {

namespace {

constexpr double kPeerWaitSeconds = 20.0;
constexpr int kLatePeriod = 97;
constexpr std::chrono::microseconds kLateBy(300);

uint64_t state_bytes(int64_t width) { return static_cast<uint64_t>((kMaxRows + kMaxParts) * (width * 9 + 64) + 4096); }

RankPlaces take_places(Arena& arena, int32_t num_ranks, int64_t width) {
  const auto room = static_cast<int64_t>(rank_room(num_ranks, width));
  RankPlaces places{};
  for (std::byte** place : {&places.work, &places.before, &places.input, &places.wanted, &places.scratch}) {
    *place = arena.take<std::byte>(room);
  }
  places.weight = arena.take<float>(width);
  places.differences = arena.take<uint64_t>(1);
  places.peers = PeerSum::take_buffers(arena, num_ranks, kMaxRows, width);
  return places;
}

DeviceMemory rank_memory(int32_t num_ranks, int64_t width) {
  Arena counted;
  take_places(counted, num_ranks, width);
  return DeviceMemory(counted.used(), "a rank's test buffers");
}

RankPlaces rank_places(const DeviceMemory& memory, int32_t num_ranks, int64_t width) {
  Arena arena(memory.data());
  return take_places(arena, num_ranks, width);
}

}

CapturedRun::CapturedRun(RankTest& test, const std::function<void()>& run) : test_(test) {
  cudaGraph_t graph = nullptr;
  const cudaStream_t stream = test.stream.get();
  test.group.wait_for_stream(stream);
  test.group.wait(test.rank, "a capture", deadline_after(kDeadlineSeconds));
  GLINT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run();
  GLINT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  GLINT_CHECK_CUDA(cudaGraphInstantiate(&captured_, graph, 0));
  GLINT_CHECK_CUDA(cudaGraphDestroy(graph));
  GLINT_CHECK_CUDA(cudaGraphUpload(captured_, stream));
  test.group.wait_for_stream(stream);
  test.group.wait(test.rank, "the end of a capture", deadline_after(kDeadlineSeconds));
}

CapturedRun::~CapturedRun() { cudaGraphExecDestroy(captured_); }

void CapturedRun::replay() const { GLINT_CHECK_CUDA(cudaGraphLaunch(captured_, test_.stream.get())); }

uint64_t rank_room(int32_t num_ranks, int64_t width) {
  const uint64_t parts = static_cast<uint64_t>(num_ranks * (kMaxRows + kMaxParts) * width) * sizeof(float);
  return std::max({parts, 2 * state_bytes(width), 2 * static_cast<uint64_t>(num_ranks) * Collectives::kLinkTestBytes});
}

void Verdict::print(const std::string& name, const std::string& detail) {
  const uint64_t differences = differences_.exchange(0);
  state(differences == 0, name, text(detail, ", ", differences, " bytes differ"));
}

void Verdict::state(bool holds, const std::string& name, const std::string& detail) {
  std::printf("%s %s: %s\n", holds ? "ok  " : "FAIL", name.c_str(), detail.c_str());
  std::fflush(stdout);
  num_failures_ += holds ? 0 : 1;
}

RankStream::RankStream(int32_t rank) {
  int num_devices = 0;
  GLINT_CHECK_CUDA(cudaGetDeviceCount(&num_devices));
  GLINT_CHECK_CUDA(cudaSetDevice(rank % num_devices));
  GLINT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

RankStream::~RankStream() { cudaStreamDestroy(stream_); }

RankTest::RankTest(RankGroup& given_group, int32_t given_rank, int64_t given_width)
    : group(given_group),
      rank(given_rank),
      width(given_width),
      room(rank_room(given_group.num_ranks(), given_width)),
      stream(given_rank),
      memory(rank_memory(given_group.num_ranks(), given_width)),
      places(rank_places(memory, given_group.num_ranks(), given_width)),
      collectives(given_group, given_rank),
      peers(given_group, given_rank, places.peers, kMaxRows, given_width) {}

void RankTest::open(double seconds) {
  const Deadline deadline = deadline_after(seconds);
  collectives.open(
      {.scratch = places.scratch,
       .scratch_bytes = room,
       .stream = stream.get(),
       .communication_stream = stream.get(),
       .deadline = deadline});
  peers.set_wait_seconds(kPeerWaitSeconds);
  peers.open(stream.get(), deadline);
}

void RankTest::upload(std::byte* place, const void* data, uint64_t byte_count) {
  require_argument(byte_count <= room, "a test of ", byte_count, " bytes has room for ", room);
  if (byte_count == 0) return;
  GLINT_CHECK_CUDA(cudaMemcpyAsync(place, data, byte_count, cudaMemcpyHostToDevice, stream.get()));
  group.wait_for_stream(stream.get());
}

Bytes RankTest::download(const std::byte* place, uint64_t byte_count) {
  Bytes bytes(byte_count);
  group.wait_for_stream(stream.get());
  GLINT_CHECK_CUDA(cudaMemcpyAsync(bytes.data(), place, byte_count, cudaMemcpyDeviceToHost, stream.get()));
  group.wait_for_stream(stream.get());
  return bytes;
}

Bytes random_bytes(uint64_t seed, int32_t rank, uint64_t count) {
  Bytes bytes(count);
  const uint64_t key = row_key(seed, static_cast<uint32_t>(rank), 1);
  for (uint64_t index = 0; index < count; ++index) {
    bytes[index] = static_cast<uint8_t>(token_bits(key, static_cast<int32_t>(index / 8)) >> (index % 8 * 8));
  }
  return bytes;
}

std::vector<float> random_floats(uint64_t seed, int32_t rank, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  const uint64_t key = row_key(seed, static_cast<uint32_t>(rank), 2);
  for (int64_t index = 0; index < count; ++index) {
    const double drawn = open_uniform(token_bits(key, static_cast<int32_t>(index)));
    values[static_cast<size_t>(index)] = static_cast<float>(4.0 * drawn - 2.0);
  }
  return values;
}

float tree_sum(std::vector<float> parts) {
  for (size_t width = 1; width < parts.size(); width *= 2) {
    for (size_t part = 0; part + width < parts.size(); part += 2 * width) parts[part] += parts[part + width];
  }
  return parts[0];
}

Bytes bytes_of(const std::vector<float>& values) {
  Bytes bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

void check_case(RankTest& test, const Case& given, Verdict& verdict) {
  const uint64_t none = 0;
  const int repeats = std::min(given.repeats, verdict.most_repeats());
  const cudaStream_t stream = test.stream.get();
  test.upload(test.places.before, given.before.data(), given.before.size());
  test.upload(test.places.input, given.input.data(), given.input.size());
  test.upload(test.places.wanted, given.wanted.data(), given.wanted.size());
  test.upload(reinterpret_cast<std::byte*>(test.places.differences), &none, sizeof(none));
  const auto iteration = [&] {
    GLINT_CHECK_CUDA(cudaMemcpyAsync(test.places.work, test.places.before, given.before.size(),
                                     cudaMemcpyDeviceToDevice, stream));
    given.run();
    count_differences(test.places.work, test.places.wanted, given.wanted.size(), test.places.differences, stream);
  };
  test.group.wait(test.rank, "a case", deadline_after(kDeadlineSeconds));
  for (int repeat = 0; repeat < repeats; ++repeat) {
    if (repeat % kLatePeriod == test.rank) std::this_thread::sleep_for(kLateBy);
    iteration();
  }
  test.group.wait_for_stream(stream);
  {
    const CapturedRun captured(test, iteration);
    for (int repeat = 0; repeat < repeats; ++repeat) captured.replay();
    test.group.wait_for_stream(stream);
    test.group.wait(test.rank, "the end of a case", deadline_after(kDeadlineSeconds));
  }
  test.collectives.check_async();
  test.peers.check_async();
  uint64_t differences = 0;
  const Bytes counted = test.download(reinterpret_cast<std::byte*>(test.places.differences), sizeof(differences));
  std::memcpy(&differences, counted.data(), sizeof(differences));
  verdict.add(differences);
  test.group.wait(test.rank, "the verdict of a case", deadline_after(kDeadlineSeconds));
  if (test.rank == 0) verdict.print(given.name, text(repeats, " runs and as many replays"));
  test.group.wait(test.rank, "the next case", deadline_after(kDeadlineSeconds));
}

std::vector<std::string> run_ranks(RankGroup& group, int64_t width, const RankBody& body) {
  std::vector<std::string> failures(static_cast<size_t>(group.num_ranks()));
  std::vector<std::unique_ptr<RankTest>> tests(failures.size());
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < group.num_ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      const auto place = static_cast<size_t>(rank);
      try {
        tests[place] = std::make_unique<RankTest>(group, rank, width);
        body(*tests[place]);
      } catch (const std::exception& failure) {
        failures[place] = failure.what();
        group.abort(text("rank ", rank, " failed: ", failure.what()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::unique_ptr<RankTest>& test : tests) test.reset();
  return failures;
}

}
