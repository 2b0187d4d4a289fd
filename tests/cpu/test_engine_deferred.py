"""Steps whose results are read only after the next one was launched, as on a GPU, on the CPU test library.

The runner then names tokens that are still being sampled by their place in the results of the step before. Every
answer must be bitwise that of a request alone on an engine that reads its results at once.
"""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glint.native.library import NativeEngine, load_library
from tests.cpu.random_asks import mixed_asks, random_prompt, seeded
from tests.cpu.small_engine import Ask, Session, answer_alone, make_ask, open_engine, run_at_random
from tests.cpu.testing_library import declare, load_testing_library

pytestmark = [pytest.mark.sanitize, pytest.mark.threads]


@contextmanager
def deferring(**changes: int) -> Iterator[NativeEngine]:
    """An engine of the test library that defers the results of its steps."""
    defer = declare("glint_testing_defer_results", None, ctypes.c_int32)
    defer(1)
    try:
        library = load_library(Path(load_testing_library()._name))
        with open_engine(None, library, **changes) as engine:
            yield engine
    finally:
        defer(0)


@pytest.mark.parametrize("chunk", [1, 9, 2048])
def test_overlapped_answers_are_those_of_requests_alone(chunk: int) -> None:
    wanted = mixed_asks(12, chunk)
    with deferring() as engine:
        session = Session(engine)
        ids = [session.add(ask) for ask in wanted]
        session.run_overlapped(chunk)
        assert [session.free(request_id) for request_id in ids] == [answer_alone(ask) for ask in wanted]
        engine.check()


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_changes_an_answer(seed: int) -> None:
    source = random.Random(seed)
    waiting = mixed_asks(8, seed)
    with deferring(num_pages=128) as engine:
        session = Session(engine)
        owners = run_at_random(session, waiting, source)
        for request_id, ask in owners.items():
            assert session.answers[request_id] == answer_alone(ask)
        engine.check()


def test_a_stop_in_the_first_of_two_steps_drops_what_the_second_made() -> None:
    prompt = random_prompt(14, 13)
    free_run = answer_alone(make_ask(prompt, 12)).tokens
    ask = Ask(prompt, 12, stop_tokens=(free_run[4],))
    with deferring() as engine:
        session = Session(engine)
        request_id = session.add(ask)
        session.run_overlapped()
        assert session.free(request_id) == answer_alone(ask)
        assert engine.stats().pages_held == 0


def test_prompt_logprobs_in_overlapped_steps() -> None:
    wanted = [
        make_ask(random_prompt(16, 27), 6, has_prompt_logprobs=1, num_prompt_logprobs=5),
        make_ask(random_prompt(17, 9), 12, **seeded(3)),
    ]
    with deferring(max_step_items=4) as engine:
        session = Session(engine)
        ids = [session.add(ask) for ask in wanted]
        session.run_overlapped(8)
        assert [session.free(request_id) for request_id in ids] == [answer_alone(ask) for ask in wanted]
