#pragma once

#include <atomic>
#include <cstdint>

namespace glint {

struct LoadProgress {
  std::atomic<bool> is_loading = false;
  std::atomic<uint64_t> bytes_done = 0;
  std::atomic<uint64_t> bytes_total = 0;

  void begin(uint64_t total) {
    bytes_done = 0;
    bytes_total = total;
    is_loading = true;
  }
  void expect(uint64_t more) { bytes_total += more; }
  void end() { is_loading = false; }
};

LoadProgress& load_progress();

struct LoadEnd {
  ~LoadEnd() { load_progress().end(); }
};

}
