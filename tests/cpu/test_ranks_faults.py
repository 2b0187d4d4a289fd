"""A rank that fails at load, in a step or in a collective: it is named, nothing hangs, nothing is left behind."""

import ctypes
import time
from collections.abc import Callable

import pytest

from glint.native import abi
from glint.native.library import InternalFailure, InvalidArgument, NativeEngine, RankFailed
from tests.cpu.rank_engine import (
    SHARDING,
    answers_of,
    deferring_engine,
    open_testing_engine,
    rank_asks,
    rank_model,
)
from tests.cpu.rank_faults import ask_for_fault, count_threads, failing_ranks, is_mapped, leaving_nothing, within
from tests.cpu.small_engine import Session, answer_all, native_request, open_engine

pytestmark = [pytest.mark.sanitize, pytest.mark.threads]

ASKS = rank_asks(4, seed=3)
SECONDS = 60.0
COLLECTIVES_OF_A_STEP = 2 * 3 + 2
OPTIONS = {"num_pages": 64, "max_step_tokens": 256, "max_step_items": 8}


def open_ranks(num_ranks: int, sharding: str = "auto") -> NativeEngine:
    """An engine of the test library."""
    ranks = {"num_ranks": num_ranks, "row_slices": num_ranks, "sequence_parallel": SHARDING[sharding]}
    return open_testing_engine(rank_model(), **ranks, **OPTIONS)


def require_health(num_ranks: int) -> None:
    """An engine made now works."""
    with open_ranks(num_ranks) as engine:
        assert answer_all(engine, ASKS) == answers_of(rank_model(), ASKS, row_slices=num_ranks)


def require_end(session: Session, words: str) -> None:
    """The engine refuses every further step at once with the reason, and what needs no rank still works."""
    engine = session.engine
    for request_id in list(session.answers):
        started = time.monotonic()
        with pytest.raises(RankFailed, match=f"{words}.*start the engine again"):
            engine.submit_step([(request_id, 1)])
        assert time.monotonic() - started < 5.0
        engine.release_pages(request_id)
        engine.free_request(request_id)
    fresh = engine.add_request(native_request(ASKS[0]))
    with pytest.raises(RankFailed, match=words):
        engine.submit_step([(fresh, 8)])
    with pytest.raises(RankFailed, match=words):
        engine._call("glint_prefill", fresh, ctypes.byref(abi.sized(abi.StepResults)))
    engine.free_request(fresh)
    stats = engine.stats()
    assert (stats.num_requests, stats.steps_in_flight, stats.pages_held) == (0, 0, 0)
    engine.check()


def fail_in_a_step(engine: NativeEngine, words: str, run: Callable[[Session], None]) -> None:
    """Run requests until a step fails with the words; then the engine is at its end."""
    session = Session(engine)
    for ask in ASKS:
        session.add(ask)
    with pytest.raises(RankFailed, match=words):
        run(session)
    while session.tickets:
        with pytest.raises(RankFailed, match=words):
            session.collect()
    require_end(session, words)


@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (2, 0), (2, 1), (8, 0), (8, 5)])
def test_a_rank_that_fails_at_load(monkeypatch: pytest.MonkeyPatch, num_ranks: int, rank: int) -> None:
    name = "the fault" if num_ranks == 1 else f"rank {rank} of {num_ranks} failed: the fault"

    def load() -> None:
        with pytest.raises(InternalFailure, match=name):
            open_ranks(num_ranks)

    with leaving_nothing(rank_model()):
        ask_for_fault(monkeypatch, "load", rank, 1)
        within(SECONDS, load)
        within(SECONDS, lambda: require_health(num_ranks))


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (4, 3), (8, 6)])
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_rank_that_fails_in_a_step(monkeypatch: pytest.MonkeyPatch, num_ranks: int, rank: int, passes: int) -> None:
    def fail() -> None:
        with open_ranks(num_ranks) as engine:
            ask_for_fault(monkeypatch, "step", rank, passes)
            fail_in_a_step(engine, f"rank {rank} of {num_ranks} failed: the fault", lambda session: session.run(16))

    with leaving_nothing(rank_model()):
        within(SECONDS, fail)
        within(SECONDS, lambda: require_health(num_ranks))


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (8, 4)])
@pytest.mark.parametrize("sharding", ["replicated", "sharded"])
@pytest.mark.parametrize("passes", [1, 4, COLLECTIVES_OF_A_STEP - 1, COLLECTIVES_OF_A_STEP, 17])
def test_a_rank_that_fails_in_a_collective(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, rank: int, sharding: str, passes: int
) -> None:
    """The first of a step, one within, that of the logits, that of the results, and one of a later step."""

    def fail() -> None:
        with open_ranks(num_ranks, sharding) as engine:
            ask_for_fault(monkeypatch, "collective", rank, passes)
            fail_in_a_step(engine, f"rank {rank} of {num_ranks} failed: the fault", lambda session: session.run(16))

    with leaving_nothing(rank_model()):
        within(SECONDS, fail)


