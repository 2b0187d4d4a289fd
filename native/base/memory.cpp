#include "base/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/contract.h"

namespace glint {

namespace {

uint64_t guard_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

uint64_t usable_bytes(uint64_t byte_count) { return (byte_count + guard_bytes() - 1) / guard_bytes() * guard_bytes(); }

}

ZeroedMemory::ZeroedMemory(uint64_t byte_count) : byte_count_(byte_count) {
  if (byte_count == 0) return;
  const uint64_t usable = usable_bytes(byte_count);
  void* address = mmap(nullptr, usable + guard_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(address != MAP_FAILED, GLINT_STATUS_OUT_OF_MEMORY, "could not reserve ", byte_count,
          " bytes of memory: ", std::strerror(errno), "; lower num_pages, max_step_tokens or max_step_items");
  madvise(address, usable, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(address);
  mprotect(data_ + usable, guard_bytes(), PROT_NONE);
}

ZeroedMemory::~ZeroedMemory() {
  if (data_ != nullptr) munmap(data_, usable_bytes(byte_count_) + guard_bytes());
}

ZeroedMemory::ZeroedMemory(ZeroedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), byte_count_(std::exchange(other.byte_count_, 0)) {}

ZeroedMemory& ZeroedMemory::operator=(ZeroedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(byte_count_, other.byte_count_);
  return *this;
}

MappedFile::MappedFile(const char* path, uint64_t expected_bytes) : byte_count_(expected_bytes) {
  require_argument(path != nullptr, "a checkpoint file has a null path");
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  require(descriptor >= 0, GLINT_STATUS_FILE, "could not open ", path, ": ", std::strerror(errno));
  struct stat status{};
  const bool has_size = fstat(descriptor, &status) == 0;
  const uint64_t actual_bytes = has_size ? static_cast<uint64_t>(status.st_size) : 0;
  if (actual_bytes != expected_bytes || expected_bytes == 0) {
    close(descriptor);
    throw Failure(GLINT_STATUS_FILE, text(path, " has ", actual_bytes, " bytes, the checkpoint table says ",
                                          expected_bytes, ": the file changed since it was checked"));
  }
  void* address = mmap(nullptr, expected_bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  const int error = errno;
  close(descriptor);
  require(address != MAP_FAILED, GLINT_STATUS_FILE, "could not map ", path, ": ", std::strerror(error));
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), byte_count_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), byte_count_(std::exchange(other.byte_count_, 0)) {}

}
