#pragma once

#include <atomic>

namespace glint {

inline std::atomic<bool> rounds_new_pages = false;

}
