#include <chrono>
#include <thread>

#include "cuda/bench/collectives_check.h"

namespace glint::cuda::bench {

namespace {

constexpr double kShortDeadline = 3.0;
constexpr double kMostSeconds = 5.0;
constexpr uint64_t kFaultBytes = 4096;
constexpr std::chrono::milliseconds kHeadStart(300);

struct Outcome {
  std::vector<std::string> failures;
  double seconds = 0;
};

Outcome run_fault(int32_t num_ranks, bool shares_devices, const RankBody& body) {
  RankGroup group(num_ranks, shares_devices, Nccl::load(""));
  const auto start = std::chrono::steady_clock::now();
  Outcome outcome;
  outcome.failures = run_ranks(group, kOddWidth, body);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

void judge(Verdict& verdict, const Outcome& outcome, const std::string& name, const std::string& wanted) {
  bool holds = outcome.seconds < kMostSeconds;
  for (const std::string& failure : outcome.failures) holds = holds && failure.find(wanted) != std::string::npos;
  verdict.state(holds, name, text(outcome.seconds, " s; rank 0: ", outcome.failures.front()));
}

void wait_for_step(RankTest& test) {
  GLINT_CHECK_CUDA(cudaStreamSynchronize(test.stream.get()));
  test.collectives.check_async();
  test.peers.check_async();
  throw Failure(GLINT_STATUS_INTERNAL, text("rank ", test.rank, " saw no failure"));
}

void lose_last_rank(RankTest& test, const std::function<void()>& step) {
  if (test.rank == test.num_ranks() - 1) {
    std::this_thread::sleep_for(kHeadStart);
    throw Failure(GLINT_STATUS_INTERNAL, "a fault put in by the test");
  }
  step();
  wait_for_step(test);
}

void launch_sum_of_one_row(RankTest& test, int32_t slot) {
  NormCall sum{};
  sum.hidden = reinterpret_cast<float*>(test.places.work);
  sum.count = 1;
  sum.width = test.width;
  test.peers.launch(sum, slot, test.stream.get());
}

void check_missing_rank(int32_t num_ranks, bool shares_devices, Verdict& verdict) {
  const Outcome outcome = run_fault(num_ranks, shares_devices, [](RankTest& test) {
    if (test.rank == test.num_ranks() - 1) {
      std::this_thread::sleep_for(std::chrono::duration<double>(kShortDeadline + 0.5));
      test.group.require_whole();
    }
    test.open(kShortDeadline);
  });
  judge(verdict, outcome, "a rank that does not come to the start",
        text("rank ", num_ranks - 1, " of ", num_ranks, " did not come"));
}

void check_lost_rank(int32_t num_ranks, bool shares_devices, Verdict& verdict) {
  const std::string wanted = "a fault put in by the test";
  Outcome outcome = run_fault(num_ranks, shares_devices, [](RankTest& test) {
    test.open(kDeadlineSeconds);
    lose_last_rank(test, [&] { test.collectives.all_gather(test.places.work, kFaultBytes, test.stream.get()); });
  });
  judge(verdict, outcome, "a rank that fails while the others wait in an all-gather", wanted);
  outcome = run_fault(num_ranks, shares_devices, [](RankTest& test) {
    test.open(kDeadlineSeconds);
    const CapturedRun captured(test, [&] {
      test.collectives.all_gather(test.places.work, kFaultBytes, test.stream.get());
    });
    captured.replay();
    lose_last_rank(test, [&] { captured.replay(); });
  });
  judge(verdict, outcome, "the same in a captured graph", wanted);
  outcome = run_fault(num_ranks, shares_devices, [](RankTest& test) {
    test.open(kDeadlineSeconds);
    lose_last_rank(test, [&] { launch_sum_of_one_row(test, 0); });
  });
  judge(verdict, outcome, "the same in a sum over peer memory", wanted);
}

void check_silent_rank(int32_t num_ranks, bool shares_devices, Verdict& verdict) {
  const Outcome outcome = run_fault(num_ranks, shares_devices, [](RankTest& test) {
    test.open(kDeadlineSeconds);
    test.peers.set_wait_seconds(1.0);
    if (test.rank == test.num_ranks() - 1) {
      std::this_thread::sleep_for(std::chrono::duration<double>(kShortDeadline));
      test.group.require_whole();
    }
    for (int32_t use = 0; use < 6; ++use) launch_sum_of_one_row(test, use % 2);
    wait_for_step(test);
  });
  judge(verdict, outcome, "a rank that stays silent in a sum over peer memory",
        text("s for rank ", num_ranks - 1, " at meeting"));
}

void check_repeated_slot(int32_t num_ranks, bool shares_devices, Verdict& verdict) {
  const Outcome outcome = run_fault(num_ranks, shares_devices, [](RankTest& test) {
    test.open(kDeadlineSeconds);
    launch_sum_of_one_row(test, 0);
    launch_sum_of_one_row(test, 0);
    wait_for_step(test);
  });
  judge(verdict, outcome, "the same slot of peer memory twice", "slot of peer memory twice in a row");
}

void check_missing_library(Verdict& verdict) {
  std::string message;
  try {
    Nccl::load("/nowhere/libnccl.so.2");
  } catch (const Failure& failure) {
    message = failure.what();
  }
  verdict.state(message.find("GLINT_NCCL") != std::string::npos, "a library that is not there", message);
}

}

void check_faults(int32_t num_ranks, bool shares_devices, Verdict& verdict) {
  check_missing_library(verdict);
  check_repeated_slot(num_ranks, shares_devices, verdict);
  if (num_ranks == 1) return;
  check_missing_rank(num_ranks, shares_devices, verdict);
  check_lost_rank(num_ranks, shares_devices, verdict);
  check_silent_rank(num_ranks, shares_devices, verdict);
}

}
