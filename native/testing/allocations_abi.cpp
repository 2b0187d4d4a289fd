#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "include/glint.h"
#include "testing/allocations.h"

void* operator new(std::size_t byte_count) {
  void* memory = glint::testing::allocations_fail ? nullptr : std::malloc(byte_count == 0 ? 1 : byte_count);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }

void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" {

GLINT_API int32_t glint_testing_allocations_can_fail(void) {
  glint::testing::allocations_fail = true;
  int32_t has_failed = 0;
  try {
    operator delete(operator new(1));
  } catch (const std::bad_alloc&) {
    has_failed = 1;
  }
  glint::testing::allocations_fail = false;
  return has_failed;
}
}
