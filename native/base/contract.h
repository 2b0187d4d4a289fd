#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include "include/glint.h"

namespace glint {

class Failure : public std::exception {
 public:
  Failure(glint_status status, std::string message) : status_(status), message_(std::move(message)) {}
  glint_status status() const { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  glint_status status_;
  std::string message_;
};

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
void require(bool holds, glint_status status, const Parts&... parts) {
  if (!holds) throw Failure(status, text(parts...));
}

template <typename... Parts>
void require_argument(bool holds, const Parts&... parts) {
  require(holds, GLINT_STATUS_INVALID_ARGUMENT, parts...);
}

template <typename Struct>
void require_struct(const Struct* value, const char* name) {
  require_argument(value != nullptr, name, " is null");
  require_argument(value->struct_bytes == sizeof(Struct), name, ".struct_bytes is ", value->struct_bytes,
                   ", this library expects ", sizeof(Struct), ": rebuild the caller against the same glint.h");
}

}
