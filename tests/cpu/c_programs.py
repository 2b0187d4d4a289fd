"""Compiles the C programs of the tests against the header and a built library, as a C user would.

Where the library is the one built with the address sanitizer, the programs are built with it too, and memory that one
has lost when it ends is an error. Python's own process cannot be asked so, since Python frees little when it ends.
"""

import os
import subprocess
from pathlib import Path

import pytest

from glint.native.library import choose_library

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "cpu" / "programs"
FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
IS_ADDRESS_SANITIZED = "address" in os.environ.get("GLINT_SANITIZED", "").split(",")
SANITIZER_FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g") if IS_ADDRESS_SANITIZED else ()
SANITIZER_ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1:exitcode=99"}


def compile_program(name: str, folder: Path, *other_sources: str) -> Path:
    """Compile a program with every warning an error and return its path."""
    library = choose_library("cpu").resolve()
    program = folder / name
    command = [
        os.environ.get("CC", "cc"),
        *FLAGS,
        *SANITIZER_FLAGS,
        f"-I{ROOT / 'native' / 'include'}",
        *(str(PROGRAMS / f"{source}.c") for source in (name, "tiny_model", *other_sources)),
        str(library),
        f"-Wl,-rpath,{library.parent}",
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        pytest.fail(f"{name}.c does not compile:\n{done.stderr}")
    return program


def environment() -> dict[str, str]:
    """What programs run with: leaks are errors, and no sanitizer is loaded but that which they are built with."""
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD" or not IS_ADDRESS_SANITIZED}
    return kept | SANITIZER_ENVIRONMENT


def start_program(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment())


def run_program(program: Path, *arguments: object) -> list[list[str]]:
    """Run a program and return the words of its lines; a failure shows what it said."""
    done = start_program(program, *arguments)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]
