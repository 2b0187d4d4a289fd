#!/usr/bin/env bash
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/nvcc_strict.sh SPILL_BYTES NVCC FLAGS

Runs nvcc with -Xptxas -v among its flags and reads what ptxas reports: a kernel that spills more than SPILL_BYTES of
registers to memory, or whose wgmma instructions are serialised, fails the compilation and is named. Other output is
shown only on failure.
TEXT
}

if (($# < 3)) || [[ ! "$1" =~ ^[0-9]+$ ]]; then
  usage
  exit 2
fi
limit="$1"
shift
report="$(mktemp)" || exit 1
trap 'rm -f "$report"' EXIT
if ! "$@" >"$report" 2>&1; then
  cat "$report" >&2
  exit 1
fi
faults="$(awk -v limit="$limit" '
  /Compiling entry function/ { kernel = $0; sub(/.*function ./, "", kernel); sub(/. for .*/, "", kernel) }
  match($0, /[0-9]+ bytes spill stores/) && substr($0, RSTART, RLENGTH) + 0 > limit {
    print "spills registers: " kernel " (" $0 ")"
  }
  /wgmma.*serialized/ { print "wgmma is serialised: " $0 }
' "$report")"
if [[ -n "$faults" ]]; then
  printf 'nvcc_strict.sh: a hot kernel may neither spill nor serialise wgmma; lower its register use:\n%s\n' \
    "$faults" >&2
  exit 1
fi
