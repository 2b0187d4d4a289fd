"""Compiles the C programs of the tests against the header and a built library, as a C user would."""

import os
import subprocess
from pathlib import Path

import pytest

from glint.native.library import choose_library

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "cpu" / "programs"
FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror")


def compile_program(name: str, folder: Path) -> Path:
    """Compile a program with every warning an error and return its path."""
    library = choose_library("cpu").resolve()
    program = folder / name
    command = [
        os.environ.get("CC", "cc"),
        *FLAGS,
        f"-I{ROOT / 'native' / 'include'}",
        str(PROGRAMS / f"{name}.c"),
        str(PROGRAMS / "tiny_model.c"),
        str(library),
        f"-Wl,-rpath,{library.parent}",
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"{name}.c does not compile:\n{done.stderr}")
    return program


def run_program(program: Path, *arguments: object) -> list[list[str]]:
    """Run a program and return the words of its lines; a failure shows what it said."""
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]
