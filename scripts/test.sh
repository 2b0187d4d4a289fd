#!/usr/bin/env bash
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--all]

Prepares the checkout (a virtual environment in .venv, the native library in build, the sample model in the cache), then
runs the tests that need nothing but Python, a C++ compiler and PyPI: lint, types, house rules, tests/pure, tests/cpu and
tests/e2e. Prints the time and the number of tests of each part; what was downloaded is timed apart. Exits non-zero if
any part fails.

  --all  what CI runs: also sweeps marked slow, tests/reference (PyTorch), tests/servers, the short form of
         scripts/reliability.py, tests/deploy, tests/web in a browser, the sanitizer builds (address and undefined
         behaviour, threads), the fuzz targets under a new seed, the instruction sets of the other architecture under
         emulation, and the CUDA kernels compiled. A part whose tool is missing fails and names the package; a skipped
         test is a failure, unless the processor lacks instructions or it is about llama_cpp
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

export OPENBLAS_NUM_THREADS=1
work="$(mktemp -d)" || exit 1
names=()
lanes=()
processes=()
clean_up() {
  for process in "${processes[@]}"; do
    kill -- "-$process"
  done
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

part() {
  local name="$1" start="$SECONDS" outcome=passed file="$work/part-${1//[^a-z]/-}"
  shift
  printf '\n== %s ==\n' "$name"
  GLINT_TEST_COUNTS="$file.counts" "$@" 2>&1 | tee -i "$file.output"
  ((PIPESTATUS[0] == 0)) || outcome=FAILED
  echo "$((SECONDS - start)) $outcome" >"$file"
  [[ "$outcome" == passed ]]
}

run_part() {
  names+=("$1")
  part "$@"
}

begin_lane() {
  local lane="$1"
  shift
  set -m
  "$@" >"$work/$lane.output" 2>&1 </dev/null &
  set +m
  lanes+=("$lane")
  processes+=("$!")
}

finish_lanes() {
  local lane
  wait "${processes[@]}"
  processes=()
  for lane in "${lanes[@]}"; do
    cat "$work/$lane.output"
  done
  lanes=()
}

pytest() {
  local flags=(-m "not slow")
  if "$run_all"; then
    flags=(--no-skips)
    export HYPOTHESIS_PROFILE=thorough
  fi
  .venv/bin/python -m pytest -p tests.skip_report "${flags[@]}" --durations=3 --durations-min=5 "$@"
}

prepare() {
  local extras=(--extra test)
  if "$run_all"; then
    extras+=(--extra test-reference --extra test-deploy --extra test-web)
  fi
  "$python" run.py --prepare --device cpu "${extras[@]}" 2>&1 | tee "$work/downloads"
}

sample_model() {
  .venv/bin/python -m glint sample-model 2>&1 | tee -a "$work/downloads"
}

download_seconds() {
  sed -nE 's/.*downloads ([0-9]+) s.*/\1/p; s/^sample model: fetch .* in ([0-9]+)[.0-9]* s$/\1/p' "$work/downloads" |
    awk '{ all += $1 } END { print all + 0 }'
}

static_checks_and_pure() {
  part "lint" .venv/bin/ruff check .
  part "types" .venv/bin/mypy
  part "house rules" pytest tests/house_rules
  part "pure" pytest tests/pure
}

cpu() {
  if "$run_all"; then
    export GLINT_SOAK_SECONDS=20
  fi
  pytest tests/cpu
}

sanitized() {
  local list="$1" runtime="$2" mark="$3" folder="build-${1//,/-}" compiler name library preload=""
  PATH="$PWD/.venv/bin:$PATH" bash scripts/build.sh --sanitize "$list" || return 1
  compiler="$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$folder/CMakeCache.txt")"
  for name in "$runtime" libstdc++.so.6; do
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
    TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/tests/thread_sanitizer.txt" \
    pytest --capture=sys -m "$mark and not slow" tests/cpu
}

servers() {
  local seed="$RANDOM"
  echo "fuzz seed $seed"
  GLINT_FUZZ_SEED="$seed" GLINT_SOAK_SECONDS=120 pytest tests/servers
}

reliability() {
  .venv/bin/python scripts/reliability.py --short --seed "$RANDOM"
}

web() {
  command -v chromium >/dev/null || {
    echo "test.sh: no chromium found; install it (Debian: sudo apt install chromium)" >&2
    return 1
  }
  pytest tests/web
}

fuzz() {
  local seed="$RANDOM"
  echo "seed $seed"
  .venv/bin/python -m tests.fuzz.fuzz_safetensors_header --seconds 20 --seed "$seed"
}

checks_of_native_code() {
  renice -n 5 "$BASHPID" >/dev/null
  part "sanitize address,undefined" sanitized address,undefined libasan.so sanitize
  part "sanitize thread" sanitized thread libtsan.so threads
  part "fuzz" fuzz
  part "instruction sets" env PATH="$PWD/.venv/bin:$PATH" bash scripts/instruction_sets.sh
}

cuda_build() {
  PATH="$PWD/.venv/bin:$PATH" bash scripts/build.sh --cuda --check || return 1
  PATH="$PWD/.venv/bin:$PATH" bash scripts/gpu_check.sh build
}

summary() {
  local name file taken outcome counts failed=0 downloads
  downloads="$(download_seconds)"
  printf '\n== time per part ==\n'
  for name in "${names[@]}"; do
    file="$work/part-${name//[^a-z]/-}"
    read -r taken outcome <"$file" || { taken=0; outcome=FAILED; }
    counts=""
    if [[ -s "$file.counts" ]]; then
      counts="$(awk '{ passed += $1; skipped += $2 } END { print passed " tests, " skipped " skipped" }' "$file.counts")"
    fi
    printf '%-28s %6d s  %-7s %s\n' "$name" "$taken" "$outcome" "$counts"
    [[ "$outcome" == passed ]] || failed=$((failed + 1))
  done
  printf '%-28s %6d s  not counted below\n' "of these, downloads" "$downloads"
  printf '%-28s %6d s\n' "all" "$((SECONDS - downloads))"
  .venv/bin/python -m tests.cpu.kernel_sets
  for name in "${names[@]}"; do
    file="$work/part-${name//[^a-z]/-}"
    if ! grep -q passed "$file"; then
      printf '\n== the last lines of %s, which failed ==\n' "$name"
      tail -n 60 "$file.output"
    fi
  done
  return "$((failed > 0))"
}

if ! run_part "prepare" prepare || ! run_part "sample model" sample_model; then
  summary
  exit 1
fi
begin_lane static static_checks_and_pure
begin_lane cpu part "cpu" cpu
names+=("lint" "types" "house rules" "pure" "cpu")
finish_lanes
run_part "end to end" pytest tests/e2e
if "$run_all"; then
  run_part "reference" pytest tests/reference
  begin_lane native checks_of_native_code
  run_part "servers" servers
  run_part "deployment" pytest tests/deploy
  run_part "web" web
  names+=("sanitize address,undefined" "sanitize thread" "fuzz" "instruction sets")
  finish_lanes
  run_part "reliability" reliability
  run_part "cuda build" cuda_build
fi
summary
