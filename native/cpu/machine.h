#pragma once

#include <cstdint>
#include <string>

namespace glint {

bool processor_runs(int32_t kernels);

namespace cpu {

std::string processor_name();
uint64_t machine_memory();
uint64_t available_memory();

}

}
