#include "cuda/step_state.h"
#include "engine/engine.h"
#include "testing/guarded.h"

extern "C" {

GLINT_API int32_t glint_testing_decode_tasks(glint_engine* handle, int64_t* count) {
  return glint::testing::guarded([&] { *count = glint::engine_of(handle)->forward().step().num_decode_tasks; });
}
}
