"""The determinism contract on the CPU: an answer is bitwise the same whatever else the engine does.

Every test compares tokens and log-probabilities with those of a fresh engine that runs the request alone, prompt in one
piece, on one thread. Equality of floats is exact everywhere.
"""

import ctypes
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glint.native import abi
from glint.native.library import load_library
from tests.cpu.random_asks import mixed_asks, random_prompt, seeded
from tests.cpu.small_engine import (
    VOCAB_SIZE,
    Answer,
    Ask,
    Session,
    answer_all,
    answer_alone,
    make_ask,
    open_engine,
    run_at_random,
    small_model,
)
from tests.cpu.sweeps import slow
from tests.cpu.testing_library import declare, load_testing_library
from tests.reference.checkpoints import Weights

ComputePath = tuple[Weights, int]
PATHS: list[ComputePath] = [
    (weights, kernels)
    for weights in ("fp8_channel", "bf16")
    for kernels in (abi.KERNELS_EXACT, abi.KERNELS_PLAIN, abi.KERNELS_AUTO)
]
NAMES = {abi.KERNELS_EXACT: "exact", abi.KERNELS_PLAIN: "plain", abi.KERNELS_AUTO: "auto"}
PAGE_TOKENS = 8
SEEDED = seeded(77)
ALWAYS = (("fp8_channel", abi.KERNELS_EXACT), ("fp8_channel", abi.KERNELS_AUTO), ("bf16", abi.KERNELS_PLAIN))
every_path = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=f"{path[0]}-{NAMES[path[1]]}", marks=() if path in ALWAYS else pytest.mark.slow)
        for path in PATHS
    ],
)


def properties(count: int) -> settings:
    """Hypothesis settings of the tests here: slow cases are fine, their number is bounded."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Requests of up to 41 prompt tokens and 10 new ones, greedy or sampled; many begin alike."""
    sampling: dict[str, Any] = {}
    if draw(st.booleans()):
        sampling = {
            "seed": draw(st.integers(0, 2**64 - 1)),
            "temperature": draw(st.floats(0.125, 2.0, width=32)),
            "top_p": draw(st.floats(0.125, 1.0, width=32)),
            "min_p": draw(st.sampled_from((0.0, 0.05))),
            "top_k": draw(st.sampled_from((0, 1, 20))),
            "repetition_penalty": draw(st.sampled_from((1.0, 1.3))),
            "frequency_penalty": draw(st.sampled_from((0.0, 0.5, -0.5))),
            "presence_penalty": draw(st.sampled_from((0.0, 1.0))),
        }
    shared = random_prompt(0, draw(st.sampled_from((0, 0, PAGE_TOKENS, 3 * PAGE_TOKENS + 1))))
    own = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=16))
    return make_ask((*shared, *own), draw(st.integers(1, 10)), **sampling)


def alone(ask: Ask, path: ComputePath) -> Answer:
    """The answer that every other way must equal."""
    weights, kernels = path
    return answer_alone(ask, weights, kernels=kernels)


def engine_for(path: ComputePath, **changes: int) -> Any:
    """An engine on the path's checkpoint with the path's kernels."""
    weights, kernels = path
    return open_engine(small_model(weights), kernels=kernels, **changes)


def run_in_chunks(session: Session, request_id: int, chunks: list[int]) -> None:
    """Advance a request by the given numbers of tokens, then to its end."""
    for chunk in chunks:
        if request_id in session.running:
            session.step([(request_id, chunk)])
    session.run()


@every_path
@properties(15)
@given(wanted=st.lists(asks(), min_size=1, max_size=6), source=st.randoms(use_true_random=False))
def test_no_schedule_changes_an_answer(path: ComputePath, wanted: list[Ask], source: random.Random) -> None:
    with engine_for(path) as engine:
        session = Session(engine)
        owners = run_at_random(session, list(wanted), source)
        for request_id, ask in owners.items():
            assert session.answers[request_id] == alone(ask, path)
        engine.check()


