"""The determinism contract at several ranks: an answer is bitwise the same whatever else the engine does.

Every test compares with a fresh engine of one rank and one thread with the same `row_slices` that runs the request
alone, prompt in one piece.
"""

import ctypes
import random
from functools import cache

import pytest

from glint.native import abi
from glint.native.library import NativeEngine
from tests.cpu.random_asks import mixed_asks, random_prompt, seeded
from tests.cpu.rank_engine import (
    LAYOUTS,
    ROW_SLICES,
    SHARDING,
    answers_of,
    deferring_engine,
    open_testing_engine,
    rank_asks,
    rank_model,
)
from tests.cpu.small_engine import Answer, Ask, Session, answer_all, make_ask, open_engine, run_at_random
from tests.cpu.sweeps import slow
from tests.cpu.testing_library import declare

pytestmark = pytest.mark.sanitize

PAGE_TOKENS = 8
RankPath = tuple[int, str, str]
PATHS: list[RankPath] = [
    (2, "tp", "auto"),
    (4, "tp", "sharded"),
    (4, "ep", "auto"),
    (8, "ep", "sharded"),
    (8, "tp", "replicated"),
]
ALWAYS = ((2, "tp", "auto"), (8, "ep", "sharded"))
every_path = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id="-".join(map(str, path)), marks=() if path in ALWAYS else pytest.mark.slow)
        for path in PATHS
    ],
)


def options_of(path: RankPath) -> dict[str, int]:
    """The options of an engine on this path."""
    num_ranks, layout, sharding = path
    return {
        "num_ranks": num_ranks,
        "row_slices": ROW_SLICES,
        "expert_layout": LAYOUTS[layout],
        "sequence_parallel": SHARDING[sharding],
    }


def engine_for(path: RankPath, **changes: int) -> NativeEngine:
    """An engine on this path."""
    return open_engine(rank_model(), **(options_of(path) | changes))


@cache
def _alone(ask: Ask, layout: str) -> Answer:
    (answer,) = answers_of(rank_model(), [ask], row_slices=ROW_SLICES, expert_layout=LAYOUTS[layout])
    return answer


def alone(asks: list[Ask], path: RankPath) -> list[Answer]:
    """What one rank answers to each request alone."""
    return [_alone(ask, path[1]) for ask in asks]


@every_path
def test_alone_equals_in_a_batch_of_64(path: RankPath) -> None:
    wanted = rank_asks(64, seed=0)
    with engine_for(path) as engine:
        assert answer_all(engine, wanted) == alone(wanted, path)


@every_path
@pytest.mark.parametrize("chunk", [1, 31, *slow(3, 8, 32, 33)])
def test_chunk_size_changes_nothing(path: RankPath, chunk: int) -> None:
    wanted = [make_ask(random_prompt(2, 65), 4), make_ask(random_prompt(3, 32), 4, **seeded(1))]
    with engine_for(path) as engine:
        assert answer_all(engine, wanted, chunk) == alone(wanted, path)


@every_path
def test_order_of_the_items_changes_nothing(path: RankPath) -> None:
    wanted = rank_asks(7, seed=5)
    for order in ([*reversed(range(7))], [3, 0, 1, 6, 2, 5, 4]):
        with engine_for(path) as engine:
            shuffled = [wanted[index] for index in order]
            assert answer_all(engine, shuffled) == alone(shuffled, path)


@pytest.mark.threads
@every_path
@pytest.mark.parametrize("num_threads", [1, 5, *slow(2, 19)])
def test_thread_count_changes_nothing(path: RankPath, num_threads: int) -> None:
    wanted = rank_asks(4, seed=6)
    with engine_for(path, num_threads=num_threads) as engine:
        assert answer_all(engine, wanted, chunk=11) == alone(wanted, path)


