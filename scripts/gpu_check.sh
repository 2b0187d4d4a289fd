#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu_check.sh correct|sanitize|speed|serve|build

What must pass on a machine with an NVIDIA GPU; each part takes under 8 minutes. Builds libglint_cpu.so, libglint_cuda.so,
their test builds and the check programs into build-cuda (needs nvcc 13, cmake and g++) and runs them. Figures belong in
docs/gpu-results.md.

  correct   every kernel against an FP64 reference, then tests/gpu: whole models against the exact CPU path and torch,
            the determinism contract, leaks and failures (needs pytest, torch and transformers in $PYTHON)
  sanitize  the check programs at odd sizes and an engine run under compute-sanitizer (memcheck, racecheck)
  speed     microseconds, GB/s, TFLOP/s and the share of the read ceiling measured in the same run, then one rank of
            eight of GLM-4.7 at true size (glint bench rank)
  serve     the sample model behind the real server: the smoke questions, then output tok/s at concurrency 64
  build     only build, and check that both libraries export the same symbols; needs no GPU

Environment: PYTHON (python3) runs the Python parts; OUT, if set, is a folder for JSON results.
TEXT
}

part="${1:-}"
case "$part" in
  correct | sanitize | speed | serve | build) ;;
  -h | --help) usage; exit 0 ;;
  *) usage >&2; echo "gpu_check.sh: unknown part '$part'" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
results="${OUT:-build-cuda}"
for tool in nvcc cmake; do
  if ! command -v "$tool" >/dev/null; then
    echo "gpu_check.sh: no $tool found; install the CUDA toolkit 13 and cmake" >&2
    exit 1
  fi
done

generator=()
if [[ ! -f build-cuda/CMakeCache.txt ]] && command -v ninja >/dev/null; then
  generator=(-G Ninja)
fi
cmake -S . -B build-cuda "${generator[@]}" -DGLINT_CUDA=ON -DGLINT_TESTING=ON
cmake --build build-cuda --parallel "$(getconf _NPROCESSORS_ONLN)"

exported() {
  nm -D --defined-only "build-cuda/libglint_$1.so" | awk '$2 == "T" { print $3 }' | sort
}
if ! diff <(exported cpu) <(exported cuda); then
  echo "gpu_check.sh: libglint_cpu.so and libglint_cuda.so export different symbols (above)" >&2
  exit 1
fi
echo "both libraries export the same $(exported cuda | wc -l) symbols"

export GLINT_TEST_LIBRARY="$PWD/build-cuda/libglint_cpu_test.so" GLINT_CUDA_TEST_LIBRARY="$PWD/build-cuda/libglint_cuda_test.so"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
glint() {
  "$python" -m glint "$@"
}

case "$part" in
  build) ;;
  correct)
    build-cuda/products_check dense_check
    build-cuda/products_check experts_check
    build-cuda/portable_check
    build-cuda/step_check all
    "$python" -m pytest -q tests/gpu
    ;;
  sanitize)
    memcheck=(compute-sanitizer --tool memcheck --error-exitcode 1)
    "${memcheck[@]}" build-cuda/step_check all quick
    "${memcheck[@]}" build-cuda/products_check experts_check
    "${memcheck[@]}" build-cuda/portable_check quick
    "${memcheck[@]}" "$python" -m pytest -q tests/gpu/test_determinism.py -k "two_steps and (small-fp8_channel or rank-fp8_channel-hopper)"
    compute-sanitizer --tool racecheck --error-exitcode 1 build-cuda/step_check rows,router,sampling quick
    ;;
  speed)
    build-cuda/products_check dense_speed
    build-cuda/products_check experts_speed
    build-cuda/step_check all
    glint bench rank --engine build-cuda/libglint_cuda.so --json "$results/rank-tp.json"
    glint bench rank --engine build-cuda/libglint_cuda.so --expert-layout ep --batch 64 --context 512 --json "$results/rank-ep.json"
    ;;
  serve)
    export GLINT_ENGINE="$PWD/build-cuda/libglint_cuda.so"
    glint smoke --device cuda
    GLINT_SERVE_FLAGS="--device cuda" "$python" -m pytest -q tests/e2e/test_server_openai.py \
      tests/e2e/test_server_completions.py
    glint bench serve --device cuda --concurrency 1,8,64 --prompt-len 256 --gen-len 256 --duration 20 \
      --json "$results/serve.json"
    ;;
esac
