"""Helpers of all benches: the machine they run on, and the files they write."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glint.errors import RequestError


def check_writable(path: Path) -> None:
    """Refuse a file that the figures could not be written to, before anything is measured."""
    is_new = not path.exists()
    with refusing_unwritable(path):
        path.open("a").close()
        if is_new:
            path.unlink()


@contextmanager
def refusing_unwritable(path: Path) -> Iterator[None]:
    """Say of a file that cannot be written what to do about it."""
    try:
        yield
    except OSError as problem:
        raise RequestError(
            f"--json {path} cannot be written: {problem.strerror}; name a file in a folder that you may write to"
        ) from problem


def processor_name() -> str:
    """The processor's name as the operating system gives it, else its architecture."""
    names = ("model name", "Model name")
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(names):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    except OSError:
        pass
    return platform.machine()
