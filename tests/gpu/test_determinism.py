"""The determinism contract on the GPU: tokens and log-probabilities are bitwise those of the request alone."""

import random
from collections.abc import Iterator
from ctypes import POINTER, byref, c_int32, c_int64
from dataclasses import dataclass
from typing import Any

import pytest

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from glint.native.library import NativeEngine
from tests.cpu.random_asks import seeded
from tests.cpu.small_engine import Ask, Session, answer_all, make_ask, run_at_random, small_model
from tests.cpu.testing_library import declare
from tests.gpu.cases import CaseStore
from tests.gpu.sessions import PAGE_TOKENS, Alone, kernels_of, open_cuda

SEEDED = seeded(77)
PATHS = [
    "small-fp8_channel-portable",
    "small-fp8_block-portable",
    "small-bf16-portable",
    "rank-fp8_channel-hopper",
    "rank-fp8_channel-portable",
    "rank-bf16-hopper",
    "rank-bf16-portable",
    "rank_air-fp8_channel-hopper",
    "rank_air-fp8_channel-portable",
    "rank_air_kv-fp8_channel-hopper",
    "rank_air_kv-fp8_channel-portable",
]


@dataclass(frozen=True)
class ComputePath:
    """A checkpoint, its kernels, and the answers of requests that run alone."""

    checkpoint: Checkpoint
    kernels: int
    vocab_size: int
    alone: Alone

    def engine(self, **changes: int) -> Any:
        """A fresh engine."""
        return open_cuda(self.checkpoint, kernels=self.kernels, **changes)

    def prompt(self, seed: int, length: int) -> tuple[int, ...]:
        """Random tokens."""
        source = random.Random(seed)
        return tuple(source.randrange(self.vocab_size) for _ in range(length))


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest, cases: CaseStore) -> Iterator[ComputePath]:
    """Each checkpoint and kernel set."""
    shape, weights, kernels = request.param.split("-")
    checkpoint = small_model(weights) if shape == "small" else open_checkpoint(cases.case((shape, weights)).folder)
    number = kernels_of(kernels)
    yield ComputePath(checkpoint, number, checkpoint.config.vocab_size, Alone(checkpoint, kernels=number))


def mixed_asks(path: ComputePath, count: int, longest: int = 90) -> list[Ask]:
    """Requests of many lengths, every second one sampled."""
    source = random.Random(count)
    return [
        make_ask(
            path.prompt(source.randrange(2**32), source.randint(1, longest)),
            source.randint(1, 12),
            **(seeded(index) if index % 2 else {}),
        )
        for index in range(count)
    ]


def test_alone_equals_in_a_batch_of_64(path: ComputePath) -> None:
    wanted = mixed_asks(path, 64)
    with path.engine() as engine:
        together = answer_all(engine, wanted)
        assert engine.stats().steps_replayed > 0
    assert together == [path.alone(ask) for ask in wanted]


@pytest.mark.parametrize("chunk", [1, 3, 7, 64, 65, 200])
def test_any_chunking_changes_nothing(path: ComputePath, chunk: int) -> None:
    wanted = [make_ask(path.prompt(2, 200), 5), make_ask(path.prompt(3, 133), 5, **SEEDED)]
    with path.engine() as engine:
        assert answer_all(engine, wanted, chunk) == [path.alone(ask) for ask in wanted]


def test_two_steps_in_flight_change_nothing(path: ComputePath) -> None:
    wanted = mixed_asks(path, 12)
    for chunk in (9, 2048):
        with path.engine() as engine:
            session = Session(engine)
            ids = [session.add(ask) for ask in wanted]
            session.run_overlapped(chunk)
            assert [session.free(request_id) for request_id in ids] == [path.alone(ask) for ask in wanted]


