#pragma once

namespace glint::testing {

inline thread_local bool allocations_fail = false;

}
