"""The commands of this checkout as a user calls them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def call(*command: str | Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command from another folder than the repository's, as a user may."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def glint(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the glint command."""
    return call(sys.executable, "-m", "glint", *arguments, stdin=stdin)


def run_py(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the entry point of the checkout."""
    return call(ROOT / "run.py", *arguments, **environment)