def test_cached_prefix_and_answers_sent_again_change_nothing(path: ComputePath) -> None:
    prompt = path.prompt(10, 2 * PAGE_TOKENS)
    with path.engine() as engine:
        session = Session(engine)
        first_id = session.add(make_ask(prompt, PAGE_TOKENS + 9))
        session.run_overlapped()
        first = session.free(first_id)
        assert first == path.alone(make_ask(prompt, PAGE_TOKENS + 9))
        longer = make_ask((*prompt, *first.tokens, *path.prompt(11, 3)), 6)
        (second,) = answer_all(engine, [longer])
    assert second.cached_tokens == 3 * PAGE_TOKENS
    assert second == path.alone(longer)


def test_preemption_changes_nothing(path: ComputePath) -> None:
    ask = make_ask(path.prompt(12, 150), 20, **SEEDED)
    with path.engine() as engine:
        session = Session(engine)
        request_id = session.add(ask)
        for moment in range(60):
            if request_id not in session.running:
                break
            if moment in (1, 3, 9):
                engine.release_pages(request_id)
                if moment != 3:
                    answer_all(
                        engine, [make_ask(path.prompt(100 + moment + other, 1777), 1) for other in range(8)], 400
                    )
            session.step([(request_id, 70)])
        assert session.answers[request_id] == path.alone(ask)


def test_long_context_crosses_attention_splits(path: ComputePath) -> None:
    ask = make_ask(path.prompt(19, 1060), 6)
    for chunks in ([1023, 2, 20], [600, 600], [1024, 8, 27]):
        with path.engine() as engine:
            session = Session(engine)
            request_id = session.add(ask)
            for chunk in chunks:
                session.step([(request_id, chunk)])
            session.run()
            assert session.free(request_id) == path.alone(ask)


def count_decode_tasks(engine: NativeEngine) -> int:
    """How many parts the attention of the last step's decodes was computed in; no step may be in flight."""
    count = c_int64()
    read = declare("glint_testing_decode_tasks", c_int32, POINTER(abi.Engine), POINTER(c_int64), device="cuda")
    assert read(engine._engine, byref(count)) == abi.STATUS_OK
    return count.value


def test_short_last_splits_of_many_requests_change_nothing(path: ComputePath) -> None:
    """In steps of more than 256 splits a last split of few tokens is computed with the split before it."""
    shared = path.prompt(23, 1024)
    wanted = [make_ask(shared + path.prompt(100 + index, 1 + index % 40), 5) for index in range(136)]
    tasks = []
    with path.engine(max_requests=136, max_step_items=136, num_pages=320) as engine:
        alone = [answer_all(engine, [ask])[0] for ask in wanted]
        assert count_decode_tasks(engine) == 2
        session = Session(engine)
        ids = [session.add(ask) for ask in wanted]
        while session.running:
            session.step([(request_id, 2048) for request_id in session.running])
            tasks.append(count_decode_tasks(engine))
        together = [session.free(request_id) for request_id in ids]
    assert together == alone
    assert all(answer.cached_tokens >= 1024 for answer in together)
    assert tasks[1:] == [len(wanted)] * 4


def test_prompt_logprobs_change_nothing_else(path: ComputePath) -> None:
    prompt = path.prompt(16, 100)
    wanted = make_ask(prompt, 6, has_prompt_logprobs=1, num_prompt_logprobs=20)
    whole = path.alone(wanted)
    assert whole.without_prompt_logprobs() == path.alone(make_ask(prompt, 6))
    assert sorted(whole.logprobs) == list(range(1, len(prompt) + 6))
    for chunk in (7, 64):
        with path.engine() as engine:
            assert answer_all(engine, [wanted, make_ask(prompt, 3, **SEEDED)], chunk)[0] == whole


def test_no_schedule_changes_an_answer(path: ComputePath) -> None:
    for seed in range(6):
        source = random.Random(seed)
        waiting = mixed_asks(path, 10 + seed)
        with path.engine(num_pages=64) as engine:
            session = Session(engine)
            owners = run_at_random(session, waiting, source)
            for request_id, ask in owners.items():
                assert session.answers[request_id] == path.alone(ask)
            engine.check()
