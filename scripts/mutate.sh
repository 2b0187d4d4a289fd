#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/mutate.sh [--only NAME] [--python] [--native] [--list]

Makes deliberate one-line changes to a copy of the checkout, one at a time, runs the tests that must notice each, and
names the changes that no test noticed. The changes are listed in tests/mutations. Exits non-zero if one survived
without a reason. It takes long and is no part of CI: run it before tests are deleted or rewritten.

  --only NAME  only these changes (several names may follow)
  --python     only changes of Python files
  --native     only changes of C++ files, for which the libraries are built anew (with ccache where it is installed)
  --list       print the changes and run nothing
TEXT
}

for argument in "$@"; do
  case "$argument" in
    -h | --help) usage; exit 0 ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ! -x .venv/bin/python ]]; then
  echo "mutate.sh: there is no .venv; run: python3 run.py --prepare --extra test" >&2
  exit 1
fi
exec .venv/bin/python -m tests.mutations.run "$@"
