#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/instruction_sets.sh [--jobs N]

Runs the CPU kernels of the architecture that this machine does not have: builds libglint_cpu_test.so with Debian's
cross compiler and lets tests/cpu/instruction_sets compare every operation with the exact kernels under qemu-user. On
aarch64 that is AVX2, on x86-64 NEON.

  --jobs N  compile N files at once (default: the number of cores)
TEXT
}

fail() {
  echo "instruction_sets.sh: $*" >&2
  exit 1
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs="$(getconf _NPROCESSORS_ONLN)"
while (($# > 0)); do
  case "$1" in
    --jobs) jobs="${2:?--jobs needs a number}"; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown flag '$1'" ;;
  esac
done
[[ "$jobs" =~ ^[1-9][0-9]*$ ]] || fail "--jobs $jobs is not a positive number"

need() {
  command -v "$1" >/dev/null || fail "no $1 found. Install the package $2 (Debian, Ubuntu: sudo apt install $2)"
}

build() {
  local target="$1" folder="build-$1" generator=()
  if [[ ! -f "$folder/CMakeCache.txt" ]] && command -v ninja >/dev/null; then
    generator=(-G Ninja)
  fi
  cmake -S . -B "$folder" "${generator[@]}" -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/toolchain_$target.cmake"
  cmake --build "$folder" --target glint_cpu_test --parallel "$jobs"
  "$target-linux-gnu-gcc" -std=c11 -O1 -Wall -Wextra -Wpedantic -Werror -Inative/include \
    tests/cpu/instruction_sets/*.c tests/cpu/programs/tiny_model.c "$folder/libglint_cpu_test.so" -lm \
    -Wl,-rpath,"$PWD/$folder" -o "$folder/instruction_sets"
}

compare() {
  local target="$1" kernels failed=0
  shift
  for kernels in "$@"; do
    "qemu-$target" -cpu max -L "/usr/$target-linux-gnu" "build-$target/instruction_sets" "$kernels" \
      "build-$target/tiny_model.bin" || failed=1
  done
  return "$failed"
}

case "$(uname -m)" in
  aarch64 | arm64) target=x86_64 sets=(plain avx2) ;;
  x86_64 | amd64) target=aarch64 sets=(plain neon) ;;
  *) fail "processor $(uname -m) is not supported: glint runs on x86-64 and aarch64" ;;
esac
need cmake cmake
need "$target-linux-gnu-g++" "g++-${target/_/-}-linux-gnu"
need "qemu-$target" qemu-user
build "$target"
compare "$target" "${sets[@]}"