@pytest.mark.parametrize("defers", [False, True], ids=["read", "deferred"])
@pytest.mark.parametrize("place", ["step", "collective"])
def test_both_steps_in_flight_fail(monkeypatch: pytest.MonkeyPatch, defers: bool, place: str) -> None:
    options = {"num_ranks": 4, "row_slices": 4, **OPTIONS}

    def fail() -> None:
        make = deferring_engine if defers else open_testing_engine
        with make(rank_model(), **options) as engine:
            ask_for_fault(monkeypatch, place, 2, 3)
            fail_in_a_step(engine, "rank 2 of 4 failed: the fault", lambda session: session.run_overlapped(16))

    with leaving_nothing(rank_model()):
        within(SECONDS, fail)
        within(SECONDS, lambda: require_health(4))


@pytest.mark.parametrize("ranks", [(0, 1), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("place", ["step", "collective"])
def test_several_ranks_that_fail_at_once(ranks: tuple[int, ...], place: str) -> None:
    """One of them is named, the same in every later refusal."""
    name = f"rank [{''.join(map(str, ranks))}] of 4 failed: rank"

    def fail() -> None:
        with open_ranks(4) as engine, failing_ranks(place, *ranks):
            fail_in_a_step(engine, name, lambda session: session.run(16))
            named = set()
            for _ in range(3):
                with pytest.raises(RankFailed) as failure:
                    engine.submit_step([(1, 1)])
                named.add(str(failure.value))
            assert len(named) == 1

    with leaving_nothing(rank_model()):
        within(SECONDS, fail)
        within(SECONDS, lambda: require_health(4))


@pytest.mark.parametrize("ranks", [(0, 1), (2, 3), (0, 1, 2, 3)])
def test_several_ranks_that_fail_at_load(ranks: tuple[int, ...]) -> None:
    def load() -> None:
        with failing_ranks("load", *ranks), pytest.raises(InternalFailure, match=r"rank \d of 4 failed"):
            open_ranks(4)

    with leaving_nothing(rank_model()):
        within(SECONDS, load)
        within(SECONDS, lambda: require_health(4))


def test_a_fault_of_the_only_rank_fails_its_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank waits for no other, so the engine goes on."""
    with open_ranks(1) as engine:
        ask_for_fault(monkeypatch, "step", 0, 1)
        session = Session(engine)
        session.add(ASKS[0])
        with pytest.raises(InternalFailure, match="the fault that"):
            session.run()
        assert answer_all(engine, ASKS) == answers_of(rank_model(), ASKS)


def test_an_engine_with_a_failed_rank_is_freed_with_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        engine = open_ranks(2)
        ask_for_fault(monkeypatch, "collective", 1, 2)
        session = Session(engine)
        request_id = session.add(ASKS[0])
        session.submit([(request_id, 8)])
        engine.close()

    with leaving_nothing(rank_model()):
        within(SECONDS, fail)


def test_a_fault_of_no_known_form_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLINT_FAULT", "sometime:1")
    with pytest.raises(InvalidArgument, match=r"GLINT_FAULT is 'sometime:1', expected load\|step\|collective"):
        within(SECONDS, lambda: open_ranks(2))


def test_only_the_test_library_fails_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for_fault(monkeypatch, "load", 0, 1)
    with open_engine(rank_model(), num_ranks=2, row_slices=2, **OPTIONS) as engine:
        assert answer_all(engine, ASKS[:1]) == answers_of(rank_model(), ASKS[:1], row_slices=2)


def test_what_counts_threads_and_files_sees_an_engine() -> None:
    threads = count_threads()
    with open_ranks(4):
        assert count_threads() == threads + 4
        assert is_mapped(rank_model())
