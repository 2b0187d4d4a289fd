#!/usr/bin/env bash
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--all]

Prepares the checkout (a virtual environment in .venv, the native library in build), then runs every test that needs
no GPU and prints the time of each part; types, house rules and pure run beside cpu. Exits non-zero if any part fails.

  --all  what CI runs: also the sanitizer builds (address and undefined behaviour, threads), the fuzz targets under a
         new seed, two minutes of 64 streams, and the CUDA kernels compiled where nvcc is; a test that is skipped is a
         failure, unless the processor lacks instructions or it is about llama_cpp
TEXT
}

run_all=false
while (($# > 0)); do
  case "$1" in
    --all) run_all=true; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; echo "test.sh: unknown flag '$1'" >&2; exit 2 ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python="${PYTHON:-python3}"
command -v "$python" >/dev/null || { echo "test.sh: no $python found; install python3 (3.11 or newer)" >&2; exit 1; }

names=()
seconds=()
outcomes=()
note() {
  names+=("$1")
  seconds+=("$2")
  outcomes+=("$3")
}

part() {
  local name="$1" start="$SECONDS" outcome="passed"
  shift
  printf '\n== %s ==\n' "$name"
  "$@" || outcome="FAILED"
  note "$name" "$((SECONDS - start))" "$outcome"
  [[ "$outcome" == passed ]]
}

begin_beside() {
  beside_name="$1"
  beside_folder="$(mktemp -d)" || exit 1
  set -m
  (
    part "$@"
    outcome="$?"
    echo "${seconds[-1]}" >"$beside_folder/seconds"
    exit "$outcome"
  ) >"$beside_folder/output" 2>&1 </dev/null &
  beside_process="$!"
  set +m
  trap 'kill -- "-$beside_process"; rm -r "$beside_folder"' EXIT
  trap 'exit 130' INT
}

finish_beside() {
  local outcome="passed"
  wait "$beside_process" || outcome="FAILED"
  trap - EXIT INT
  cat "$beside_folder/output"
  note "$beside_name" "$(<"$beside_folder/seconds")" "$outcome"
  rm -r "$beside_folder"
}

pytest() {
  .venv/bin/python -m pytest --durations=3 --durations-min=5 "$@"
}

pytest_without_skips() {
  local report outcome skipped
  report="$(mktemp)" || return 1
  pytest --color=no "$@" | tee "$report"
  outcome="$?"
  skipped="$(grep '^SKIPPED \[' "$report" | grep -vE 'need instructions that this processor|llama[-_]cpp')"
  rm -f "$report"
  if [[ -n "$skipped" ]]; then
    printf 'test.sh: with --all these must not be skipped:\n%s\n' "$skipped" >&2
    return 1
  fi
  return "$outcome"
}

sanitized() {
  local list="$1" folder="build-${1//,/-}" compiler name library preload=""
  PATH="$PWD/.venv/bin:$PATH" bash scripts/build.sh --sanitize "$list" || return 1
  compiler="$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$folder/CMakeCache.txt")"
  for name in "$2" libstdc++.so.6; do
    library="$("$compiler" -print-file-name="$name")"
    if [[ ! -e "$library" ]]; then
      echo "test.sh: $compiler has no $name; build with g++ and its sanitizer runtimes (Debian, Ubuntu: sudo apt" \
        "install build-essential)" >&2
      return 1
    fi
    preload="$preload $library"
  done
  GLINT_SANITIZED="$list" GLINT_ENGINE="$PWD/$folder/libglint_cpu.so" \
    GLINT_TEST_LIBRARY="$PWD/$folder/libglint_cpu_test.so" LD_PRELOAD="${preload# }" PYTHONMALLOC=malloc \
    ASAN_OPTIONS="detect_leaks=0:halt_on_error=1" \
    UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1" \
    TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1" \
    .venv/bin/python -m pytest --capture=sys -m sanitize tests/cpu
}

types_and_pure() {
  local failed=0
  .venv/bin/mypy || failed=1
  "$tests" tests/house_rules tests/pure || failed=1
  return "$failed"
}

fuzz() {
  local seed="$RANDOM"
  echo "seed $seed"
  .venv/bin/python -m tests.fuzz.fuzz_safetensors_header --seconds 20 --seed "$seed" || return 1
  GLINT_FUZZ_SEED="$seed" pytest tests/e2e/test_server_fuzz.py
}

soak() {
  GLINT_SOAK_SECONDS=120 pytest tests/e2e/test_server_soak.py
}

cuda_build() {
  if ! command -v nvcc >/dev/null; then
    echo "test.sh: no nvcc found: the CUDA kernels are not compiled here; install the CUDA toolkit 13 to do so"
    return 0
  fi
  PATH="$PWD/.venv/bin:$PATH" bash scripts/gpu_check.sh build
}

summary() {
  local index failed=0
  printf '\n== time per part ==\n'
  for index in "${!names[@]}"; do
    printf '%-28s %6d s  %s\n' "${names[index]}" "${seconds[index]}" "${outcomes[index]}"
    [[ "${outcomes[index]}" == passed ]] || failed=$((failed + 1))
  done
  printf '%-28s %6d s\n' "all" "$SECONDS"
  return "$((failed > 0))"
}

if ! part "prepare" "$python" run.py --prepare --extra test; then
  summary
  exit 1
fi
tests=pytest
if "$run_all"; then
  tests=pytest_without_skips
fi
part "lint" .venv/bin/ruff check .
begin_beside "types, house rules and pure" types_and_pure
part "cpu" "$tests" tests/cpu
finish_beside
part "end to end" "$tests" tests/e2e
part "deployment" "$tests" tests/deploy
if "$run_all"; then
  part "sanitize address,undefined" sanitized address,undefined libasan.so
  part "sanitize thread" sanitized thread libtsan.so
  part "fuzz" fuzz
  part "soak" soak
  part "cuda build" cuda_build
fi
summary
