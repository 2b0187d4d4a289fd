#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu_check.sh correct|ptx|sanitize|speed|serve|build [PYTEST ARGUMENTS]

What must pass on a machine with an NVIDIA GPU; each part takes under 8 minutes. Builds libglint_cpu.so, libglint_cuda.so
and their test builds into build-cuda (needs nvcc 13, cmake and g++) and runs them. Figures belong in docs/results.md.

  correct   tests/gpu: every operation against the CPU operation, whole models against the exact CPU path and torch, the
            determinism contract, leaks and failures, ranks and their collectives (needs pytest, torch, transformers and
            NCCL 2.32.3 in $PYTHON), and the self-test of glint check --gpu with both kernel sets; with PYTEST ARGUMENTS
            only those tests
  ptx       what a GPU meets that the library has no machine code for: the driver compiles the PTX of the portable kernels
            (CUDA_FORCE_PTX_JIT=1), then glint check --gpu, the tests of operations and those of determinism; what needs
            wgmma is skipped
  sanitize  the operations at odd sizes and at their edges and an engine's steps under compute-sanitizer (memcheck), and
            the kernels that share memory between threads under racecheck
  speed     one rank of eight of GLM-4.7 at true size with both expert layouts (glint bench rank), then every operation:
            microseconds, GB/s, TFLOP/s and the share of the peak bandwidth measured in the same run (glint bench kernels)
  serve     the sample model behind the real server: the smoke questions, the server's tests, then output tok/s at
            concurrency 1, 8 and 64
  build     only build, and check that both libraries export the same symbols and that no kernel has code for Hopper alone
            (scripts/kernel_code.py); needs no GPU

Environment:
  PYTHON      runs the Python parts (default: python3)
  OUT         folder for logs and JSON results (default: build-cuda)
  BUNDLE      folder that scripts/gpu_bundle.sh made (default: .carry/bundle); where it is there, its wheels are unpacked
              into build-cuda/site, and its model into the cache unless one lies there
  SKIP_BUILD  1: run what build-cuda already holds
TEXT
}

part="${1:-}"
case "$part" in
  correct | ptx | sanitize | speed | serve | build) shift ;;
  -h | --help) usage; exit 0 ;;
  *) usage >&2; echo "gpu_check.sh: unknown part '$part'" >&2; exit 2 ;;
esac
if (($# > 0)) && [[ "$part" != correct ]]; then
  echo "gpu_check.sh: $part takes no further arguments, got '$1'" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
results="${OUT:-$PWD/build-cuda}"
bundle="${BUNDLE:-.carry/bundle}"

build() {
  local generator=()
  for tool in nvcc cmake; do
    if ! command -v "$tool" >/dev/null; then
      echo "gpu_check.sh: no $tool found; install the CUDA toolkit 13 and cmake" >&2
      exit 1
    fi
  done
  if [[ ! -f build-cuda/CMakeCache.txt ]] && command -v ninja >/dev/null; then
    generator=(-G Ninja)
  fi
  cmake -S . -B build-cuda "${generator[@]}" -DGLINT_CUDA=ON -DGLINT_TESTING=ON
  cmake --build build-cuda --parallel "$(getconf _NPROCESSORS_ONLN)"
}

exported() {
  nm -D --defined-only "build-cuda/libglint_$1.so" | awk '$2 == "T" { print $3 }' | sort
}

compare_symbols() {
  if ! diff <(exported cpu) <(exported cuda); then
    echo "gpu_check.sh: libglint_cpu.so and libglint_cuda.so export different symbols (above)" >&2
    exit 1
  fi
  echo "both libraries export the same $(exported cuda | wc -l) symbols"
}

unpack_bundle() {
  local models="${GLINT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/glint}/models"
  if [[ -d "$bundle/wheels" && ! -d build-cuda/site ]]; then
    for wheel in "$bundle"/wheels/*.whl; do
      "$python" -m zipfile -e "$wheel" build-cuda/site
    done
  fi
  if [[ -f "$bundle/join.sh" && ! -d "$models" ]] && compgen -G "$bundle/model/*.part-*" >/dev/null; then
    bash "$bundle/join.sh" "$models"
  fi
}

names=()
numbers=()
start() {
  local name="$1"
  shift
  (
    SECONDS=0
    status=0
    "$@" || status=$?
    echo "gpu_check.sh: $name took $SECONDS s"
    exit "$status"
  ) >"$results/$part-$name.log" 2>&1 &
  names+=("$name")
  numbers+=($!)
}

finish() {
  local failed=0
  for index in "${!names[@]}"; do
    local log="$results/$part-${names[index]}.log"
    if wait "${numbers[index]}"; then
      echo "passed: $(tail -n 1 "$log" | cut -c 15-)"
    else
      echo "FAILED: ${names[index]}, the end of $log:" >&2
      tail -n 40 "$log" >&2
      failed=1
    fi
  done
  names=()
  numbers=()
  if ((failed)); then
    exit 1
  fi
}

glint() {
  "$python" -m glint "$@"
}

run_pytest() {
  "$python" -m pytest -q -o filterwarnings=default -p no:cacheprovider --durations=5 "$@"
}

check_all() {
  local alone=()
  for file in tests/gpu/test_*.py; do
    case "$file" in
      */test_life.py | */test_ranks.py | */test_collectives.py | */test_capture.py) alone+=("$file") ;;
      */test_determinism.py)
        for shape in small rank- rank_air; do
          start "test_determinism-$shape" run_pytest "$file" -k "$shape"
        done
        ;;
      *) start "$(basename "$file" .py)" run_pytest "$file" ;;
    esac
  done
  finish
  for file in operations gemms experts; do
    sed -n '/^operation .*bound/,/^$/p' "$results/correct-test_$file.log"
  done
  for file in "${alone[@]}"; do
    start "$(basename "$file" .py)" run_pytest "$file"
    finish
  done
  for kernels in auto portable; do
    start "check-$kernels" check_gpu "$kernels"
    finish
  done
}

