#include <stdatomic.h>
#include <stddef.h>

#include "allocations.h"

extern int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, size_t),
                                                     void (*on_free)(const volatile void*));

static atomic_int is_counting;
static atomic_long num_allocations;

static void note_allocation(const volatile void* memory, size_t bytes) {
  (void)memory;
  (void)bytes;
  if (atomic_load(&is_counting) != 0) atomic_fetch_add(&num_allocations, 1);
}

static void note_free(const volatile void* memory) { (void)memory; }

void start_counting(void) {
  static int is_hooked;
  if (!is_hooked) is_hooked = __sanitizer_install_malloc_and_free_hooks(note_allocation, note_free);
  atomic_store(&is_counting, 1);
}

long allocations_of_last_part(void) {
  atomic_store(&is_counting, 0);
  return atomic_exchange(&num_allocations, 0);
}
