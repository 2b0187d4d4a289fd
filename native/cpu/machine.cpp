#include "cpu/machine.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <optional>

namespace glint::cpu {

namespace {

std::optional<std::string> line_after(const char* path, const std::string& label) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(label) || colon == std::string::npos) continue;
    const size_t first = line.find_first_not_of(" \t", colon + 1);
    return first == std::string::npos ? std::string() : line.substr(first);
  }
  return std::nullopt;
}

uint64_t memory_of(int page_count_name) {
  return static_cast<uint64_t>(sysconf(page_count_name)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}

std::string processor_name() {
  const std::optional<std::string> name = line_after("/proc/cpuinfo", "model name");
  if (name.has_value() && !name->empty()) return *name;
  utsname kind{};
  return uname(&kind) == 0 ? std::string(kind.machine) + " processor" : "processor";
}

uint64_t machine_memory() { return memory_of(_SC_PHYS_PAGES); }

uint64_t available_memory() {
  constexpr uint64_t kKibibyte = 1024;
  const std::optional<std::string> kibibytes = line_after("/proc/meminfo", "MemAvailable");
  return kibibytes.has_value() ? std::stoull(*kibibytes) * kKibibyte : memory_of(_SC_AVPHYS_PAGES);
}

}
