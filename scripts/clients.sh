#!/usr/bin/env bash
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/clients.sh [CLIENTS]

Runs the first tutorials of clients that other people wrote against one server on the sample model: tests/clients has a
file per client. Prepares a checkout that has no .venv or no build, starts the server on a free port with a key, makes an
environment of its own for each client in .clients (from tests/clients/requirements; made again when that file changes),
runs its tests there, stops the server, and prints a table. Without names every client runs. Exits non-zero if one
failed. Needs PyPI at first, and 3 GB of disk.

  scripts/clients.sh              all clients
  scripts/clients.sh litellm llm  these two
  GLINT_CLIENTS_FLAGS='-x -k tool' scripts/clients.sh instructor
                                  further flags of pytest
TEXT
  printf '\nclients: %s\n' "${known[*]}"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
known=()
for file in tests/clients/requirements/*.txt; do
  name="${file##*/}"
  known+=("${name%.txt}")
done

clients=()
for name in "$@"; do
  case "$name" in
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; echo "clients.sh: unknown flag '$name'" >&2; exit 2 ;;
    *)
      [[ " ${known[*]} " == *" $name "* ]] || {
        echo "clients.sh: no client '$name'; there are ${known[*]}" >&2
        exit 2
      }
      clients+=("$name") ;;
  esac
done
((${#clients[@]} > 0)) || clients=("${known[@]}")

python="${PYTHON:-python3}"
folder=.clients
log="$folder/server.log"
server=""

stop_server() {
  [[ -n "$server" ]] && kill "$server" 2>/dev/null && wait "$server"
  server=""
}
trap stop_server EXIT
trap 'exit 130' INT TERM

start_server() {
  local port seconds
  port="$("$python" -c 'import socket; probe = socket.socket(); probe.bind(("127.0.0.1", 0)); print(probe.getsockname()[1])')"
  export GLINT_CLIENTS_URL="http://127.0.0.1:$port" GLINT_CLIENTS_KEY=key-of-the-clients
  .venv/bin/python -m glint serve "$GLINT_CLIENTS_MODEL" --port "$port" --api-key "$GLINT_CLIENTS_KEY" >"$log" 2>&1 &
  server="$!"
  for ((seconds = 0; seconds < 180; seconds++)); do
    kill -0 "$server" 2>/dev/null || break
    .venv/bin/python -c "import urllib.request as r; r.urlopen('$GLINT_CLIENTS_URL/ready', timeout=5)" 2>/dev/null && return
    sleep 1
  done
  cat "$log" >&2
  echo "clients.sh: the server is not ready; its output is above" >&2
  exit 1
}

make_environment() {
  local name="$1" wanted="tests/clients/requirements/$1.txt" home="$folder/$1"
  cmp -s "$wanted" "$home/requirements.txt" && return
  rm -rf "$home"
  "$python" -m venv "$home" &&
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check -r "$wanted" &&
    cp "$wanted" "$home/requirements.txt"
}

run_client() {
  local name="$1" start="$SECONDS" outcome=passed version counts output
  output="$folder/$name.output"
  printf '\n== %s ==\n' "$name"
  if ! make_environment "$name"; then
    rows+=("$(printf '%-18s %-12s %-28s %6d' "$name" none 'FAILED: no environment' "$((SECONDS - start))")")
    return 1
  fi
  start="$SECONDS"
  version="$("$folder/$name/bin/python" -c "from importlib.metadata import version; print(version('$(head -1 "$folder/$name/requirements.txt" | cut -d= -f1)'))")"
  "$folder/$name/bin/python" -m pytest -p no:cacheprovider ${GLINT_CLIENTS_FLAGS:-} "tests/clients/test_${name//-/_}.py" 2>&1 |
    tee "$output"
  [[ "${PIPESTATUS[0]}" == 0 ]] || outcome=FAILED
  counts="$(sed -nE 's/^=+ (.*) in [0-9.]+s.*$/\1/p' "$output" | tail -1)"
  rows+=("$(printf '%-18s %-12s %-28s %6d' "$name" "$version" "$outcome: ${counts:-no test ran}" "$((SECONDS - start))")")
  [[ "$outcome" == passed ]]
}

if [[ ! -x .venv/bin/python || ! -e build/libglint_cpu.so ]]; then
  "$python" run.py --prepare --device cpu || exit 1
fi
mkdir -p "$folder"
GLINT_CLIENTS_MODEL="$(.venv/bin/python -m glint sample-model)" || exit 1
export GLINT_CLIENTS_MODEL
start_server
rows=()
failed=0
for name in "${clients[@]}"; do
  run_client "$name" || failed=1
done
stop_server
printf '\n%-18s %-12s %-28s %6s\n' client version tests seconds
printf '%s\n' "${rows[@]}"
exit "$failed"
