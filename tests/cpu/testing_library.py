"""Loads the test build of the engine library."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@cache
def load_testing_library() -> ctypes.CDLL:
    """Load the library that carries the glint_testing_ functions.

    The path is GLINT_TEST_LIBRARY where that is set, else build/libglint_cpu_test.so under the repository root. A
    missing file fails the test and says how to build it.
    """
    path = Path(os.environ.get("GLINT_TEST_LIBRARY") or ROOT / "build" / "libglint_cpu_test.so")
    if not path.is_file():
        pytest.fail(f"{path} is not there; build it with scripts/build.sh or set GLINT_TEST_LIBRARY to its path")
    return ctypes.CDLL(str(path))


def declare(name: str, result: Any, *arguments: Any) -> Any:
    """Return the library function `name` with its result and argument types declared."""
    function = getattr(load_testing_library(), name)
    function.restype = result
    function.argtypes = list(arguments)
    return function
