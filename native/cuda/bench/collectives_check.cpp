#include "cuda/bench/collectives_check.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace glint::cuda::bench {

namespace {

void run_group(int32_t num_ranks, bool shares_devices, int64_t width, Verdict& verdict, const RankBody& body) {
  RankGroup group(num_ranks, shares_devices, Nccl::load(""));
  const std::vector<std::string> failures = run_ranks(group, width, [&](RankTest& test) {
    const auto start = std::chrono::steady_clock::now();
    test.open(kDeadlineSeconds);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (test.rank == 0) {
      verdict.state(test.peers.is_available(), text("start of ", num_ranks, " ranks"),
                    text(seconds, " s, NCCL ", test.group.nccl()->version_text(), ", every link tested, peer memory ",
                         test.peers.is_available() ? "open" : test.peers.refusal()));
    }
    body(test);
  });
  for (const std::string& failure : failures) {
    if (!failure.empty()) verdict.state(false, "a rank ended early", failure);
  }
}

int run(int32_t num_ranks, const std::string& parts, int most_repeats) {
  const auto has = [&](const char* part) { return parts == "all" || parts.find(part) != std::string::npos; };
  int num_devices = 0;
  prepare_nccl_environment(false);
  GLINT_CHECK_CUDA(cudaGetDeviceCount(&num_devices));
  const bool shares_devices = num_devices < num_ranks;
  prepare_nccl_environment(shares_devices);
  std::printf("%d ranks on %d GPU%s%s\n", num_ranks, num_devices, num_devices == 1 ? "" : "s",
              shares_devices ? "; times are of ranks that share a GPU and say nothing about NVLink" : "");
  Verdict verdict(most_repeats);
  run_group(num_ranks, shares_devices, kWidth, verdict, [&](RankTest& test) {
    if (has("movement")) check_movement(test, verdict);
    if (has("sums")) check_sums(test, verdict);
    if (has("norms")) check_norms(test, verdict);
    if (has("times")) measure(test);
  });
  if (has("odd")) {
    run_group(num_ranks, shares_devices, kOddWidth, verdict, [&](RankTest& test) { check_norms(test, verdict); });
  }
  if (has("faults")) {
    check_faults(num_ranks, shares_devices, verdict);
    run_group(num_ranks, shares_devices, kOddWidth, verdict, [](RankTest&) {});
  }
  std::printf("%d ranks: %d checks failed\n", num_ranks, verdict.num_failures());
  return verdict.num_failures() == 0 ? 0 : 1;
}

}

}

int main(int count, char** arguments) {
  const int32_t num_ranks = count > 1 ? std::atoi(arguments[1]) : 1;
  const std::string parts = count > 2 ? arguments[2] : "all";
  const int most_repeats = count > 3 ? std::atoi(arguments[3]) : glint::cuda::bench::kRepeats;
  try {
    return glint::cuda::bench::run(num_ranks, parts, most_repeats);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 2;
  }
}
