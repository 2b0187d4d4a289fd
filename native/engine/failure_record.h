#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "include/glint.h"
#include "model/backend.h"

namespace glint {

class FailureRecord {
 public:
  FailureRecord() { words_.reserve(kMaxFailureBytes); }

  bool is_set() const noexcept { return status_ != GLINT_STATUS_OK; }
  glint_status status() const noexcept { return status_; }
  const std::string& words() const noexcept { return words_; }

  template <typename... Parts>
  void set(glint_status status, const Parts&... parts) noexcept {
    clear();
    status_ = status;
    (add(parts), ...);
  }

  void clear() noexcept {
    status_ = GLINT_STATUS_OK;
    words_.clear();
  }

 private:
  void add(std::string_view part) noexcept {
    words_.append(part.substr(0, std::min(part.size(), kMaxFailureBytes - words_.size())));
  }

  glint_status status_ = GLINT_STATUS_OK;
  std::string words_;
};

}