@every_path
def test_alone_equals_in_a_batch_of_64(path: ComputePath) -> None:
    wanted = mixed_asks(64)
    with engine_for(path) as engine:
        together = answer_all(engine, wanted)
    assert together == [alone(ask, path) for ask in wanted]


@every_path
def test_sampled_answers_are_not_the_greedy_ones(path: ComputePath) -> None:
    prompt = random_prompt(1, 20)
    assert alone(make_ask(prompt, 16, **SEEDED), path).tokens != alone(make_ask(prompt, 16), path).tokens
    other_seed = make_ask(prompt, 16, **(SEEDED | {"seed": 78}))
    assert alone(make_ask(prompt, 16, **SEEDED), path).tokens != alone(other_seed, path).tokens


@every_path
@pytest.mark.parametrize("chunk", [1, 7, 8, *slow(2, 3, 5, 13, 32)])
def test_chunk_size_changes_nothing(path: ComputePath, chunk: int) -> None:
    wanted = [make_ask(random_prompt(2, 33), 6), make_ask(random_prompt(3, 32), 6, **SEEDED)]
    with engine_for(path) as engine:
        assert answer_all(engine, wanted, chunk) == [alone(ask, path) for ask in wanted]


@every_path
@properties(10)
@given(ask=asks(), chunks=st.lists(st.integers(1, 40), max_size=12))
def test_any_split_of_the_prompt_changes_nothing(path: ComputePath, ask: Ask, chunks: list[int]) -> None:
    with engine_for(path) as engine:
        session = Session(engine)
        request_id = session.add(ask)
        run_in_chunks(session, request_id, chunks)
        assert session.answers[request_id] == alone(ask, path)


@every_path
@pytest.mark.parametrize("max_step_tokens", [1, 6, 8, 31])
def test_step_budget_changes_nothing(path: ComputePath, max_step_tokens: int) -> None:
    ask = make_ask(random_prompt(4, 31), 5)
    with engine_for(path, max_step_tokens=max_step_tokens, max_step_items=1) as engine:
        assert answer_all(engine, [ask], max_step_tokens) == [alone(ask, path)]


@every_path
@pytest.mark.threads
@pytest.mark.parametrize("num_threads", [2, 3])
def test_thread_count_changes_nothing(path: ComputePath, num_threads: int) -> None:
    wanted = [make_ask(random_prompt(5, 21), 3), make_ask(random_prompt(6, 9), 3, **SEEDED)]
    with engine_for(path, num_threads=num_threads) as engine:
        assert answer_all(engine, wanted) == [alone(ask, path) for ask in wanted]


@every_path
def test_cached_prefix_changes_nothing(path: ComputePath) -> None:
    prefix = random_prompt(7, 3 * PAGE_TOKENS)
    with engine_for(path) as engine:
        answer_all(engine, [make_ask(prefix + random_prompt(8, 5), 4)])
        for length in (1, 2, 9):
            ask = make_ask(prefix + random_prompt(9, length), 6, **SEEDED)
            (answer,) = answer_all(engine, [ask])
            assert answer.cached_tokens == len(prefix)
            assert answer == alone(ask, path)


@every_path
@pytest.mark.parametrize("max_new_tokens", [7, 8, 9, 16])
def test_previous_answer_sent_again_changes_nothing(path: ComputePath, max_new_tokens: int) -> None:
    prompt = random_prompt(10, 2 * PAGE_TOKENS)
    with engine_for(path) as engine:
        (first,) = answer_all(engine, [make_ask(prompt, max_new_tokens)])
        longer = make_ask((*prompt, *first.tokens, *random_prompt(11, 3)), 6)
        (second,) = answer_all(engine, [longer])
    computed = len(prompt) + max_new_tokens - 1
    assert second.cached_tokens == computed // PAGE_TOKENS * PAGE_TOKENS
    assert second == alone(longer, path)


