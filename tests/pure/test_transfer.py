"""Transfers of many files: what they show, and that an error or a signal stops all of their threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from glint.checkpoint.transfer import Transfer, describe_transfer


def test_a_line_of_progress_has_bytes_rate_and_time_left() -> None:
    assert describe_transfer("a/b", 90_000_000_000, 360_000_000_000, 60.0) == (
        "a/b: 90.00 of 360.00 GB, 25%, 1.50 GB/s, 3 min 0 s left"
    )
    assert describe_transfer("a/b", 0, 0, 0.0) == "a/b: 0.00 of 0.00 GB, 0%, 0.00 GB/s"


def test_a_failed_job_stops_the_others_and_is_raised() -> None:
    transfer = Transfer(10)
    begun = threading.Event()

    def fail() -> None:
        begun.wait(10)
        raise IndexError("of the job")

    def go_on() -> None:
        begun.set()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            transfer.count(0)

    never = SimpleNamespace(is_run=False)
    with pytest.raises(IndexError, match="of the job"):
        transfer.run([fail, go_on, lambda: setattr(never, "is_run", True)], 2)
    assert not never.is_run


def test_a_signal_between_two_starts_of_threads_stops_all_of_them() -> None:
    transfer = Transfer(10)

    def fetch() -> None:
        while True:
            transfer.count(1)
            time.sleep(0.001)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        fetch()

    jobs = [fetch] * 400
    jobs[20] = interrupt
    with pytest.raises(KeyboardInterrupt):
        transfer.run(jobs, len(jobs))
    assert not [thread for thread in threading.enumerate() if thread.name == "transfer" and thread.is_alive()]
