#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/lock.sh

Writes requirements-VERSION.lock for the version of Python in .venv: the newest versions that pyproject.toml allows of
every requirement, with all extras for tests, and of all they require. run.py, and so CI, installs these versions where
such a file is there; elsewhere the bounds of pyproject.toml hold. Run it now and then, then scripts/test.sh --all, and
commit the file if that passes.
TEXT
}

if (($# > 0)); then
  usage
  [[ "$1" == -h || "$1" == --help ]] && exit 0
  echo "lock.sh: unknown flag '$1'" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[[ -x "$python" ]] || { echo "lock.sh: no $python; run ./run.py --prepare first" >&2; exit 1; }

"$python" - <<'PY'
import json
import subprocess
import sys
from pathlib import Path

import run

EXTRAS = ("test", "test-reference", "test-deploy", "test-web")
wanted = [*run.requirements(EXTRAS), "cmake>=3.20,<5", "ninja>=1.10,<2"]
command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *wanted]
report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
chosen = {item["metadata"]["name"].lower(): item["metadata"]["version"].split("+")[0] for item in report["install"]}
lock = Path(f"requirements-{sys.version_info[0]}.{sys.version_info[1]}.lock")
lock.write_text("".join(f"{name}=={version}\n" for name, version in sorted(chosen.items())))
print(f"{lock}: {len(chosen)} packages")
PY
