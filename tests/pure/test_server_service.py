"""The engine on its own thread: what is submitted, cancelled and delivered, and an engine that breaks down."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from glint.engine.request import StepOutput
from glint.engine.reuse import Reuse
from glint.engine.share import Share
from glint.engine.step_loop import StepSummary
from glint.errors import EngineError, RankFailed, RequestError
from glint.sampling import SamplingParams
from glint.server import service as service_module
from glint.server.http.problems import Problem
from glint.server.service import EngineRequest, EngineService, OutputStream


class Counting:
    """An engine by its interface alone: every request counts up from its first prompt token, one token a step.

    `gate` holds steps back while it is not set. A prompt of token 13 is refused; token 66 breaks the engine, token 77
    one of its ranks.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.running: dict[int, tuple[int, int]] = {}
        self.aborted: list[int] = []
        self.submitted: list[tuple[Any, ...]] = []
        self.is_held = False
        self.is_closed = False
        self.num_steps = 0
        self.last_step: StepSummary | None = None
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def submit(self, tokens: Any, params: SamplingParams, *others: Any) -> list[int]:
        if tokens[0] == 13:
            raise RequestError("prompt holds token 13", "prompt")
        self.submitted.append((tokens, params, *others))
        ids = list(range(self._next_id, self._next_id + params.n))
        self._next_id += params.n
        assert params.max_tokens is not None
        self.running |= dict.fromkeys(ids, (tokens[0], params.max_tokens))
        return ids

    def abort(self, request_id: int) -> None:
        if self.running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def step(self) -> list[StepOutput]:
        self.is_held = not self.gate.is_set()
        self.gate.wait(10)
        self.num_steps += 1
        outputs = []
        started = tuple(request_id for request_id in self.running)
        for request_id, (token, left) in list(self.running.items()):
            if token == 66:
                raise RuntimeError("broken at /a/secret/place")
            if token == 77:
                raise RankFailed("rank 2 of 4 failed: a link is down; the ranks cannot go on without it")
            reason = "length" if left == 1 else None
            self.running[request_id] = (token + 1, left - 1)
            if reason is not None:
                del self.running[request_id]
            outputs.append(StepOutput(request_id, str(token), (token,), None, None, 0, reason, None))
        self.last_step = StepSummary(0, pages_free=0, pages_held=0, pages_cached=0, started_ids=started)
        time.sleep(0.001)
        return outputs

    def close(self) -> None:
        self.is_closed = True


class Running:
    """A service on a counting engine, and what it reports."""

    def __init__(self) -> None:
        self.engine = Counting()
        self.failures: list[str] = []
        self.gaps: list[float] = []
        self.service = EngineService(self.engine, lambda summary, outputs, gaps: self.gaps.extend(gaps), self._fail)

    def _fail(self, failure: str) -> None:
        self.failures.append(failure)

    async def submit(self, *first_tokens: int, count: int = 4, n: int = 1) -> OutputStream:
        """Submit a prompt for each first token."""
        params = SamplingParams(max_tokens=count, n=n)
        return await self.service.submit([EngineRequest((token,), params) for token in first_tokens])


def run(test: Callable[[Running], Coroutine[Any, Any, None]]) -> Running:
    """Run a test on a started service and close it."""
    made = Running()

    async def whole() -> None:
        await made.service.start()
        try:
            await asyncio.wait_for(test(made), 20)
        finally:
            await made.service.close()

    asyncio.run(whole())
    assert made.engine.is_closed
    return made


async def read(stream: OutputStream) -> dict[int, list[int]]:
    """All tokens of a stream by choice."""
    gathered: dict[int, list[int]] = {index: [] for index in stream.choices.values()}
    ended = 0
    while ended < len(gathered):
        for output in await stream.take():
            gathered[stream.choices[output.request_id]] += output.token_ids
            ended += output.finish_reason is not None
    return gathered


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    while not condition():
        await asyncio.sleep(0.001)


def test_the_engine_gets_every_field_of_a_request() -> None:
    fields = ((1, 2), SamplingParams(max_tokens=1), 5, None, 7, Share("owner"), Reuse(2, 9), True)

    async def test(made: Running) -> None:
        await read(await made.service.submit([EngineRequest(*fields)]))

    assert run(test).engine.submitted[1:] == [fields]


def test_choices_of_several_prompts_are_numbered_through() -> None:
    async def test(made: Running) -> None:
        stream = await made.submit(100, 200, n=2)
        assert await read(stream) == {
            0: [100, 101, 102, 103],
            1: [100, 101, 102, 103],
            2: [200, 201, 202, 203],
            3: [200, 201, 202, 203],
        }
        assert made.service.num_open_choices == 0 and not stream.open_ids
        assert stream.first_step_at is not None and stream.first_token_at is not None
        assert stream.last_token_at is not None and stream.last_token_at > stream.first_token_at

    made = run(test)
    assert len(made.gaps) == 4 * 3 + 3


def test_many_answers_at_once_lose_nothing() -> None:
    async def test(made: Running) -> None:
        streams = await asyncio.gather(*(made.submit(100 * index, count=20) for index in range(1, 40)))
        for index, tokens in enumerate(await asyncio.gather(*(read(stream) for stream in streams)), start=1):
            assert tokens == {0: list(range(100 * index, 100 * index + 20))}

    run(test)


