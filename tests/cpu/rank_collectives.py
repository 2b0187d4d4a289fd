"""The CPU's collectives between threads of this process, each one rank."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glint.native import abi
from tests.cpu.testing_library import declare

FloatArray = NDArray[np.float32]
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "all_gather": (c_void_p, c_int64, c_int64),
    "all_to_all": (c_void_p, c_void_p, c_int64),
    "broadcast": (c_void_p, c_int64, c_int32),
    "all_reduce": (c_void_p, c_void_p, c_int64),
    "reduce_scatter": (c_void_p, c_void_p, c_int64, c_int64, c_int64),
    "gather_columns": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int32),
}


class CollectiveFailed(Exception):
    """A collective that ended with a status other than success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RankCollectives:
    """The collectives of one rank. Arrays are given as they are and must be contiguous."""

    def __init__(self, world: int, rank: int) -> None:
        self.rank = rank
        self._handle = declare("glint_testing_collectives_new", c_void_p, c_void_p, c_int32)(world, rank)

    def call(self, name: str, *arguments: NDArray[Any] | int) -> None:
        """Run a collective; every rank must do so. Raises CollectiveFailed where it did not come to its end."""
        function = declare(f"glint_testing_{name}", c_int32, c_void_p, *_ARGUMENTS[name])
        status = function(self._handle, *(value if isinstance(value, int) else _pointer(value) for value in arguments))
        if status != abi.STATUS_OK:
            raise CollectiveFailed(status, declare("glint_testing_collectives_error", c_char_p)().decode())

    @property
    def num_run(self) -> int:
        """How many collectives this rank has run."""
        return int(declare("glint_testing_collectives_run", c_uint64, c_void_p)(self._handle))

    @property
    def bytes_sent(self) -> int:
        """How many bytes this rank has sent in them."""
        return int(declare("glint_testing_collective_bytes", c_uint64, c_void_p)(self._handle))

    def free(self) -> None:
        """End the collectives of this rank."""
        declare("glint_testing_collectives_free", None, c_void_p)(self._handle)


class RankWorld:
    """Ranks that exchange data, one thread for each."""

    def __init__(self, num_ranks: int) -> None:
        self._handle = declare("glint_testing_world_new", c_void_p, c_int32)(num_ranks)
        self.ranks = [RankCollectives(self._handle, rank) for rank in range(num_ranks)]
        self._threads = ThreadPoolExecutor(num_ranks)

    def run(self, work: Callable[[RankCollectives], Any], timeout_seconds: float = 60.0) -> list[Any]:
        """Do the same work on every rank at once and give what came of each; a hang is an error."""
        futures = [self._threads.submit(work, rank) for rank in self.ranks]
        return [future.result(timeout_seconds) for future in futures]

    def stop(self, why: str) -> None:
        """Stop all ranks wherever they wait."""
        declare("glint_testing_world_stop", None, c_void_p, c_char_p)(self._handle, why.encode())

    def free(self) -> None:
        """End the threads and the ranks."""
        self._threads.shutdown()
        for rank in self.ranks:
            rank.free()
        declare("glint_testing_world_free", None, c_void_p)(self._handle)


@contextmanager
def rank_world(num_ranks: int) -> Iterator[RankWorld]:
    """Ranks that end with the context."""
    world = RankWorld(num_ranks)
    try:
        yield world
    finally:
        world.free()


def sleep_at_random(source: random.Random) -> None:
    """Come late now and then, sometimes long after the others went to sleep."""
    if source.random() < 0.05:
        time.sleep(source.random() * 2e-3)


def sum_by_tree(parts: list[FloatArray]) -> FloatArray:
    """The float32 sum of all parts: neighbours first, then pairs of neighbours, and so on."""
    level = list(parts)
    while len(level) > 1:
        level = [
            level[index] + level[index + 1] if index + 1 < len(level) else level[index]
            for index in range(0, len(level), 2)
        ]
    return level[0]


def _pointer(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
