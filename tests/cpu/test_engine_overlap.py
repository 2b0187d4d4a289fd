"""Steps that overlap: two in flight, nothing past the end, and whatever ends meanwhile is dropped without a trace."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from glint.engine.engine import Engine
from glint.engine.request import StepOutput
from glint.native import abi
from glint.native.library import InvalidArgument, NativeEngine
from tests.cpu.whole_engine import alone, assert_idle, gather, greedy, make_engine, prompt_of, run

pytestmark = [pytest.mark.sanitize, pytest.mark.threads]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_engine() as opened:
        yield opened


def test_the_next_step_is_submitted_before_the_last_is_collected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    original = NativeEngine.collect_step

    def watch(native: NativeEngine, ticket: abi.Ticket) -> Any:
        depths.append(native.stats().steps_in_flight)
        return original(native, ticket)

    monkeypatch.setattr(NativeEngine, "collect_step", watch)
    (request_id,) = engine.submit(prompt_of(1, 20), greedy(6))
    for _ in range(5):
        assert len(engine.step()) == 1
        assert engine.stats().steps_in_flight == 1
    (last,) = engine.step()
    assert (last.request_id, last.finish_reason) == (request_id, "length")
    assert depths == [2] * 5 + [1]
    assert_idle(engine)


def test_no_row_is_computed_past_a_known_end(engine: Engine) -> None:
    asks = [(prompt_of(seed, 5 + seed), 3 + seed % 4) for seed in range(9)]
    ids = [engine.submit(prompt, greedy(count))[0] for prompt, count in asks]
    assert run(engine, *ids) == [alone(prompt, count) for prompt, count in asks]
    stats = engine.stats()
    assert stats.tokens_computed == sum(len(prompt) + count - 1 for prompt, count in asks)
    assert stats.tokens_sampled == sum(count for _, count in asks)


@pytest.mark.parametrize("seed", range(6))
def test_any_life_gives_the_answers_of_requests_alone(seed: int) -> None:
    source = random.Random(seed)
    options = {
        "max_step_tokens": source.choice((9, 24, 200)),
        "max_num_seqs": source.choice((3, 8)),
        "num_pages": source.choice((8, 14, 60)),
        "max_model_len": 56,
    }
    with make_engine(**options) as engine:
        expected: dict[int, list[int]] = {}
        outputs: dict[int, list[StepOutput]] = {}
        aborted: set[int] = set()
        for _ in range(120):
            if source.random() < 0.3:
                prompt, count = prompt_of(source.randrange(8), source.choice((3, 17, 40))), source.randint(1, 14)
                free_run = alone(prompt, count)
                stop = source.choice(free_run) if source.random() < 0.5 else None
                params = greedy(count, stop_token_ids=[] if stop is None else [stop])
                (request_id,) = engine.submit(prompt, params)
                expected[request_id] = free_run if stop is None else free_run[: free_run.index(stop) + 1]
            if expected.keys() - aborted and source.random() < 0.05:
                chosen = source.choice(sorted(expected.keys() - aborted))
                aborted.add(chosen)
                engine.abort(chosen)
            for output in engine.step():
                assert output.request_id not in aborted
                outputs.setdefault(output.request_id, []).append(output)
            stats = engine.stats()
            assert stats.steps_in_flight <= 1
            assert stats.pages_free + stats.pages_held + stats.pages_cached == stats.num_pages
            engine.check()
        gather(engine, outputs)
        for request_id in expected.keys() - aborted:
            assert [t for output in outputs[request_id] for t in output.token_ids] == expected[request_id]
        assert_idle(engine)


def test_preemption_waits_for_the_steps_in_flight() -> None:
    asks = [(prompt_of(seed, 16), 40) for seed in range(3)]
    with make_engine(num_pages=9, max_model_len=60) as engine:
        ids = [engine.submit(prompt, greedy(count))[0] for prompt, count in asks]
        assert run(engine, *ids) == [alone(prompt, count) for prompt, count in asks]
        assert engine.num_preemptions > 0
        assert_idle(engine)


def test_an_abort_drops_what_is_in_flight_and_harms_no_other(engine: Engine) -> None:
    first, second, third = (engine.submit(prompt_of(seed, 12), greedy(10))[0] for seed in range(3))
    outputs: dict[int, list[StepOutput]] = {}
    for _ in range(3):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    before = len(outputs[second])
    engine.abort(second)
    engine.abort(second)
    gather(engine, outputs)
    assert len(outputs[second]) == before
    for request_id, seed in ((first, 0), (third, 2)):
        assert [t for output in outputs[request_id] for t in output.token_ids] == alone(prompt_of(seed, 12), 10)
    assert_idle(engine)


def test_with_the_last_request_the_step_in_flight_ends(engine: Engine) -> None:
    (request_id,) = engine.submit(prompt_of(1, 30), greedy(30))
    engine.step()
    assert engine.stats().steps_in_flight == 1
    engine.abort(request_id)
    assert_idle(engine)
    assert engine.step() == []


def test_requests_that_come_and_stop_all_the_time_find_a_place() -> None:
    prompt = prompt_of(3, 9)
    free_run = alone(prompt, 12)
    stop = next(token for token in free_run[2:] if token not in free_run[:2])
    expected = free_run[: free_run.index(stop) + 1]
    with make_engine(max_num_seqs=2, max_requests=2) as engine:
        ids = [engine.submit(prompt, greedy(12, stop_token_ids=[stop]))[0] for _ in range(20)]
        assert run(engine, *ids) == [expected] * 20
        assert_idle(engine)


@pytest.mark.parametrize("steps_before", [0, 1, 4])
@pytest.mark.parametrize("moment", ["submit_step", "sample_step", "collect_step"])
@pytest.mark.parametrize("is_before", [True, False])
def test_an_interrupt_with_two_steps_in_flight_leaves_the_engine_usable(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, moment: str, is_before: bool, steps_before: int
) -> None:
    original = getattr(NativeEngine, moment)

    def interrupted(*arguments: Any) -> None:
        if not is_before:
            original(*arguments)
        raise KeyboardInterrupt

    for seed in range(3):
        engine.submit(prompt_of(seed, 20), greedy(9))
    for _ in range(steps_before):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert_idle(engine)
    (request_id,) = engine.submit(prompt_of(1, 20), greedy(9))
    assert run(engine, request_id) == [alone(prompt_of(1, 20), 9)]


def test_a_request_that_the_library_refuses_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = NativeEngine.add_request

    def refuse_long(native: NativeEngine, request: abi.Request) -> int:
        if request.prompt_count == 33:
            raise InvalidArgument("glint_add_request: refused for the test")
        return original(native, request)

    monkeypatch.setattr(NativeEngine, "add_request", refuse_long)
    (healthy,) = engine.submit(prompt_of(1, 20), greedy(9))
    engine.step()
    (refused,) = engine.submit(prompt_of(2, 33), greedy(9))
    outputs = gather(engine, {healthy: []})
    (failed,) = outputs[refused]
    assert (failed.finish_reason, failed.token_ids) == ("failed", ())
    assert "refused for the test" in failed.failure
    assert outputs[healthy][-1].finish_reason == "length"
    assert_idle(engine)


def test_the_summaries_add_up_to_the_counters(engine: Engine) -> None:
    prefix = prompt_of(1, 24)
    ids: list[int] = []
    summaries = []
    begun = time.perf_counter()
    for seed in range(4):
        ids += engine.submit(prefix + prompt_of(seed, 5), greedy(6, n=2, temperature=1.0))
        while engine.num_waiting:
            engine.step()
            summaries.append(engine.last_step)
    while engine.has_work:
        engine.step()
        summaries.append(engine.last_step)
    assert sum(summary.seconds for summary in summaries) <= time.perf_counter() - begun
    stats = engine.stats()
    assert [summary.serial for summary in summaries] == list(range(1, stats.steps_done + 1))
    assert sum(summary.num_tokens for summary in summaries) == stats.tokens_computed
    assert sum(summary.new_tokens for summary in summaries) == stats.tokens_sampled == 6 * len(ids)
    assert sum(summary.prefix_tokens_hit for summary in summaries) == stats.tokens_cached == 7 * len(prefix)
    assert sum(summary.prefix_tokens_queried for summary in summaries) == len(ids) * (len(prefix) + 5)
    assert sorted(request_id for summary in summaries for request_id in summary.started_ids) == ids
    assert all(summary.seconds > 0 and summary.num_items > 0 for summary in summaries)
    assert all(s.pages_free + s.pages_held + s.pages_cached == stats.num_pages for s in summaries)
    assert summaries[-1].pages_held == 0
    assert engine.step() == []
    assert (engine.last_step.serial, engine.last_step.num_items) == (summaries[-1].serial, 0)


def test_running_and_waiting_are_counted() -> None:
    with make_engine(max_num_seqs=2) as engine:
        for seed in range(5):
            engine.submit(prompt_of(seed, 4), greedy(5))
        assert (engine.num_running, engine.num_waiting) == (0, 5)
        engine.step()
        assert (engine.num_running, engine.num_waiting) == (2, 3)
        gather(engine, {})
        assert_idle(engine)
