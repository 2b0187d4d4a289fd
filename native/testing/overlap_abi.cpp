#include "cpu/backend.h"
#include "include/glint.h"

extern "C" {

GLINT_API void glint_testing_defer_results(int32_t is_on) { glint::cpu::defers_results = is_on != 0; }
}
