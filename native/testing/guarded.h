#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "base/contract.h"

namespace glint::testing {

inline thread_local std::string last_error;

template <typename Body>
int32_t guarded(Body body) {
  try {
    body();
    return GLINT_STATUS_OK;
  } catch (const Failure& failure) {
    last_error = failure.what();
    return failure.status();
  } catch (const std::exception& failure) {
    last_error = failure.what();
    return GLINT_STATUS_INTERNAL;
  }
}

}