@every_path
def test_cached_prefix_changes_nothing(path: RankPath) -> None:
    prefix = random_prompt(7, 5 * PAGE_TOKENS)
    with engine_for(path) as engine:
        answer_all(engine, [make_ask(prefix + random_prompt(8, 5), 4)])
        for length in (1, 9, 40):
            ask = make_ask(prefix + random_prompt(20 + length, length), 5, **seeded(2))
            (answer,) = answer_all(engine, [ask])
            assert answer.cached_tokens == len(prefix)
            assert [answer] == alone([ask], path)


@every_path
@pytest.mark.parametrize("max_new_tokens", [8, 9, *slow(17)])
def test_previous_answer_sent_again_changes_nothing(path: RankPath, max_new_tokens: int) -> None:
    prompt = random_prompt(10, 2 * PAGE_TOKENS)
    with engine_for(path) as engine:
        (first,) = answer_all(engine, [make_ask(prompt, max_new_tokens)])
        longer = make_ask((*prompt, *first.tokens, *random_prompt(11, 3)), 6)
        (second,) = answer_all(engine, [longer])
    computed = len(prompt) + max_new_tokens - 1
    assert second.cached_tokens == computed // PAGE_TOKENS * PAGE_TOKENS
    assert [second] == alone([longer], path)


@pytest.mark.threads
@every_path
@pytest.mark.parametrize("keeps_cache", [True, False])
def test_preemption_changes_nothing(path: RankPath, keeps_cache: bool) -> None:
    wanted = make_ask(random_prompt(12, 27), 8, has_prompt_logprobs=1, num_prompt_logprobs=3, **seeded(3))
    other = make_ask(random_prompt(15, 7 * PAGE_TOKENS), 1)
    with engine_for(path, num_pages=8) as engine:
        session = Session(engine)
        request_id = session.add(wanted)
        for moment in range(100):
            if request_id not in session.running:
                break
            if moment % 3 == 2:
                engine.release_pages(request_id)
                if not keeps_cache:
                    answer_all(engine, [other])
            session.step([(request_id, 14)])
        assert [session.free(request_id)] == alone([wanted], path)
        assert engine.stats().tokens_computed > len(wanted.prompt) + wanted.max_new_tokens
        engine.check()


@pytest.mark.threads
@every_path
@pytest.mark.parametrize("chunk", [1, 9, 2048])
def test_deferred_results_change_nothing(path: RankPath, chunk: int) -> None:
    wanted = rank_asks(8, chunk)
    with deferring_engine(rank_model(), **options_of(path)) as engine:
        session = Session(engine)
        ids = [session.add(ask) for ask in wanted]
        session.run_overlapped(chunk)
        assert [session.free(request_id) for request_id in ids] == alone(wanted, path)
        engine.check()


@pytest.mark.threads
@every_path
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
@pytest.mark.parametrize("defers", [False, True], ids=["read", "deferred"])
def test_no_schedule_changes_an_answer(path: RankPath, seed: int, defers: bool) -> None:
    options = options_of(path) | {"num_pages": 128, "num_threads": seed + 1}
    opened = deferring_engine(rank_model(), **options) if defers else open_engine(rank_model(), **options)
    with opened as engine:
        session = Session(engine)
        owners = run_at_random(session, mixed_asks(7, seed), random.Random(seed))
        assert len(owners) == 7
        for request_id, ask in owners.items():
            assert [session.answers[request_id]] == alone([ask], path)
        engine.check()


@every_path
def test_slots_that_were_never_written_are_never_used(path: RankPath) -> None:
    wanted = rank_asks(6, seed=11)
    poison = declare("glint_testing_poison_rank_pages", ctypes.c_int32, ctypes.POINTER(abi.Engine))
    with open_testing_engine(rank_model(), **options_of(path)) as engine:
        assert poison(engine._engine) == abi.STATUS_OK
        assert answer_all(engine, wanted, chunk=5) == alone(wanted, path)


def test_by_default_an_answer_belongs_to_its_number_of_ranks() -> None:
    ask = make_ask(random_prompt(18, 30), 12)
    one, two, eight = (answers_of(rank_model(), [ask], num_ranks=count, row_slices=count) for count in (1, 2, 8))
    assert one[0].logprobs != two[0].logprobs != eight[0].logprobs
