"""The collectives of the CPU against NumPy, with ranks that come late at random, and their counters."""

import itertools
import random
import threading
import time

import numpy as np
import pytest

from glint.native import abi
from tests.cpu.rank_collectives import (
    CollectiveFailed,
    FloatArray,
    RankCollectives,
    rank_world,
    sleep_at_random,
    sum_by_tree,
)

pytestmark = [pytest.mark.sanitize, pytest.mark.threads]

ROUNDS = 1000
FLOAT_BYTES = 4
every_count = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 7, 8])


def make_parts(num_ranks: int, shape: tuple[int, ...], seed: int = 0) -> list[FloatArray]:
    """One array for each rank, of sizes so different that every order of adding gives other digits."""
    source = np.random.default_rng(seed)
    parts = source.standard_normal((num_ranks, *shape)) * 10.0 ** source.integers(-3, 4, (num_ranks, *shape))
    return list(parts.astype(np.float32))


@every_count
@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000])
def test_all_reduce_is_the_sum_by_one_tree(num_ranks: int, count: int) -> None:
    parts = make_parts(num_ranks, (count,))
    outs = [np.full(count, np.nan, np.float32) for _ in parts]
    with rank_world(num_ranks) as world:
        world.run(lambda rank: rank.call("all_reduce", outs[rank.rank], parts[rank.rank], count))
        assert [rank.num_run for rank in world.ranks] == [1] * num_ranks
        assert [rank.bytes_sent for rank in world.ranks] == [(num_ranks - 1) * count * FLOAT_BYTES] * num_ranks
    expected = sum_by_tree(parts)
    for out in outs:
        np.testing.assert_array_equal(out, expected)


def test_the_tree_is_not_the_sum_in_order() -> None:
    """With four ranks and more the test above can tell the tree from adding one rank after the other."""
    for num_ranks in (4, 5, 8):
        parts = make_parts(num_ranks, (5000,))
        in_order = parts[0]
        for part in parts[1:]:
            in_order = in_order + part
        assert (sum_by_tree(parts) != in_order).any()


