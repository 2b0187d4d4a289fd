"""Many files at a time, by threads that can be stopped, with the progress of all of them together."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

POLL_SECONDS = 0.1
LINE_SECONDS = 10.0
STOP_SECONDS = 5.0


class Stopped(Exception):
    """A job ends since another one has failed or the user has stopped all of them."""


class Transfer:
    """Counts the bytes of all jobs; `count` ends the job that calls it once the transfer is stopped."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()

    def count(self, num_bytes: int) -> None:
        """Add bytes of a job."""
        if self._is_stopped.is_set():
            raise Stopped
        with self._lock:
            self.done_bytes += num_bytes

    def run(self, jobs: Sequence[Callable[[], None]], num_threads: int) -> None:
        """Run all jobs and raise the first error. After an error, or Ctrl-C here, the others stop at their next count.

        The threads never outlive the process: a job that does not count any more cannot keep it from ending.
        """
        waiting = deque(jobs)
        problems: list[BaseException] = []

        def work() -> None:
            while True:
                with self._lock:
                    job = waiting.popleft() if waiting and not self._is_stopped.is_set() else None
                if job is None:
                    return
                try:
                    job()
                except BaseException as problem:
                    problems.append(problem)
                    self._is_stopped.set()

        threads = [threading.Thread(target=work, name="transfer", daemon=True) for _ in jobs[:num_threads]]
        try:
            for thread in threads:
                thread.start()
            while not self._is_stopped.is_set() and any(thread.is_alive() for thread in threads):
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._is_stopped.set()
            raise
        finally:
            end_at = time.monotonic() + STOP_SECONDS
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join(max(0.0, end_at - time.monotonic()))
        if problems:
            raise problems[0]


@contextmanager
def shown_transfer(name: str, transfer: Transfer, say: Callable[[str], None]) -> Iterator[None]:
    """Show a transfer while the body runs: a bar on a terminal, otherwise a line every ten seconds."""
    is_over = threading.Event()
    show = _show_bar if sys.stderr.isatty() else _say_lines
    thread = threading.Thread(target=show, args=(name, transfer, say, is_over), name="transfer progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def describe_transfer(name: str, done_bytes: int, total_bytes: int, seconds: float) -> str:
    """One line: bytes, share, rate and time left."""
    rate = done_bytes / max(seconds, 1e-3)
    share = 100 * done_bytes // max(total_bytes, 1)
    text = f"{name}: {done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB, {share}%, {rate / 1e9:.2f} GB/s"
    if not 0 < done_bytes < total_bytes:
        return text
    minutes, rest = divmod(round((total_bytes - done_bytes) / rate), 60)
    return f"{text}, {minutes} min {rest} s left"


def _say_lines(name: str, transfer: Transfer, say: Callable[[str], None], is_over: threading.Event) -> None:
    started_at = time.monotonic()
    while not is_over.wait(LINE_SECONDS):
        say(describe_transfer(name, transfer.done_bytes, transfer.total_bytes, time.monotonic() - started_at))
    if transfer.done_bytes >= transfer.total_bytes:
        say(describe_transfer(name, transfer.done_bytes, transfer.total_bytes, time.monotonic() - started_at))


def _show_bar(name: str, transfer: Transfer, say: Callable[[str], None], is_over: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns: Any = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=transfer.total_bytes)
        while not is_over.wait(POLL_SECONDS):
            bar.update(task, completed=transfer.done_bytes)
        bar.update(task, completed=transfer.done_bytes)
