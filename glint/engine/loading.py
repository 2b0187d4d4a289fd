"""Shows the progress of loading weights while an engine is made."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from glint.native import abi

POLL_SECONDS = 0.1
SHOWN_AFTER_SECONDS = 1.0


@contextmanager
def shown_loading(
    read: Callable[[], abi.LoadState], say: Callable[[str], None], is_always_said: bool = False
) -> Iterator[None]:
    """Show a load while the body makes the engine: a bar on a terminal, and one line about it at the end.

    `read` is called from a thread of its own. A load that is over within a second is shown only if `is_always_said`.
    Nothing is said where the body fails.
    """
    watch = _Watch(read)
    thread = threading.Thread(target=watch.run, name="load progress", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        watch.stop(thread)
        raise
    watch.stop(thread)
    total = read().bytes_total
    if total and (is_always_said or watch.seconds >= SHOWN_AFTER_SECONDS):
        say(describe_load(total, watch.seconds))


def describe_load(byte_count: int, seconds: float) -> str:
    """One line: bytes, time and rate."""
    rate = byte_count / max(seconds, 1e-9)
    return f"weights {byte_count / 1e9:.1f} GB in {seconds:.1f} s ({rate / 1e9:.1f} GB/s)"


class _Watch:
    """Polls a load and draws its bar; `seconds` is the time until all bytes were there."""

    def __init__(self, read: Callable[[], abi.LoadState]) -> None:
        self.seconds = 0.0
        self._read = read
        self._is_over = threading.Event()
        self._started_at = time.monotonic()
        self._is_complete = False

    def stop(self, thread: threading.Thread) -> None:
        """End the polling and the bar."""
        if not self._is_complete:
            self.seconds = time.monotonic() - self._started_at
        self._is_over.set()
        thread.join()

    def run(self) -> None:
        """Poll until stopped."""
        bar: Any = None
        has_begun = False
        while not self._is_over.wait(POLL_SECONDS):
            state = self._read()
            passed = time.monotonic() - self._started_at
            has_begun = has_begun or bool(state.is_loading)
            if not has_begun or self._is_complete:
                continue
            if bar is None and passed >= SHOWN_AFTER_SECONDS and sys.stderr.isatty():
                bar = _make_bar(state.bytes_total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=state.bytes_done, total=state.bytes_total)
            if state.bytes_done >= state.bytes_total > 0 or not state.is_loading:
                self.seconds, self._is_complete = passed, True
        if bar is not None:
            bar.stop()


def _make_bar(byte_count: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    bar.add_task("weights", total=byte_count)
    return bar
