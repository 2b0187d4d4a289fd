#pragma once

#include <cstdint>

namespace glint {

bool processor_runs(int32_t kernels);

}
