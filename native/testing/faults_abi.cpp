#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/contract.h"
#include "base/faults.h"

namespace {

struct Fault {
  glint::FaultPoint place;
  int32_t rank;
  int32_t passes;
};

constexpr const char* kVariable = "GLINT_FAULT";
constexpr std::array kPlaces = {"load", "step", "collective", "capture"};

std::atomic<int32_t> num_passes = 0;

Fault asked_fault(const std::string& asked) {
  const size_t rank_at = asked.find(':');
  const size_t passes_at = asked.find(':', rank_at + 1);
  for (size_t place = 0; place < kPlaces.size(); ++place) {
    if (passes_at != std::string::npos && asked.substr(0, rank_at) == kPlaces[place]) {
      return {static_cast<glint::FaultPoint>(place), std::stoi(asked.substr(rank_at + 1)),
              std::stoi(asked.substr(passes_at + 1))};
    }
  }
  throw glint::Failure(
      GLINT_STATUS_INVALID_ARGUMENT,
      glint::text("$", kVariable, " is '", asked, "', expected load|step|collective|capture:RANK:PASSES"));
}

void fail_where_asked(glint::FaultPoint place, int32_t rank) {
  const char* asked = std::getenv(kVariable);
  if (asked == nullptr) return;
  const Fault fault = asked_fault(asked);
  if (fault.place != place || fault.rank != rank || ++num_passes != fault.passes) return;
  throw glint::Failure(GLINT_STATUS_INTERNAL, glint::text("the fault that $", kVariable, "=", asked, " asks for"));
}

[[maybe_unused]] const bool is_installed = [] {
  glint::fault_hook = fail_where_asked;
  return true;
}();

}

extern "C" {

GLINT_API void glint_testing_reset_faults(void) { num_passes = 0; }
}
