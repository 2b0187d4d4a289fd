#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/instruction_sets.sh [--target x86_64|aarch64] [--jobs N]

Runs the CPU kernels whose instructions this machine may not have: builds libglint_cpu_test.so with Debian's compiler
for the architecture and lets tests/cpu/instruction_sets compare every operation with the exact kernels under qemu-user.
NEON and AVX2 are emulated by qemu; AVX-512 and AMX, which it does not know, by the models of
tests/cpu/instruction_sets/modelled. Without --target: x86_64 on aarch64, both on x86-64.

  --target NAME  only this architecture
  --jobs N       compile and run N at once (default: the number of cores)
TEXT
}

fail() {
  echo "instruction_sets.sh: $*" >&2
  exit 1
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "$(uname -m)" in
  aarch64 | arm64) targets=(x86_64) ;;
  x86_64 | amd64) targets=(aarch64 x86_64) ;;
  *) fail "processor $(uname -m) is not supported: glint runs on x86-64 and aarch64" ;;
esac
jobs="$(getconf _NPROCESSORS_ONLN)"
while (($# > 0)); do
  case "$1" in
    --target) targets=("${2:?--target needs x86_64 or aarch64}"); shift 2 ;;
    --jobs) jobs="${2:?--jobs needs a number}"; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown flag '$1'" ;;
  esac
done
[[ "$jobs" =~ ^[1-9][0-9]*$ ]] || fail "--jobs $jobs is not a positive number"

need() {
  fail "no $1 found. Install the package $2 (Debian, Ubuntu: sudo apt install $2)"
}

need_tools() {
  local target="$1" compiler="$1-linux-gnu-g++" package="g++-${1/_/-}-linux-gnu"
  if [[ "$(uname -m)" == "$target" ]]; then
    package="g++"
  fi
  command -v cmake >/dev/null || need cmake cmake
  command -v "$compiler" >/dev/null || need "$compiler" "$package"
  command -v "qemu-$target" >/dev/null || need "qemu-$target" qemu-user
  if [[ "$target" == x86_64 ]]; then
    "$compiler" -E -x c++ -include simde/x86/avx512.h /dev/null >/dev/null 2>&1 || need simde/x86/avx512.h libsimde-dev
  fi
}

build() {
  local target="$1" folder="build-$1" generator=()
  if [[ ! -f "$folder/CMakeCache.txt" ]] && command -v ninja >/dev/null; then
    generator=(-G Ninja)
  fi
  cmake -S . -B "$folder" "${generator[@]}" -DGLINT_TESTING=ON -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/toolchain_$target.cmake" \
    -DGLINT_MODELLED="$([[ "$target" == x86_64 ]] && echo ON || echo OFF)"
  cmake --build "$folder" --target glint_cpu_test --parallel "$jobs"
  "$target-linux-gnu-gcc" -std=c11 -O1 -Wall -Wextra -Wpedantic -Werror -Inative/include \
    tests/cpu/instruction_sets/*.c tests/cpu/programs/tiny_model.c "$folder/libglint_cpu_test.so" -lm \
    -Wl,-rpath,"$PWD/$folder" -o "$folder/instruction_sets"
}

compare() {
  local target="$1" folder="build-$1"
  shift
  printf '%s\n' "$@" | xargs -P "$jobs" -I NAME "qemu-$target" -cpu max -L "/usr/$target-linux-gnu" \
    "$folder/instruction_sets" NAME "$folder/tiny_model_NAME.bin" ||
    fail "kernels of $target differ from the exact ones, or one of $* does not run"
}

for target in "${targets[@]}"; do
  case "$target" in
    x86_64) sets=(amx avx512 avx512_bf16 avx2 plain) ;;
    aarch64) sets=(neon neon_bf16 plain) ;;
    *) fail "--target $target is not known: use x86_64 or aarch64" ;;
  esac
  need_tools "$target"
  build "$target"
  compare "$target" "${sets[@]}"
done
