"""The collectives of ranks on the GPU: every byte at odd sizes, sums by one tree, peer memory, and faults.

Ranks share one GPU, for which NCCL must be 2.32.3 or newer ($GLINT_NCCL names the file). Every collective runs often
with ranks that come late, then out of a captured graph, and gives the same bytes each time.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cpu.rank_collectives import sum_by_tree
from tests.gpu.collectives_cuda import (
    Collective,
    CudaRank,
    CudaRanks,
    Kind,
    NormArrays,
    RankFault,
    cuda_ranks,
    load_nccl,
)
from tests.gpu.operations_cuda import CudaOperations, NormCase
from tests.reference.numpy_ops import FloatArray, decode_e4m3

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
RANK_COUNTS = (2, 3, 8)
FAULT_RANKS = 4
NUM_RUNS = 100
WIDTH, ODD_WIDTH = 5120, 1003
MOST_GATHERED_FLOATS = 65536
POISON = 0xA5
MARGIN_BYTES = 64
FAULT = "a fault put in by the test"
FAULT_SECONDS = 8.0
SHORT_DEADLINE = 3.0
Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module", params=RANK_COUNTS)
def ranks(request: pytest.FixtureRequest) -> Iterator[CudaRanks]:
    """Open ranks with peer memory for rows of WIDTH."""
    with cuda_ranks(request.param, WIDTH) as opened:
        yield opened


def pieces(num_ranks: int, byte_count: int) -> Bytes:
    """Random bytes of every rank."""
    return np.random.default_rng(byte_count).integers(0, 256, (num_ranks, byte_count), np.uint8)


def parts(num_ranks: int, count: int) -> list[FloatArray]:
    """One array of each rank, of sizes so different that every order of adding gives other digits."""
    numbers = np.random.default_rng(count)
    values = numbers.standard_normal((num_ranks, count)) * 10.0 ** numbers.integers(-3, 4, (num_ranks, count))
    return list(values.astype(np.float32))


def with_margin(data: Bytes) -> Bytes:
    """The data with bytes behind them that must stay."""
    return np.concatenate([data, np.full(MARGIN_BYTES, POISON, np.uint8)])


def empty(byte_count: int) -> Bytes:
    """Room that nothing was written to."""
    return np.full(byte_count, POISON, np.uint8)


def check(ranks: CudaRanks, given: Callable[[int], Collective], expected: Callable[[int], Bytes]) -> None:
    """Run a collective on all ranks and compare every byte, the margin's too."""
    seen = ranks.run(lambda rank: rank.run(given(rank.rank)))
    for rank, result in enumerate(seen):
        assert not isinstance(result, RankFault), str(result)
        assert result.tobytes() == with_margin(expected(rank)).tobytes(), f"rank {rank}"


def often(
    kind: Kind, data: Bytes, count: int, values: NDArray[Any] | None = None, total: int = 0, root: int = 0
) -> Collective:
    """A collective that runs NUM_RUNS times and as often out of a graph."""
    runs = {"num_runs": NUM_RUNS, "num_replays": NUM_RUNS}
    return Collective(kind, with_margin(data), count, values, total=total, root=root, **runs)


@pytest.mark.parametrize("count", [1, 7, 1000, 65537])
def test_all_gather(ranks: CudaRanks, count: int) -> None:
    sent = pieces(ranks.num_ranks, count)

    def given(rank: int) -> Collective:
        data = empty(sent.size).reshape(sent.shape)
        data[rank] = sent[rank]
        return often("all_gather", data.ravel(), count)

    check(ranks, given, lambda _: sent.ravel())


