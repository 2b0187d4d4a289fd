#define _GNU_SOURCE

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "allocations.h"

extern void* __libc_malloc(size_t bytes);
extern void* __libc_calloc(size_t count, size_t bytes);
extern void* __libc_realloc(void* old, size_t bytes);
extern void* __libc_memalign(size_t alignment, size_t bytes);

static atomic_int is_counting;
static atomic_long num_allocations;

static void note_allocation(void) {
  if (atomic_load(&is_counting) != 0) atomic_fetch_add(&num_allocations, 1);
}

void* malloc(size_t bytes) {
  note_allocation();
  return __libc_malloc(bytes);
}

void* calloc(size_t count, size_t bytes) {
  note_allocation();
  return __libc_calloc(count, bytes);
}

void* realloc(void* old, size_t bytes) {
  note_allocation();
  return __libc_realloc(old, bytes);
}

void* memalign(size_t alignment, size_t bytes) {
  note_allocation();
  return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  note_allocation();
  return __libc_memalign(alignment, bytes);
}

int posix_memalign(void** out, size_t alignment, size_t bytes) {
  note_allocation();
  *out = __libc_memalign(alignment, bytes);
  return *out == NULL ? ENOMEM : 0;
}

void* mmap(void* address, size_t bytes, int protection, int flags, int descriptor, off_t offset) {
  note_allocation();
  return (void*)syscall(SYS_mmap, address, bytes, protection, flags, descriptor, offset);
}

long allocations_of_last_part(void) {
  atomic_store(&is_counting, 0);
  return atomic_exchange(&num_allocations, 0);
}

void start_counting(void) { atomic_store(&is_counting, 1); }
