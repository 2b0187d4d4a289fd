#pragma once

#include <cstdint>
#include <string>

namespace glint::cpu {

std::string processor_name();
uint64_t machine_memory();
uint64_t available_memory();

}