@pytest.mark.parametrize(("rows", "row_bytes"), [(1, 4012), (2, 4012), (7, 4012), (64, 4012), (13, 3)])
def test_all_to_all(ranks: CudaRanks, rows: int, row_bytes: int) -> None:
    """The last shards are short or empty where the ranks do not divide the rows."""
    total, shard = rows * row_bytes, -(-rows // ranks.num_ranks) * row_bytes
    sent = pieces(ranks.num_ranks, total)

    def given(rank: int) -> Collective:
        return often("all_to_all", empty(ranks.num_ranks * shard), shard, values=sent[rank].copy(), total=total)

    def expected(rank: int) -> Bytes:
        data = empty(ranks.num_ranks * shard).reshape(ranks.num_ranks, shard)
        own = sent[:, rank * shard : (rank + 1) * shard]
        data[:, : own.shape[1]] = own
        return data.ravel()

    check(ranks, given, expected)


@pytest.mark.parametrize("count", [3, 515, 40001])
@pytest.mark.parametrize("root", [0, -1])
def test_broadcast_and_gather(ranks: CudaRanks, count: int, root: int) -> None:
    root %= ranks.num_ranks
    sent = pieces(ranks.num_ranks, count)
    check(ranks, lambda rank: often("broadcast", sent[rank], count, root=root), lambda _: sent[root])
    room = empty(sent.size)
    check(
        ranks,
        lambda rank: often("gather", room, count, values=sent[rank].copy(), root=root),
        lambda rank: sent.ravel() if rank == root else room,
    )


@pytest.mark.parametrize("count", [1, 5, 20480, MOST_GATHERED_FLOATS + 1, MOST_GATHERED_FLOATS + 24])
def test_all_reduce_is_the_sum_by_one_tree(ranks: CudaRanks, count: int) -> None:
    values = parts(ranks.num_ranks, count)
    total = sum_by_tree(values).view(np.uint8)
    check(ranks, lambda rank: often("all_reduce", values[rank].view(np.uint8), count), lambda _: total)


@pytest.mark.parametrize("count", [17, 4096])
def test_reduce_scatter_is_the_sum_by_one_tree(ranks: CudaRanks, count: int) -> None:
    values = parts(ranks.num_ranks, count * ranks.num_ranks)
    total = sum_by_tree(values).reshape(ranks.num_ranks, count)
    check(
        ranks,
        lambda rank: often("reduce_scatter", empty(4 * count), count, values=values[rank]),
        lambda rank: total[rank].view(np.uint8),
    )


def peer_norms(rows: int, width: int, values: FloatArray, hidden: FloatArray, weight: FloatArray) -> Collective:
    """Two sums over peer memory, one in each slot, of values [2, rows, width], each added to hidden and normed."""
    arrays = NormArrays(rows, width)
    state = empty(arrays.byte_count)
    arrays.split(state)["hidden"][:] = hidden.view(np.uint8).ravel()
    num_runs = NUM_RUNS if rows * width < 100_000 else NUM_RUNS // 10
    runs = {"num_runs": num_runs, "num_replays": num_runs}
    return Collective("peer_norms", np.concatenate([state, state]), rows, values=values, weight=weight, **runs)


def check_peer_norms(ranks: CudaRanks, width: int, rows: int) -> None:
    """Hidden rows, norm, FP8 values and scales are those of the norm that adds the same parts from its own memory."""
    numbers = np.random.default_rng(rows)
    values = numbers.standard_normal((ranks.num_ranks, 2, rows, width), np.float32)
    hidden, weight = numbers.standard_normal((rows, width), np.float32), numbers.standard_normal(width, np.float32)
    seen = ranks.run(lambda rank: rank.run(peer_norms(rows, width, values[rank.rank], hidden, weight)))
    assert not isinstance(seen[0], RankFault), str(seen[0])
    assert len({result.tobytes() for result in seen}) == 1
    arrays = NormArrays(rows, width)
    with CudaOperations("portable", 1) as cuda:
        for slot in range(2):
            expected = cuda.norm(NormCase(hidden, np.ascontiguousarray(values[:, slot]), weight))
            got = arrays.split(seen[0][slot * arrays.byte_count :])
            assert got["hidden"].tobytes() == expected.hidden.tobytes()
            assert got["normed"].tobytes() == expected.normed.tobytes()
            assert got["scales"].tobytes() == expected.scales.tobytes()
            fp8 = decode_e4m3(got["fp8"].reshape(rows, -1)[:, :width])
            assert (fp8 == expected.fp8[:, :width]).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 17, 64, 256])