@every_path
@pytest.mark.parametrize("max_new_tokens", [7, 8, 9, 16])
def test_answer_of_overlapped_steps_sent_again_changes_nothing(path: ComputePath, max_new_tokens: int) -> None:
    prompt = random_prompt(12, 2 * PAGE_TOKENS)
    with engine_for(path) as engine:
        session = Session(engine)
        first_id = session.add(make_ask(prompt, max_new_tokens))
        session.run_overlapped()
        first = session.free(first_id)
        longer = make_ask((*prompt, *first.tokens, *random_prompt(13, 3)), 6)
        (second,) = answer_all(engine, [longer])
    computed = len(prompt) + max_new_tokens - 1
    assert first == alone(make_ask(prompt, max_new_tokens), path)
    assert second == alone(longer, path)
    assert second.cached_tokens == computed // PAGE_TOKENS * PAGE_TOKENS


@every_path
@pytest.mark.parametrize("chunk", [1, 9, 64])
def test_two_steps_in_flight_change_nothing(path: ComputePath, chunk: int) -> None:
    wanted = mixed_asks(6, seed=3)
    with engine_for(path) as engine:
        session = Session(engine)
        ids = [session.add(ask) for ask in wanted]
        session.run_overlapped(chunk)
        assert [session.free(request_id) for request_id in ids] == [alone(ask, path) for ask in wanted]


@every_path
def test_stop_in_the_first_of_two_steps_changes_nothing(path: ComputePath) -> None:
    prompt = random_prompt(14, 13)
    free_run = alone(make_ask(prompt, 12), path).tokens
    ask = Ask(prompt, 12, stop_tokens=(free_run[4],), stop_sequences=(tuple(free_run[2:4]),))
    with engine_for(path) as engine:
        session = Session(engine)
        request_id = session.add(ask)
        session.run_overlapped()
        answer = session.free(request_id)
    assert answer == alone(ask, path)
    assert answer.finish_reason == abi.FINISH_STOP
    assert len(answer.tokens) < len(free_run)


def test_a_stop_sequence_is_looked_for_in_generated_tokens_only() -> None:
    prompt = random_prompt(14, 13)
    free_run = answer_alone(make_ask(prompt, 12)).tokens
    across = (prompt[-1], free_run[0])
    answer = answer_alone(Ask(prompt, 12, stop_sequences=(across,)))
    assert across not in pairwise(free_run)
    assert (answer.tokens, answer.finish_reason) == (free_run, abi.FINISH_LENGTH)
    stopped = answer_alone(Ask(prompt, 12, stop_sequences=(across, tuple(free_run[:2]))))
    assert (stopped.tokens, stopped.finish_reason) == (free_run[:2], abi.FINISH_STOP)


@every_path
@properties(8)
@given(ask=asks(), moments=st.sets(st.integers(0, 20), max_size=8), keeps_cache=st.booleans())
def test_preemption_changes_nothing(path: ComputePath, ask: Ask, moments: set[int], keeps_cache: bool) -> None:
    with engine_for(path, num_pages=8) as engine:
        session = Session(engine)
        request_id = session.add(ask)
        other = make_ask(random_prompt(15, 7 * PAGE_TOKENS), 1)
        for moment in range(200):
            if request_id not in session.running:
                break
            if moment in moments:
                engine.release_pages(request_id)
                if not keeps_cache:
                    answer_all(engine, [other])
            session.step([(request_id, 5)])
        assert session.answers[request_id] == alone(ask, path)


@every_path
def test_prompt_logprobs_change_nothing_else(path: ComputePath) -> None:
    prompt = random_prompt(16, 27)
    wanted = make_ask(prompt, 6, has_prompt_logprobs=1, num_prompt_logprobs=20)
    whole = alone(wanted, path)
    assert whole.without_prompt_logprobs() == alone(make_ask(prompt, 6), path)
    assert sorted(whole.logprobs) == list(range(1, len(prompt) + 6))
    for chunk in (1, 4, 16):
        with engine_for(path, max_step_items=4) as engine:
            assert answer_all(engine, [wanted, make_ask(prompt, 3, **SEEDED)], chunk)[0] == whole