check_gpu() {
  glint check --gpu --engine build-cuda/libglint_cuda.so --kernels "$1"
}

check_ptx() {
  export CUDA_FORCE_PTX_JIT=1 CUDA_CACHE_PATH="$PWD/build-cuda/ptx-cache" CUDA_CACHE_MAXSIZE=4294967296
  export GLINT_TEST_REPEATS="${GLINT_TEST_REPEATS:-20}"
  start check check_gpu portable
  finish
  for name in test_operations test_operation_edges test_attention_edges test_determinism; do
    start "$name" run_pytest -rs "tests/gpu/$name.py"
  done
  finish
}

sanitize_all() {
  local memcheck=(compute-sanitizer --tool memcheck --error-exitcode 1)
  local racecheck=(compute-sanitizer --tool racecheck --error-exitcode 1)
  local pytest=("$python" -m pytest -q -x -o filterwarnings=default -p no:cacheprovider)
  local attend='(test_attend and (odd or glm47)) or test_rope'
  local rows='(test_norm and 37) or (quantise_and_swiglu and (37 or 200)) or test_router_ties or (test_sampler and 64)'
  local edges='ties or bf16 or outside or alone or not_finite'
  local gemms='(test_gemms and odd and not odd_sizes) or (odd_sizes and 7)'
  local attention='(every_group_size and (7 or 16)) or position or e4m3 or bfloat16'
  export GLINT_TEST_REPEATS=2
  start edges "${memcheck[@]}" "${pytest[@]}" tests/gpu/test_operation_edges.py -k "$edges"
  start attention-edges "${memcheck[@]}" "${pytest[@]}" tests/gpu/test_attention_edges.py -k "$attention"
  start operations "${memcheck[@]}" "${pytest[@]}" tests/gpu/test_operations.py -k "$attend or $rows"
  start gemms "${memcheck[@]}" "${pytest[@]}" tests/gpu/test_gemms.py -k "$gemms"
  start odd-experts "${memcheck[@]}" "${pytest[@]}" tests/gpu/test_experts.py -k 'test_experts and odd'
  for kernels in hopper portable; do
    start "experts-$kernels" "${memcheck[@]}" "${pytest[@]}" tests/gpu/test_experts.py \
      -k "$kernels and not few_tokens and ((4.7 and ep8) or (air and tp8))"
  done
  start engine "${memcheck[@]}" "${pytest[@]}" tests/gpu/test_determinism.py \
    -k 'two_steps and (small-fp8_channel or rank-fp8_channel)'
  start race-edges "${racecheck[@]}" "${pytest[@]}" tests/gpu/test_operation_edges.py -k 'near_ties or alone or not_finite'
  start race-operations "${racecheck[@]}" "${pytest[@]}" tests/gpu/test_operations.py -k "$rows"
  start race-gemms "${racecheck[@]}" "${pytest[@]}" tests/gpu/test_gemms.py -k 'odd and not odd_sizes and fallback'
  start race-grouping "${racecheck[@]}" "${pytest[@]}" tests/gpu/test_experts.py -k 'test_grouping and odd and 65'
  finish
}

mkdir -p "$results"
if [[ "${SKIP_BUILD:-}" != 1 ]]; then
  build
  compare_symbols
  "$python" scripts/kernel_code.py build-cuda/libglint_cuda.so
  unpack_bundle
fi
export GLINT_TEST_LIBRARY="$PWD/build-cuda/libglint_cpu_test.so"
export GLINT_CUDA_TEST_LIBRARY="$PWD/build-cuda/libglint_cuda_test.so"
export PYTHONPATH="$PWD:$PWD/build-cuda/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

case "$part" in
  build) ;;
  correct)
    if (($# > 0)); then
      run_pytest "$@"
    else
      check_all
    fi
    ;;
  ptx) check_ptx ;;
  sanitize) sanitize_all ;;
  speed)
    glint bench rank --engine build-cuda/libglint_cuda.so --json "$results/rank-tp.json"
    glint bench rank --engine build-cuda/libglint_cuda.so --expert-layout ep --batch 64 --context 512 \
      --json "$results/rank-ep.json"
    glint bench kernels --device cuda --build-dir build-cuda
    ;;
  serve)
    export GLINT_ENGINE="$PWD/build-cuda/libglint_cuda.so"
    glint smoke --device cuda
    GLINT_SERVE_FLAGS="--device cuda" run_pytest tests/e2e/test_server_openai.py tests/e2e/test_server_completions.py
    glint bench serve --device cuda --concurrency 1,8,64 --prompt-len 256 --gen-len 256 --duration 20 \
      --json "$results/serve.json"
    ;;
esac
