"""What a run is asked to do, and how its parts get a server and client processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from tests.reliability.target import Target, is_alive, own_server

Job = TypeVar("Job")
Share = TypeVar("Share")
MOST_PROCESSES = 8
SMALL_CACHE_TOKENS = "16384"
STREAM_TOKENS = 512
READY_SECONDS = 10.0
READY_SECONDS_SHORT = 60.0


@dataclass(frozen=True)
class Options:
    """The run. None stands for what suits the part; `--short` makes every part small and judges no speed."""

    folder: Path
    model: Path
    is_small: bool = True
    short: bool = False
    url: str | None = None
    serve_flags: tuple[str, ...] = ()
    seconds: float | None = None
    tokens: int | None = None
    bodies: int | None = None
    streams: int | None = None
    concurrency: int | None = None
    seed: int = 1
    processes: int | None = None
    memory_mib: float | None = None
    stream_counts: tuple[int, ...] = (64, 256)
    min_tokens_per_second: float | None = None
    fault_library: Path | None = None
    fault_ranks: int = 2
    fault_ranks_share_gpu: bool = False
    fault_places: tuple[str, ...] = ()
    only: int | None = None

    def pick(self, name: str, short: float, long: float) -> float:
        """The value of a flag: what was given, else that of the short or the long form."""
        given = getattr(self, name)
        return (short if self.short else long) if given is None else float(given)

    def room(self, streams: int) -> tuple[str, ...]:
        """The flags for so many streams at once on the small model, whose cache is small otherwise."""
        return ("--max-total-tokens", str(streams * STREAM_TOKENS)) if self.is_small else ()

    @property
    def memory_bound_mib(self) -> float:
        """What memory may grow by after the warm-up, which in the short form is too short for every cache to fill."""
        return self.pick("memory_mib", 48, 16)

    @property
    def ready_seconds(self) -> float:
        """The time in which a server must be ready again; the short form runs where others take the processors too."""
        return READY_SECONDS_SHORT if self.short else READY_SECONDS

    @property
    def num_processes(self) -> int:
        """Client processes: half of the processors, so that the server has the rest."""
        return self.processes or max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) // 2))

    @contextmanager
    def server(
        self,
        part: str,
        *flags: str,
        environment: dict[str, str] | None = None,
        module: str = "glint",
        last_flags: tuple[str, ...] = (),
        is_struck: bool = False,
    ) -> Iterator[Target]:
        """The server of a part: at the given address, or one of our own with these flags and those of the run.

        The engine of a part that does not strike it must live to the end of the part, in the same process.
        """
        if self.url is not None:
            yield Target(self.url)
            return
        sizes = ("--max-total-tokens", SMALL_CACHE_TOKENS) if self.is_small else ()
        asked = ("--model", str(self.model), *sizes, *flags, *self.serve_flags, *last_flags)
        with own_server(self.folder / part, asked, environment, module) as target:
            first = target.engine_pid
            yield target
            if not is_struck and not (is_alive(first) and target.engine_pid == first):
                raise RuntimeError(f"the engine's process {first} died in the part {part}; its log says why")


def spread(work: Callable[[Job], Share], jobs: Sequence[Job]) -> list[Share]:
    """Do each job in a process of its own, all at once."""
    with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, jobs))


def divide(total: int, parts: int) -> list[int]:
    """A number as so many nearly equal ones."""
    return [total // parts + (index < total % parts) for index in range(parts)]
