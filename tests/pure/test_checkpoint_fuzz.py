"""A short run of the header fuzzer, as its command line starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from glint.checkpoint.document import Defect

SECONDS = 3


@pytest.mark.slow
def test_the_header_reader_survives_three_seconds_of_fuzzing() -> None:
    command = [sys.executable, "-m", "tests.fuzz.fuzz_safetensors_header", "--seconds", str(SECONDS), "--seed", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    counts = {name: int(count) for count, name in re.findall(r"^ *(\d+) (\w+)$", done.stdout, re.MULTILINE)}
    assert counts["accepted"] > 20
    assert counts.keys() >= {Defect.NOT_JSON, Defect.OFFSET, Defect.SIZE_DIFFERS, Defect.HEADER_SCHEMA}
