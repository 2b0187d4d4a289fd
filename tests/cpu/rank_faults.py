"""Asking ranks of the test library to fail, and seeing that nothing of them is left."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int32, c_uint64
from pathlib import Path
from typing import Any

import pytest

from glint.checkpoint.table import Checkpoint
from tests.cpu.testing_library import declare

PLACES = {"load": 0, "step": 1, "collective": 2}
VARIABLE = "GLINT_FAULT"


def ask_for_fault(monkeypatch: pytest.MonkeyPatch, place: str, rank: int, passes: int) -> None:
    """Let a rank of the test library fail when it comes by the place for the given time from now on."""
    declare("glint_testing_reset_faults", None)()
    monkeypatch.setenv(VARIABLE, f"{place}:{rank}:{passes}")


@contextmanager
def failing_ranks(place: str, *ranks: int) -> Iterator[None]:
    """Let several ranks fail whenever they come by the place."""
    declare("glint_testing_fail_ranks", None, c_int32, c_uint64)(PLACES[place], sum(1 << rank for rank in ranks))
    try:
        yield
    finally:
        declare("glint_testing_fail_no_ranks", None)()


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What the work gives or raises; an error where it has not ended in time."""
    ends: list[Any] = []

    def run() -> None:
        try:
            ends.append((work(), None))
        except BaseException as failure:
            ends.append((None, failure))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert ends, f"it still runs after {seconds} s"
    result, failure = ends[0]
    if failure is not None:
        raise failure
    return result


def count_threads() -> int:
    """Threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def count_files() -> int:
    """Open file handles of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def is_mapped(checkpoint: Checkpoint) -> bool:
    """Whether a file of the checkpoint lies in the memory of this process."""
    maps = Path("/proc/self/maps").read_text()
    return any(str(file.path) in maps for file in checkpoint.files)


@contextmanager
def leaving_nothing(checkpoint: Checkpoint) -> Iterator[None]:
    """After the context there are as many threads and open files as before, and no file is mapped."""
    files, threads = count_files(), count_threads()
    yield
    assert count_files() == files
    assert not is_mapped(checkpoint)
    deadline = time.monotonic() + 5.0
    while count_threads() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count_threads() <= threads
