#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu_bundle.sh [--out DIR] [--python VERSION] [--glibc VERSION] [--model DIR] [--without NAMES]
                             [--with NAMES]

Gathers what a GPU machine (Linux, x86-64) without access to packages needs to run glint:

  DIR/wheels/    wheels of the requirements in pyproject.toml and of what they require
  DIR/model/     the sample model as a tar file in parts of at most 56 MiB, with their checksums
  DIR/join.sh    joins the parts: bash DIR/join.sh TARGET unpacks the model into TARGET

There, install with: pip install --no-index --find-links DIR/wheels DIR/wheels/*.whl

  --out DIR          where to put it (default: .carry/bundle, which git ignores)
  --python VERSION   Python of that machine (default: 3.12)
  --glibc VERSION    newest C library that wheels may ask for there (default: 2.31, which llguidance needs)
  --model DIR        model folder to pack (default: the sample model, made if it is not there)
  --without NAMES    requirements which that machine already has, between commas
                     (default: numpy,transformers,tokenizers,huggingface_hub)
  --with NAMES       further packages, between commas (default: openai, the client that gpu_check.sh serve uses)
TEXT
}

fail() {
  echo "gpu_bundle.sh: $*" >&2
  exit 1
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
out="$root/.carry/bundle"
version=3.12
glibc=2.31
model=""
without="numpy,transformers,tokenizers,huggingface_hub"
further="openai"
part_mib=56
while (($# > 0)); do
  case "$1" in
    --out) out="${2:?--out needs a folder}"; shift 2 ;;
    --python) version="${2:?--python needs a version, such as 3.12}"; shift 2 ;;
    --glibc) glibc="${2:?--glibc needs a version, such as 2.31}"; shift 2 ;;
    --model) model="${2:?--model needs a folder}"; shift 2 ;;
    --without) without="${2?--without needs names}"; shift 2 ;;
    --with) further="${2?--with needs names}"; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown flag '$1'" ;;
  esac
done
[[ "$version" =~ ^3\.[0-9]+$ ]] || fail "--python $version is not a version such as 3.12"
[[ "$glibc" =~ ^2\.[0-9]+$ ]] && ((${glibc#2.} >= 17)) || fail "--glibc $glibc is not a version from 2.17 on"
python="${PYTHON:-python3}"
if [[ -x "$root/.venv/bin/python" && -z "${PYTHON:-}" ]]; then
  python="$root/.venv/bin/python"
fi
command -v "$python" >/dev/null || fail "no $python found; install python3 (3.11 or newer), or set PYTHON"
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip; run ./run.py --prepare first, or set PYTHON"

if [[ -z "$model" ]]; then
  model="$(cd "$root" && "$python" -m glint sample-model)" ||
    fail "the sample model cannot be made; run ./run.py --prepare first, or give --model DIR"
fi
[[ -f "$model/config.json" ]] || fail "--model $model has no config.json; give a model folder"
model="$(cd "$model" && pwd -P)"

requirements="$("$python" - "$root/pyproject.toml" "$without" <<'PY'
import re
import sys
import tomllib
from pathlib import Path

left_out = {name.strip() for name in sys.argv[2].split(",")}
for line in tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"]:
    if re.split(r"[<>=!~ \[;]", line, maxsplit=1)[0] not in left_out:
        print(line)
PY
)"

rm -rf "$out/wheels" "$out/model" "$out/join.sh"
mkdir -p "$out/wheels" "$out/model"
mapfile -t wanted <<<"$requirements"
IFS=, read -ra more <<<"$further"
wanted+=("${more[@]}")
platforms=(--platform any --platform manylinux2014_x86_64)
for ((minor = 17; minor <= ${glibc#2.}; ++minor)); do
  platforms+=(--platform "manylinux_2_${minor}_x86_64")
done
"$python" -m pip download --disable-pip-version-check --quiet --dest "$out/wheels" --only-binary=:all: \
  --implementation cp --python-version "$version" --abi "cp${version/./}" --abi abi3 --abi none \
  "${platforms[@]}" "${wanted[@]}" ||
  fail "the wheels cannot be downloaded; check the access to PyPI (PIP_INDEX_URL), or choose another --python or --glibc"

name="$(basename "$model")"
tar -C "$(dirname "$model")" -cf - "$name" | split -b "${part_mib}m" -d -a 3 - "$out/model/$name.tar.part-"
(cd "$out/model" && sha256sum "$name.tar.part-"* >"$name.sha256")
cat >"$out/join.sh" <<'TEXT'
set -euo pipefail
target="$(realpath -m "${1:?usage: bash join.sh TARGET; unpacks the model into TARGET}")"
cd "$(dirname "${BASH_SOURCE[0]}")/model"
sha256sum --check --quiet -- *.sha256
mkdir -p "$target"
cat -- *.tar.part-* | tar -C "$target" -xf -
echo "$target"/*/config.json
TEXT

printf '%10s  %s\n' "MiB" "file"
find "$out" -type f -printf '%s %P\n' | sort -k2 | awk '{ printf "%10.1f  %s\n", $1 / 1048576, $2; all += $1 }
  END { printf "%10.1f  all\n", all / 1048576 }'
echo "the bundle is in $out"
