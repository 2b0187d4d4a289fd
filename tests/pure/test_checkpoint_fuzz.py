"""A short run of the header fuzzer, as its command line starts it."""

import re
import subprocess
import sys
from pathlib import Path

from glint.checkpoint.document import Defect

NUM_FILES = 1000


def test_the_header_reader_agrees_with_the_official_one_on_a_thousand_files() -> None:
    command = [sys.executable, "-m", "tests.fuzz.fuzz_safetensors_header", "--files", str(NUM_FILES), "--seed", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    counts = {name: int(count) for count, name in re.findall(r"^ *(\d+) (\w+)$", done.stdout, re.MULTILINE)}
    assert sum(counts.values()) == NUM_FILES and counts["accepted"] > 100
    assert counts.keys() >= {Defect.NOT_JSON, Defect.OFFSET, Defect.SIZE_DIFFERS, Defect.HEADER_SCHEMA}
    stricter = (Defect.HEADER_START, Defect.DUPLICATE_KEY, Defect.HEADER_SCHEMA)
    assert counts.keys() >= {f"only{defect}" for defect in stricter}
