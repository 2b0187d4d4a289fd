"""The plugin that counts tests for scripts/test.sh, in a pytest of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import pytest

def test_that_passes():
    pass

@pytest.mark.skip(reason="avx512: kernels need instructions that this processor does not have")
def test_of_another_processor():
    pass
"""
MISSING_TOOL = """
@pytest.mark.skip(reason="needs nginx (Debian: apt install nginx-light)")
def test_of_a_tool():
    pass
"""


@pytest.mark.parametrize(
    ("text", "flags", "status", "counts"),
    [
        (FILE, ["--no-skips"], 0, "1 1\n"),
        (FILE + MISSING_TOOL, [], 0, "1 2\n"),
        (FILE + MISSING_TOOL, ["--no-skips"], 1, "1 2\n"),
    ],
)
def test_a_missing_tool_fails_the_run_and_a_missing_instruction_does_not(
    tmp_path: Path, text: str, flags: list[str], status: int, counts: str
) -> None:
    (tmp_path / "test_file.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.skip_report", *flags, str(tmp_path)]
    environment = os.environ | {"GLINT_TEST_COUNTS": str(tmp_path / "counts"), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stdout
    assert ("nginx-light" in ended.stdout) == (status == 1)
    assert (tmp_path / "counts").read_text() == counts
