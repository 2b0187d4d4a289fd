"""The collectives of CUDA ranks in this process, one thread for each, through the testing functions of the library."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from glint.native import abi
from glint.native.library import name_nccl
from tests.cpu.testing_library import declare
from tests.reference.numpy_ops import FloatArray

Kind = Literal["all_gather", "all_to_all", "broadcast", "gather", "all_reduce", "reduce_scatter", "peer_norms"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_ROWS = 256
DEADLINE_SECONDS = 60.0
ALIGNMENT = 1024


class _Collective(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("data", "values")),
        ("weight", POINTER(c_float)),
        *((name, c_int64) for name in ("data_bytes", "value_bytes", "count", "total")),
        *((name, c_int32) for name in ("kind", "root", "second_slot", "num_runs", "num_replays")),
    ]


class RankFault(Exception):
    """A rank whose collective failed, with the library's words."""


@dataclass(frozen=True)
class Collective:
    """What one rank gives to a collective: its data, which the result replaces, and what else it reads.

    `count` and `total` are bytes of a piece and of all, floats for the sums, rows for the norms. It runs `num_runs`
    times, then `num_replays` times out of a captured graph; all results must be the same.
    """

    kind: Kind
    data: NDArray[Any]
    count: int
    values: NDArray[Any] | None = None
    weight: FloatArray | None = None
    total: int = 0
    root: int = 0
    second_slot: int = 1
    num_runs: int = 1
    num_replays: int = 0

    def native(self, out: NDArray[np.uint8]) -> _Collective:
        """The collective as the library takes it; the result replaces the bytes of out."""
        return _Collective(
            data=out.ctypes.data,
            values=0 if self.values is None else self.values.ctypes.data,
            weight=None if self.weight is None else self.weight.ctypes.data_as(POINTER(c_float)),
            data_bytes=out.nbytes,
            value_bytes=0 if self.values is None else self.values.nbytes,
            count=self.count,
            total=self.total,
            kind=KINDS.index(self.kind),
            root=self.root,
            second_slot=self.second_slot,
            num_runs=self.num_runs,
            num_replays=self.num_replays,
        )


class CudaRank:
    """One rank; its calls may come from any thread, one at a time."""

    def __init__(self, group: int, rank: int, width: int) -> None:
        new = declare("glint_testing_rank_new", c_void_p, c_void_p, c_int32, c_int64, c_int64, device="cuda")
        self.rank = rank
        self._handle = new(group, rank, MOST_ROWS, width)
        if self._handle is None:
            raise RankFault(last_error())

    def open(self, seconds: float = DEADLINE_SECONDS) -> None:
        """Join the world, test every link and open peer memory."""
        _check(declare("glint_testing_rank_open", c_int32, c_void_p, c_double, device="cuda")(self._handle, seconds))

    def run(self, collective: Collective) -> NDArray[np.uint8]:
        """The bytes of the data behind the collective."""
        out = np.ascontiguousarray(collective.data).view(np.uint8).copy()
        run = declare("glint_testing_rank_run", c_int32, c_void_p, POINTER(_Collective), device="cuda")
        _check(run(self._handle, byref(collective.native(out))))
        return out

    def set_peer_wait(self, seconds: float) -> None:
        """How long a sum over peer memory waits for another rank."""
        declare("glint_testing_rank_peer_wait", None, c_void_p, c_double, device="cuda")(self._handle, seconds)

    def free(self) -> None:
        """End this rank."""
        declare("glint_testing_rank_free", None, c_void_p, device="cuda")(self._handle)


class CudaRanks:
    """Ranks that share the GPUs there are, with a thread for each."""

    def __init__(self, num_ranks: int, width: int) -> None:
        name_nccl()
        self._group = declare("glint_testing_group_new", c_void_p, c_int32, device="cuda")(num_ranks)
        if self._group is None:
            raise RankFault(last_error())
        self.num_ranks = num_ranks
        self._threads = ThreadPoolExecutor(num_ranks)
        self.ranks = [CudaRank(self._group, rank, width) for rank in range(num_ranks)]

    def run(self, work: Callable[[CudaRank], Any], timeout_seconds: float = 120.0) -> list[Any]:
        """Do the same work on every rank at once; the group is aborted with the words of a rank that fails."""

        def guarded(rank: CudaRank) -> Any:
            try:
                return work(rank)
            except RankFault as fault:
                self.abort(f"rank {rank.rank} failed: {fault}")
                return fault

        futures = [self._threads.submit(guarded, rank) for rank in self.ranks]
        return [future.result(timeout_seconds) for future in futures]

    def abort(self, why: str) -> None:
        """Let go all ranks wherever they wait."""
        declare("glint_testing_group_abort", None, c_void_p, c_char_p, device="cuda")(self._group, why.encode())

    def free(self) -> None:
        """End the threads and the ranks."""
        self._threads.shutdown()
        for rank in self.ranks:
            rank.free()
        declare("glint_testing_group_free", None, c_void_p, device="cuda")(self._group)


@contextmanager
def cuda_ranks(num_ranks: int, width: int, opens: bool = True) -> Iterator[CudaRanks]:
    """Ranks that end with the context, open unless that is asked not to be."""
    ranks = CudaRanks(num_ranks, width)
    try:
        if opens:
            faults = [fault for fault in ranks.run(lambda rank: rank.open()) if fault is not None]
            assert not faults, str(faults[0])
        yield ranks
    finally:
        ranks.free()


def load_nccl(path: str) -> None:
    """Load an NCCL library; raises RankFault where that fails."""
    _check(declare("glint_testing_load_nccl", c_int32, c_char_p, device="cuda")(path.encode()))


def last_error() -> str:
    """The library's words on what failed last in this thread."""
    text: bytes = declare("glint_testing_operations_error", c_char_p, device="cuda")()
    return text.decode()


@dataclass(frozen=True)
class NormArrays:
    """Hidden rows, their norm, FP8 values and scales in one piece of memory, each array at a multiple of ALIGNMENT."""

    rows: int
    width: int

    @property
    def fp8_stride(self) -> int:
        """FP8 values of a row."""
        return -(-self.width // 16) * 16

    def sizes(self) -> dict[str, int]:
        """Bytes of every array."""
        floats = 4 * self.rows * self.width
        return {"hidden": floats, "normed": floats, "fp8": self.rows * self.fp8_stride, "scales": 4 * self.rows}

    def split(self, data: NDArray[np.uint8]) -> dict[str, NDArray[np.uint8]]:
        """The arrays in the memory."""
        first, arrays = 0, {}
        for name, size in self.sizes().items():
            arrays[name] = data[first : first + size]
            first += -(-size // ALIGNMENT) * ALIGNMENT
        return arrays

    @property
    def byte_count(self) -> int:
        """Bytes of all arrays with what lies between them."""
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes().values())


def _check(status: int) -> None:
    if status != abi.STATUS_OK:
        raise RankFault(last_error())
