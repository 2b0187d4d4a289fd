#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu_check.sh correct|speed|build

Builds the CUDA kernels and their check programs into build-cuda (needs nvcc 13 and cmake) and runs them on the GPU of
this machine.

  correct  every kernel against a plain FP64 reference, repeatability and independence of the row count
  speed    microseconds, GB/s and the share of the read ceiling measured in the same run
  build    only build; needs no GPU
TEXT
}

part="${1:-}"
case "$part" in
  correct | speed | build) ;;
  -h | --help) usage; exit 0 ;;
  *) usage >&2; echo "gpu_check.sh: unknown part '$part'" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for tool in nvcc cmake; do
  if ! command -v "$tool" >/dev/null; then
    echo "gpu_check.sh: no $tool found; install the CUDA toolkit 13 and cmake" >&2
    exit 1
  fi
done
cmake -S . -B build-cuda -DGLINT_CUDA=ON -DGLINT_TESTING=OFF
cmake --build build-cuda --target products_check step_check --parallel "$(getconf _NPROCESSORS_ONLN)"
case "$part" in
  build) exit 0 ;;
  correct)
    build-cuda/products_check dense_check
    build-cuda/products_check experts_check
    build-cuda/step_check all
    ;;
  speed)
    build-cuda/products_check dense_speed
    build-cuda/products_check experts_speed
    build-cuda/step_check all
    ;;
esac
