"""Loads the test build of the engine library."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

from glint.engine.args import Device

ROOT = Path(__file__).resolve().parents[2]


VARIABLES: dict[Device, str] = {"cpu": "GLINT_TEST_LIBRARY", "cuda": "GLINT_CUDA_TEST_LIBRARY"}


@cache
def load_testing_library(device: Device = "cpu") -> ctypes.CDLL:
    """Load the library of the device that carries the glint_testing_ functions.

    The path is GLINT_TEST_LIBRARY (for CUDA GLINT_CUDA_TEST_LIBRARY) where that is set, else
    build/libglint_cpu_test.so (libglint_cuda_test.so) under the repository root. A missing file fails the test and
    says how to build it.
    """
    variable = VARIABLES[device]
    path = Path(os.environ.get(variable) or ROOT / "build" / f"libglint_{device}_test.so")
    if not path.is_file():
        import pytest

        pytest.fail(f"{path} is not there; build it with scripts/build.sh --tests or set {variable} to its path")
    return ctypes.CDLL(str(path))


def declare(name: str, result: Any, *arguments: Any, device: Device = "cpu") -> Any:
    """Return the library function `name` with its result and argument types declared."""
    function = getattr(load_testing_library(device), name)
    function.restype = result
    function.argtypes = list(arguments)
    return function