def test_an_event_loop_that_is_behind_slows_the_engine_down() -> None:
    async def test(made: Running) -> None:
        stream = await made.submit(100, count=10**6)
        await stream.take()
        before = made.engine.num_steps
        time.sleep(0.2)
        assert made.engine.num_steps <= before + 2
        await until(lambda: made.engine.num_steps > before + 20)
        assert len(await stream.take()) >= 20
        made.service.cancel(stream)

    run(test)


def test_a_refused_prompt_takes_the_others_of_its_request_along() -> None:
    async def test(made: Running) -> None:
        with pytest.raises(RequestError, match="token 13"):
            await made.submit(100, 13, count=1000)
        await until(lambda: not made.engine.running)
        assert made.service.num_open_choices == 0 and len(made.engine.aborted) == 1
        assert await read(await made.submit(5, count=2)) == {0: [5, 6]}

    run(test)


def test_cancelling_ends_it_in_the_engine() -> None:
    async def test(made: Running) -> None:
        stream = await made.submit(100, 200, count=10**6)
        await stream.take()
        made.service.cancel(stream)
        stream.end(Problem(499, "gone", code="client_left"))
        with pytest.raises(Problem, match="gone"):
            await stream.take()
        await until(lambda: not made.engine.running)
        assert len(made.engine.aborted) == 2 and made.service.num_open_choices == 0
        made.service.cancel(stream)

    run(test)


def test_a_submitter_that_goes_away_leaves_nothing_behind() -> None:
    async def test(made: Running) -> None:
        made.engine.gate.clear()
        blocker = await made.submit(1, count=3)
        await until(lambda: made.engine.is_held)
        task = asyncio.create_task(made.submit(100, count=10**6))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        made.engine.gate.set()
        await read(blocker)
        await until(lambda: not made.engine.running)
        assert made.service.num_open_choices == 0

    run(test)


@pytest.mark.parametrize(
    ("token", "failure"),
    [
        (66, "the engine failed"),
        (77, "the engine failed: rank 2 of 4 failed: a link is down; the ranks cannot go on without it"),
    ],
)
def test_a_broken_engine_ends_every_answer(token: int, failure: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test(made: Running) -> None:
        healthy = await made.submit(100, count=10**6)
        broken = await made.submit(token)
        for stream in (healthy, broken):
            with pytest.raises(Problem) as ended:
                while True:
                    await stream.take()
            assert (ended.value.status, ended.value.code) == (500, "engine_failed")
            assert ended.value.message == f"{failure}; the server ends, send the request again once it is back"
        await until(lambda: bool(made.failures))
        assert made.service.is_failed
        with pytest.raises(Problem, match=failure) as refused:
            await made.submit(1)
        assert (refused.value.status, refused.value.code) == (503, "engine_failed")

    made = run(test)
    assert made.failures == [failure]
    (record,) = (record for record in caplog.records if "every request in flight ends" in record.message)
    assert bool(record.exc_info) == (token == 66)


def test_a_request_that_is_being_queued_when_the_engine_breaks_is_told() -> None:
    async def test(made: Running) -> None:
        made.engine.gate.clear()
        await made.submit(77)
        await until(lambda: made.engine.is_held)
        queued = asyncio.create_task(made.submit(1))
        await asyncio.sleep(0.02)
        made.engine.gate.set()
        with pytest.raises(Problem, match="rank 2 of 4 failed") as ended:
            await queued
        assert ended.value.code == "engine_failed"

    run(test)


def test_closing_ends_what_runs() -> None:
    async def test(made: Running) -> None:
        stream = await made.submit(100, count=10**6)
        await made.service.close()
        with pytest.raises(Problem) as ended:
            while True:
                await stream.take()
        assert ended.value.code == "shutting_down"
        with pytest.raises(Problem):
            await made.submit(1)

    run(test)


def test_a_stall_shows_only_while_there_is_work() -> None:
    async def test(made: Running) -> None:
        await asyncio.sleep(0.05)
        assert made.service.stalled_seconds() == 0
        made.engine.gate.clear()
        stream = await made.submit(100, count=2)
        await asyncio.sleep(0.1)
        assert made.service.stalled_seconds() > 0.05
        made.engine.gate.set()
        await read(stream)
        await until(lambda: made.service.stalled_seconds() == 0)

    run(test)


def test_a_warm_up_that_fails_is_no_start() -> None:
    made = Running()

    def fail() -> list[StepOutput]:
        (request_id,) = made.engine.running
        made.engine.running.clear()
        made.engine.last_step = StepSummary(1, pages_free=0, pages_held=0, pages_cached=0)
        return [StepOutput(request_id, "", (), None, None, 0, "failed", "the logits held a NaN")]

    made.engine.step = fail

    async def start() -> None:
        with pytest.raises(EngineError, match="warm-up failed: the logits held a NaN"):
            await made.service.start()
        assert await made.service.close()

    asyncio.run(start())


def test_a_step_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STOP_SECONDS", 0.05)

    async def test(made: Running) -> None:
        made.engine.gate.clear()
        await made.submit(100)
        await until(lambda: made.engine.is_held)
        assert not await made.service.close()
        made.engine.gate.set()
        await until(lambda: made.engine.is_closed)

    run(test)


def test_steps_that_complete_nothing_are_no_progress() -> None:
    async def test(made: Running) -> None:
        made.engine.step = lambda: []
        await made.submit(100)
        await asyncio.sleep(0.1)
        assert made.service.stalled_seconds() > 0.05
        made.engine.running.clear()

    run(test)
