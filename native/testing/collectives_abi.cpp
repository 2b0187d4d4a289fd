#include <atomic>
#include <cstdint>
#include <exception>
#include <string>

#include "base/contract.h"
#include "base/faults.h"
#include "cpu/collectives.h"
#include "include/glint.h"
#include "testing/allocations.h"
#include "testing/guarded.h"

namespace {

using glint::World;
using glint::cpu::Collectives;
using glint::testing::guarded;
using glint::testing::last_error;

std::atomic<glint::FaultHook> hook_before = nullptr;
std::atomic<int32_t> failing_place = 0;
std::atomic<uint64_t> failing_ranks = 0;
std::atomic<bool> starves_ranks = false;

void fail_asked_ranks(glint::FaultPoint place, int32_t rank) {
  const bool is_asked = (failing_ranks.load() >> static_cast<uint32_t>(rank) & 1U) != 0;
  if (!is_asked || static_cast<int32_t>(place) != failing_place.load()) return;
  glint::Failure failure(GLINT_STATUS_INTERNAL, glint::text("rank ", rank, " is one of those asked to fail"));
  glint::testing::allocations_fail = starves_ranks;
  throw failure;
}

}

extern "C" {

GLINT_API const char* glint_testing_collectives_error(void) { return last_error.c_str(); }

GLINT_API World* glint_testing_world_new(int32_t num_ranks) { return new World(num_ranks); }

GLINT_API void glint_testing_world_free(World* world) { delete world; }

GLINT_API void glint_testing_world_stop(World* world, const char* why) { world->stop(why); }

GLINT_API Collectives* glint_testing_collectives_new(World* world, int32_t rank) {
  return new Collectives(*world, rank);
}

GLINT_API void glint_testing_collectives_free(Collectives* collectives) { delete collectives; }

GLINT_API int32_t glint_testing_all_gather(Collectives* rank, void* data, int64_t bytes_per_rank, int64_t total_bytes) {
  return guarded([&] { rank->all_gather(data, bytes_per_rank, total_bytes); });
}

GLINT_API int32_t glint_testing_all_to_all(Collectives* rank, void* out, const void* in, int64_t bytes_per_rank) {
  return guarded([&] { rank->all_to_all(out, in, bytes_per_rank); });
}

GLINT_API int32_t glint_testing_broadcast(Collectives* rank, void* data, int64_t byte_count, int32_t root) {
  return guarded([&] { rank->broadcast(data, byte_count, root); });
}

GLINT_API int32_t glint_testing_all_reduce(Collectives* rank, float* out, const float* part, int64_t count) {
  return guarded([&] { rank->all_reduce(out, part, count); });
}

GLINT_API int32_t glint_testing_reduce_scatter(Collectives* rank, float* out, const float* part, int64_t first,
                                               int64_t count, int64_t total) {
  return guarded([&] { rank->reduce_scatter(out, part, first, count, total); });
}

GLINT_API int32_t glint_testing_gather_columns(Collectives* rank, float* out, const float* in, int64_t rows,
                                               int64_t cols_per_rank, int64_t total_cols, int64_t out_stride,
                                               int32_t root) {
  return guarded([&] { rank->gather_columns({rows, cols_per_rank, total_cols, out_stride}, out, in, root); });
}

GLINT_API uint64_t glint_testing_collectives_run(Collectives* rank) { return rank->num_run(); }

GLINT_API uint64_t glint_testing_collective_bytes(Collectives* rank) { return rank->bytes_sent(); }

GLINT_API void glint_testing_fail_ranks(int32_t place, uint64_t ranks) {
  failing_place = place;
  failing_ranks = ranks;
  hook_before = glint::fault_hook.exchange(fail_asked_ranks);
}

GLINT_API void glint_testing_starve_failed_ranks(int32_t is_on) { starves_ranks = is_on != 0; }

GLINT_API void glint_testing_fail_no_ranks(void) { glint::fault_hook = hook_before.load(); }
}