def test_norm_over_peer_memory(ranks: CudaRanks, rows: int) -> None:
    check_peer_norms(ranks, WIDTH, rows)


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_norm_over_peer_memory_of_an_odd_width(num_ranks: int) -> None:
    with cuda_ranks(num_ranks, ODD_WIDTH) as ranks:
        for rows in (1, 2, 7, 17, 64, 256):
            check_peer_norms(ranks, ODD_WIDTH, rows)


def gathered(rank: int, **more: int) -> Collective:
    """An all-gather of 4 KiB a rank."""
    return Collective("all_gather", np.full(4096 * FAULT_RANKS, rank, np.uint8), 4096, **more)


def summed(num_runs: int = 1, second_slot: int = 1) -> Collective:
    """Sums of one row over peer memory."""
    zeros = np.zeros((2, 1, ODD_WIDTH), np.float32)
    data = np.zeros(2 * NormArrays(1, ODD_WIDTH).byte_count, np.uint8)
    return Collective("peer_norms", data, 1, zeros, zeros[0, 0].copy(), second_slot=second_slot, num_runs=num_runs)


def faults_of(ranks: CudaRanks, work: Callable[[CudaRank], object]) -> list[str]:
    """What every rank says; all of them fail, and soon."""
    start = time.monotonic()
    faults = ranks.run(work)
    assert time.monotonic() - start < FAULT_SECONDS
    assert all(isinstance(fault, RankFault) for fault in faults), faults
    return [str(fault) for fault in faults]


@pytest.fixture
def faulty() -> Iterator[CudaRanks]:
    """Fresh ranks, since a fault ends the group."""
    with cuda_ranks(FAULT_RANKS, ODD_WIDTH) as opened:
        yield opened


def is_last(rank: CudaRank) -> bool:
    """Whether a rank is the one that is lost."""
    return rank.rank == FAULT_RANKS - 1


STEPS: dict[str, Callable[[int], Collective]] = {"all-gather": gathered, "peer memory": lambda _: summed()}


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_is_lost_lets_the_others_go(faulty: CudaRanks, step: str) -> None:
    def work(rank: CudaRank) -> None:
        if is_last(rank):
            time.sleep(0.3)
            raise RankFault(FAULT)
        rank.run(STEPS[step](rank.rank))

    for fault in faults_of(faulty, work):
        assert FAULT in fault


def test_a_rank_that_is_lost_lets_the_replays_of_the_others_go(faulty: CudaRanks) -> None:
    """The last rank takes part in the capture and in the first of two replays."""

    def work(rank: CudaRank) -> None:
        if is_last(rank):
            threading.Timer(2.0, faulty.abort, [FAULT]).start()
        rank.run(gathered(rank.rank, num_replays=1 if is_last(rank) else 2))

    for fault in faults_of(faulty, work):
        assert FAULT in fault


def test_a_silent_rank_is_named(faulty: CudaRanks) -> None:
    def work(rank: CudaRank) -> None:
        rank.set_peer_wait(1.0)
        if is_last(rank):
            time.sleep(SHORT_DEADLINE)
        rank.run(summed(num_runs=3))

    for fault in faults_of(faulty, work):
        assert f"s for rank {FAULT_RANKS - 1} at " in fault


def test_the_same_slot_of_peer_memory_twice_is_refused(faulty: CudaRanks) -> None:
    for fault in faults_of(faulty, lambda rank: rank.run(summed(second_slot=0))):
        assert "slot of peer memory twice in a row" in fault


def test_a_rank_that_does_not_come_to_the_start_is_named() -> None:
    with cuda_ranks(FAULT_RANKS, ODD_WIDTH, opens=False) as ranks:

        def work(rank: CudaRank) -> None:
            if is_last(rank):
                time.sleep(SHORT_DEADLINE + 0.5)
            rank.open(SHORT_DEADLINE)

        for fault in faults_of(ranks, work):
            assert f"rank {FAULT_RANKS - 1} of {FAULT_RANKS} did not" in fault


def test_ranks_start_again_after_faults() -> None:
    with cuda_ranks(FAULT_RANKS, ODD_WIDTH) as ranks:
        check_peer_norms(ranks, ODD_WIDTH, 7)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(RankFault, match="GLINT_NCCL"):
        load_nccl("/nowhere/libnccl.so.2")
