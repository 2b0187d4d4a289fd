#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/build.sh [--cuda] [--tests] [--sanitize LIST] [--jobs N] [--check]

Builds build/libglint_cpu.so (CMake, Release).

  --cuda           also build build/libglint_cuda.so; needs nvcc of the CUDA toolkit 13
  --tests          also build the engine with the taps that tests use, build/libglint_cpu_test.so (with --cuda also
                   build/libglint_cuda_test.so); a folder that was once built so stays so
  --sanitize LIST  build with sanitizers and --tests into a folder of its own:
                   address,undefined -> build-address-undefined   thread -> build-thread
  --jobs N         compile N files at once (default: the number of cores)
  --check          only check that a C++ compiler is there, with --cuda also nvcc
TEXT
}

fail() {
  echo "build.sh: $*" >&2
  exit 1
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
sanitize=""
cuda=OFF
tests=false
jobs="$(getconf _NPROCESSORS_ONLN)"
check_only=false
while (($# > 0)); do
  case "$1" in
    --cuda) cuda=ON; shift ;;
    --tests) tests=true; shift ;;
    --sanitize) sanitize="${2:?--sanitize needs a list, such as address,undefined}"; shift 2 ;;
    --jobs) jobs="${2:?--jobs needs a number}"; shift 2 ;;
    --check) check_only=true; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown flag '$1'" ;;
  esac
done
[[ "$jobs" =~ ^[1-9][0-9]*$ ]] || fail "--jobs $jobs is not a positive number"
case "$sanitize" in
  "" | address,undefined | thread) ;;
  *) fail "--sanitize $sanitize is not known: use address,undefined or thread" ;;
esac
if [[ "$cuda" == ON && -n "$sanitize" ]]; then
  fail "--cuda and --sanitize $sanitize do not go together: leave one out (GPU code is checked by scripts/gpu_check.sh)"
fi

compiler="${CXX:-}"
for candidate in c++ g++ clang++; do
  if [[ -z "$compiler" ]] && command -v "$candidate" >/dev/null; then
    compiler="$candidate"
  fi
done
if [[ -z "$compiler" ]] || ! command -v "${compiler%% *}" >/dev/null; then
  fail "no C++ compiler found${CXX:+ (CXX=$CXX)}. Install g++ 11 or newer and start again:
  Debian, Ubuntu:  sudo apt install build-essential
  Fedora:          sudo dnf install gcc-c++
  Arch:            sudo pacman -S gcc"
fi
if [[ "$cuda" == ON ]]; then
  nvcc="${CUDACXX:-}"
  for candidate in nvcc "${CUDA_HOME:-${CUDA_PATH:-}}/bin/nvcc" /usr/local/cuda/bin/nvcc; do
    if [[ -z "$nvcc" ]] && command -v "$candidate" >/dev/null; then
      nvcc="$(command -v "$candidate")"
    fi
  done
  if [[ -z "$nvcc" ]] || ! command -v "$nvcc" >/dev/null; then
    fail "no nvcc found${CUDACXX:+ (CUDACXX=$CUDACXX)}. Install the CUDA toolkit 13 and start again, or set CUDACXX or
CUDA_HOME where it is installed already:
  Debian, Ubuntu:  sudo apt install cuda-toolkit-13-0  (from NVIDIA's package repository)
  Fedora:          sudo dnf install cuda-toolkit-13-0  (from NVIDIA's package repository)
  Arch:            sudo pacman -S cuda"
  fi
  PATH="$(dirname "$(command -v "$nvcc")"):$PATH"
fi
if "$check_only"; then
  exit 0
fi
command -v cmake >/dev/null || fail "no cmake found. Install the package cmake (Debian, Ubuntu: sudo apt install cmake), \
or run ./run.py --prepare, which brings its own"

folder="$root/build${sanitize:+-${sanitize//,/-}}"
cache="$folder/CMakeCache.txt"
cached() {
  sed -n "s/^$1:[A-Z]*=//p" "$cache"
}
program="$(command -v "${compiler%% *}")"
[[ "$program" == /* ]] || program="$(cd "$(dirname "$program")" && pwd)/${program##*/}"
if [[ -f "$cache" ]]; then
  if [[ "$(cached CMAKE_CXX_COMPILER)" != "$program" || "$(cached CMAKE_HOME_DIRECTORY)" != "$root" ]]; then
    echo "build.sh: $folder was configured for another compiler or place; configuring it anew"
    rm -rf "$cache" "$folder/CMakeFiles"
  fi
fi
generator=()
if [[ ! -f "$cache" ]] && command -v ninja >/dev/null; then
  generator=(-G Ninja)
fi
testing=()
if "$tests" || [[ -n "$sanitize" ]]; then
  testing=(-DGLINT_TESTING=ON)
fi
CXX="$program${compiler#"${compiler%% *}"}" cmake -S "$root" -B "$folder" "${generator[@]}" -DGLINT_SANITIZE="$sanitize" \
  -DGLINT_CUDA="$cuda" "${testing[@]}"
cmake --build "$folder" --parallel "$jobs"