@every_count
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 50])
def test_reduce_scatter_gives_each_rank_its_rows(num_ranks: int, rows: int) -> None:
    width = 37
    parts = make_parts(num_ranks, (rows, width), seed=rows)
    rows_per_rank = -(-rows // num_ranks)
    firsts = [min(rank * rows_per_rank, rows) for rank in range(num_ranks + 1)]
    outs = [np.full((rows, width), np.nan, np.float32) for _ in parts]

    def scatter(rank: RankCollectives) -> None:
        first, last = firsts[rank.rank], firsts[rank.rank + 1]
        sizes = (first * width, (last - first) * width, rows * width)
        rank.call("reduce_scatter", outs[rank.rank], parts[rank.rank], *sizes)

    with rank_world(num_ranks) as world:
        world.run(scatter)
        sent = [rank.bytes_sent for rank in world.ranks]
    expected = sum_by_tree(parts)
    for rank, out in enumerate(outs):
        count = firsts[rank + 1] - firsts[rank]
        np.testing.assert_array_equal(out[:count], expected[firsts[rank] : firsts[rank + 1]])
        assert np.isnan(out[count:]).all()
        assert sent[rank] == (rows - count) * width * FLOAT_BYTES


@every_count
@pytest.mark.parametrize("total", [0, 1, 5, 8, 9, 64])
def test_all_gather_with_a_last_part_that_is_short_or_missing(num_ranks: int, total: int) -> None:
    part = -(-total // num_ranks)
    expected = np.random.default_rng(1).integers(0, 256, total, np.uint8)
    arrays = [np.full(total + 3, 0xEE, np.uint8) for _ in range(num_ranks)]
    for rank, array in enumerate(arrays):
        own = slice(min(rank * part, total), min((rank + 1) * part, total))
        array[own] = expected[own]
    with rank_world(num_ranks) as world:
        world.run(lambda rank: rank.call("all_gather", arrays[rank.rank], part, total))
        sent = [rank.bytes_sent for rank in world.ranks]
    for array in arrays:
        np.testing.assert_array_equal(array[:total], expected)
        assert (array[total:] == 0xEE).all()
    assert sum(sent) == total * (num_ranks - 1)


@every_count
def test_all_to_all_transposes_the_parts(num_ranks: int) -> None:
    part = 13
    sent = np.random.default_rng(2).integers(0, 256, (num_ranks, num_ranks, part), np.uint8)
    received = np.zeros_like(sent)
    with rank_world(num_ranks) as world:
        world.run(lambda rank: rank.call("all_to_all", received[rank.rank], sent[rank.rank], part))
        assert {rank.bytes_sent for rank in world.ranks} == {part * (num_ranks - 1)}
    np.testing.assert_array_equal(received, sent.transpose(1, 0, 2))


@every_count
def test_broadcast_from_every_root(num_ranks: int) -> None:
    with rank_world(num_ranks) as world:
        for root in range(num_ranks):
            arrays = np.random.default_rng(root).integers(0, 256, (num_ranks, 29), np.uint8)
            expected = arrays[root].copy()
            world.run(lambda rank, a=arrays, r=root: rank.call("broadcast", a[rank.rank], 29, r))
            np.testing.assert_array_equal(arrays, np.tile(expected, (num_ranks, 1)))
        assert {rank.bytes_sent for rank in world.ranks} == {29 * (num_ranks - 1)}
        assert {rank.num_run for rank in world.ranks} == {num_ranks}


@every_count
def test_gather_columns_puts_the_parts_side_by_side(num_ranks: int) -> None:
    rows, cols, spare = 5, 3, 4
    parts = make_parts(num_ranks, (rows, cols))
    stride = cols * num_ranks + spare
    outs = [np.full((rows, stride), np.nan, np.float32) for _ in parts]
    root = num_ranks - 1
    shape = rows, cols, cols * num_ranks, stride
    with rank_world(num_ranks) as world:
        world.run(lambda rank: rank.call("gather_columns", outs[rank.rank], parts[rank.rank], *shape, root))
        sent = [rank.bytes_sent for rank in world.ranks]
    np.testing.assert_array_equal(outs[root][:, :-spare], np.concatenate(parts, axis=1))
    assert np.isnan(outs[root][:, -spare:]).all()
    assert all(np.isnan(out).all() for rank, out in enumerate(outs) if rank != root)
    assert sent == [rows * cols * FLOAT_BYTES] * root + [0]


@every_count
@pytest.mark.parametrize("total_cols", [1, 4, 7])
def test_gather_columns_of_parts_that_differ_in_width(num_ranks: int, total_cols: int) -> None:
    rows, cols_per_rank = 3, -(-total_cols // num_ranks)
    expected = np.arange(rows * total_cols, dtype=np.float32).reshape(rows, total_cols)
    firsts = [min(rank * cols_per_rank, total_cols) for rank in range(num_ranks + 1)]
    parts = [expected[:, first:last].copy() for first, last in itertools.pairwise(firsts)]
    out = np.zeros_like(expected)
    with rank_world(num_ranks) as world:
        shape = rows, cols_per_rank, total_cols, total_cols
        world.run(lambda rank: rank.call("gather_columns", out, parts[rank.rank], *shape, 0))
        sent = [rank.bytes_sent for rank in world.ranks]
    np.testing.assert_array_equal(out, expected)
    assert sent == [0, *(part.nbytes for part in parts[1:])]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_thousand_rounds_of_ranks_that_come_late(num_ranks: int) -> None:
    """Each round adds up what the round before gave, so a rank that reads too early or late spoils all that follows."""
    count = 64
    starts = make_parts(num_ranks, (count,))
    expected = sum_by_tree(starts)
    for _ in range(ROUNDS - 1):
        expected = sum_by_tree([(expected * np.float32(0.5 / num_ranks)) + start for start in starts])

    def rounds(rank: RankCollectives) -> FloatArray:
        source = random.Random(rank.rank)
        part, out = starts[rank.rank].copy(), np.empty(count, np.float32)
        for index in range(ROUNDS):
            sleep_at_random(source)
            rank.call("all_reduce", out, part, count)
            if index < ROUNDS - 1:
                part[:] = out * np.float32(0.5 / num_ranks) + starts[rank.rank]
        return out

    with rank_world(num_ranks) as world:
        for out in world.run(rounds, 120.0):
            np.testing.assert_array_equal(out, expected)
        assert {rank.num_run for rank in world.ranks} == {ROUNDS}


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_collectives_of_all_kinds_in_turn(num_ranks: int) -> None:
    """Memory that one collective wrote is what the next one sends; every rank must end with the same bytes."""
    count = 16 * num_ranks

    def rounds(rank: RankCollectives) -> bytes:
        source = random.Random(rank.rank)
        values, out = np.full(count, rank.rank + 1, np.float32), np.empty(count, np.float32)
        for index in range(100):
            sleep_at_random(source)
            rank.call("all_to_all", out, values, 16 * FLOAT_BYTES)
            rank.call("reduce_scatter", values[16 * rank.rank :], out, 16 * rank.rank, 16, count)
            rank.call("all_gather", values, 16 * FLOAT_BYTES, count * FLOAT_BYTES)
            values *= np.float32(1.0 / num_ranks)
            rank.call("broadcast", values, count * FLOAT_BYTES, index % num_ranks)
            values += np.float32(rank.rank)
        rank.call("broadcast", values, count * FLOAT_BYTES, 0)
        return values.tobytes()

    with rank_world(num_ranks) as world:
        ends = world.run(rounds, 120.0)
    assert len(set(ends)) == 1
    assert np.isfinite(np.frombuffer(ends[0], np.float32)).all()


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_stopped_world_lets_every_rank_go(num_ranks: int) -> None:
    """Ranks that wait, asleep or not, and ranks that come later fail with the reason; none hangs."""
    with rank_world(num_ranks) as world:
        values = [np.zeros(4, np.float32) for _ in world.ranks]

        def wait(rank: RankCollectives) -> CollectiveFailed:
            if rank.rank == num_ranks - 1:
                time.sleep(0.2)
            with pytest.raises(CollectiveFailed) as failure:
                rank.call("all_gather", values[rank.rank], 4, 16)
            return failure.value

        threading.Timer(0.05, world.stop, ["rank 5 burnt down"]).start()
        for failure in [*world.run(wait, 20.0), *world.run(wait, 20.0)]:
            assert failure.status == abi.STATUS_RANK_FAILED
            assert "rank 5 burnt down" in str(failure)
        assert [rank.num_run for rank in world.ranks] == [0] * num_ranks
