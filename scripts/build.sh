#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/build.sh [--sanitize LIST] [--jobs N] [--check]

Builds build/libglint_cpu.so and build/libglint_cpu_test.so (CMake, Release).

  --sanitize LIST  build with sanitizers into a folder of its own:
                   address,undefined -> build-address-undefined   thread -> build-thread
  --jobs N         compile N files at once (default: the number of cores)
  --check          only check that a C++ compiler is there
TEXT
}

fail() {
  echo "build.sh: $*" >&2
  exit 1
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
sanitize=""
jobs="$(getconf _NPROCESSORS_ONLN)"
check_only=false
while (($# > 0)); do
  case "$1" in
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
CXX="$program${compiler#"${compiler%% *}"}" cmake -S "$root" -B "$folder" "${generator[@]}" -DGLINT_SANITIZE="$sanitize"
cmake --build "$folder" --parallel "$jobs"
