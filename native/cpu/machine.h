#pragma once

#include <cstdint>
#include <string>

namespace glint {

bool processor_runs(int32_t kernels);
#if defined(GLINT_X86)
bool prefers_bf16_dots();
#endif

namespace cpu {

std::string processor_name();
uint64_t machine_memory();
uint64_t available_memory();

}

}