@every_path
def test_preempted_prompt_logprobs_come_once(path: ComputePath) -> None:
    wanted = make_ask(random_prompt(17, 27), 4, has_prompt_logprobs=1, num_prompt_logprobs=3)
    with engine_for(path) as engine:
        session = Session(engine)
        request_id = session.add(wanted)
        for chunk in (10, 25, 30):
            session.step([(request_id, chunk)])
            engine.release_pages(request_id)
        session.run()
        assert session.answers[request_id] == alone(wanted, path)


@every_path
def test_order_of_the_items_changes_nothing(path: ComputePath) -> None:
    wanted = mixed_asks(8, seed=5)
    for order in ([*range(8)], [*reversed(range(8))], [3, 0, 7, 1, 6, 2, 5, 4]):
        with engine_for(path) as engine:
            answers = answer_all(engine, [wanted[index] for index in order])
        assert answers == [alone(wanted[index], path) for index in order]


@every_path
@pytest.mark.parametrize("expert_layout", [abi.EXPERT_LAYOUT_TP, abi.EXPERT_LAYOUT_EP], ids=["tp", "ep"])
@pytest.mark.parametrize("row_slices", [4, *slow(1, 2)])
def test_sliced_rows_keep_the_contract(path: ComputePath, row_slices: int, expert_layout: int) -> None:
    weights, kernels = path
    changes = {"kernels": kernels, "row_slices": row_slices, "expert_layout": expert_layout}
    wanted = mixed_asks(4, seed=8)
    expected = [answer_alone(ask, weights, **changes) for ask in wanted]
    with open_engine(small_model(weights), num_threads=2, **changes) as engine:
        assert answer_all(engine, wanted, chunk=7) == expected
        assert answer_all(engine, wanted) == expected


@pytest.mark.parametrize("weights", ["fp8_channel", "bf16"])
def test_row_slices_are_part_of_the_arithmetic(weights: Weights) -> None:
    ask = make_ask(random_prompt(18, 30), 12)
    whole, sliced = (answer_alone(ask, weights, row_slices=row_slices) for row_slices in (1, 4))
    assert whole.logprobs != sliced.logprobs


@every_path
def test_long_context_crosses_attention_splits(path: ComputePath) -> None:
    ask = make_ask(random_prompt(19, 1060), 4)
    expected = alone(ask, path)
    for chunks in ([1023, 2, 20], [600, 600], [1024, 8, 27]):
        with engine_for(path) as engine:
            session = Session(engine)
            request_id = session.add(ask)
            run_in_chunks(session, request_id, chunks)
            assert session.free(request_id) == expected
            again = session.add(ask)
            session.run_overlapped()
            assert session.answers[again] == expected
            assert session.answers[again].cached_tokens == 1056


@every_path
def test_page_size_changes_nothing(path: ComputePath) -> None:
    ask = make_ask(random_prompt(20, 45), 6)
    for page_tokens in (1, 2, 16, 64, 1024):
        with engine_for(path, page_tokens=page_tokens, num_pages=128) as engine:
            assert answer_all(engine, [ask], chunk=11) == [alone(ask, path)]


@every_path
@pytest.mark.parametrize("page_tokens", [1, 8, 64])
def test_slots_that_were_never_written_are_never_used(path: ComputePath, page_tokens: int) -> None:
    weights, kernels = path
    wanted = mixed_asks(6, seed=11)
    library = load_library(Path(load_testing_library()._name))
    poison = declare("glint_testing_poison_pages", ctypes.c_int32, ctypes.POINTER(abi.Engine))
    with open_engine(small_model(weights), library, kernels=kernels, page_tokens=page_tokens) as engine:
        assert poison(engine._engine) == 0
        assert answer_all(engine, wanted, chunk=5) == [alone(ask, path) for ask in wanted]
