#pragma once

#include <immintrin.h>

#include <type_traits>

namespace glint {

namespace {

template <auto kKernel>
struct ClearingUpperHalves;

template <typename Result, typename... Arguments, Result (*kKernel)(Arguments...)>
struct ClearingUpperHalves<kKernel> {
  static Result call(Arguments... arguments) {
    if constexpr (std::is_void_v<Result>) {
      kKernel(arguments...);
      _mm256_zeroupper();
    } else {
      const Result result = kKernel(arguments...);
      _mm256_zeroupper();
      return result;
    }
  }
};

template <auto kKernel>
inline constexpr auto* kClearingUpperHalves = &ClearingUpperHalves<kKernel>::call;

}

}
