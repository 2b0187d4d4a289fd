"""The engine on a thread of its own, and its outputs on the event loop."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from glint.engine import Engine, StepSummary
from glint.errors import EngineError, GlintError, RankFailed
from glint.request import StepOutput
from glint.sampling import SamplingParams
from glint.scheduling.share import DEFAULT_SHARE, Share
from glint.server.http.problems import Problem
from glint.text.grammar import Grammar

log = logging.getLogger("glint.server")
WARM_UP_TOKENS = 4
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class EngineRequest:
    """What the engine needs of a request. `begins_after` is the token after which the grammar holds.

    `share` says whose request it is.
    """

    prompt_tokens: Sequence[int]
    params: SamplingParams
    cache_salt: int = 0
    grammar: Grammar | None = None
    begins_after: int | None = None
    share: Share = DEFAULT_SHARE


class OutputStream:
    """What comes out for one request, on the event loop.

    `choices` gives the index of each request id; `open_ids` are those that have not ended. Outputs wait here until
    they are taken, so a slow reader delays nobody. A stream ends with the last output of its last choice, or early by
    `end` with the problem that the reader is told.
    """

    def __init__(self, on_start: Callable[[int], None]) -> None:
        self.on_start = on_start
        self.choices: dict[int, int] = {}
        self.open_ids: set[int] = set()
        self.submitted_at = time.monotonic()
        self.first_step_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._last_at: dict[int, float] = {}
        self._arrived: list[StepOutput] = []
        self._problem: Problem | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_arrival: Callable[[], None] | None = None

    def start(self, request_id: int, now: float) -> None:
        """Take in that the first step of a choice began."""
        if self.first_step_at is None:
            self.first_step_at = now
        self.on_start(self.choices[request_id])

    def push(self, output: StepOutput, now: float) -> float | None:
        """Take in what a step brought; gives the time since the choice's output before, None for its first."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self._arrived.append(output)
        before = self._last_at.get(output.request_id)
        self._last_at[output.request_id] = now
        return None if before is None else now - before

    def end(self, problem: Problem) -> None:
        """Tell the reader that nothing more will come, and why."""
        if self._problem is None:
            self._problem = problem
            self.wake()

    async def take(self) -> list[StepOutput]:
        """Everything that has come since the last call, at least one output; raises the problem that ended it."""
        while not self._arrived and self._problem is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_now()

    def take_now(self) -> list[StepOutput]:
        """Everything that has come since the last call, perhaps nothing; raises the problem that ended it."""
        if self._problem is not None:
            raise self._problem
        arrived, self._arrived = self._arrived, []
        return arrived

    def listen(self, on_arrival: Callable[[], None] | None) -> None:
        """Call back on the spot whenever something is there to take, instead of waking who waits for it."""
        self._on_arrival = on_arrival
        if on_arrival is not None and (self._arrived or self._problem is not None):
            on_arrival()

    def wake(self) -> None:
        """Tell the reader that there is something to take."""
        if self._on_arrival is not None:
            self._on_arrival()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineService:
    """Runs an engine on its own thread; all methods are called on the event loop.

    Commands wait for the end of the step that is running. Each step's outputs reach the event loop in one call, and
    the next ones only when it has taken them in: an event loop that is behind slows the engine down, and never has more
    than one step to write between two looks at its sockets. An engine that fails ends every stream with a problem and
    calls `on_failure` with the reason; it is not used again.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepSummary, list[float]], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_failure = on_failure
        self._streams: dict[int, OutputStream] = {}
        self._queued: set[asyncio.Future[None]] = set()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_up = threading.Event()
        self._may_deliver = threading.Semaphore()
        self._is_closing = False
        self._failure: str | None = None
        self._busy_since: float | None = None
        self._last_step_at = time.monotonic()
        self._last_serial = 0
        self._cpu_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the engine's Python thread; the native threads are not in it."""
        return self._cpu_seconds

    @property
    def is_failed(self) -> bool:
        """Whether the engine broke down."""
        return self._failure is not None

    @property
    def num_open_choices(self) -> int:
        """Choices that have not ended."""
        return len(self._streams)

    def stalled_seconds(self) -> float:
        """How long there has been work without a completed step; 0 while idle."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else max(0.0, time.monotonic() - max(busy_since, self._last_step_at))

    async def start(self) -> None:
        """Start the thread and run a few real tokens through the engine, so that the first request finds it warm."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        stream = await self.submit([EngineRequest((0,) * WARM_UP_TOKENS, params)])
        is_over = False
        while not is_over:
            for output in await stream.take():
                if output.finish_reason == "failed":
                    raise EngineError(f"the warm-up failed: {output.failure}")
                is_over = output.finish_reason is not None

    async def submit(
        self, requests: Sequence[EngineRequest], on_start: Callable[[int], None] = lambda choice: None
    ) -> OutputStream:
        """Queue the prompts of a request, all or none; `on_start` is called for each choice whose first step has run.

        The choices of all prompts are numbered through. Raises `RequestError` where the engine refuses a prompt.
        """
        if self._failure is not None:
            raise engine_failed(503, self._failure)
        if self._is_closing:
            raise _shutting_down()
        stream = OutputStream(on_start)
        queued: asyncio.Future[None] = self._loop.create_future()
        self._queued.add(queued)
        queued.add_done_callback(self._queued.discard)
        self._command(lambda: self._submit(requests, stream, queued))
        await queued
        return stream

    def cancel(self, stream: OutputStream) -> None:
        """End what is left of a stream; the reader is told by whoever cancels."""
        ids, stream.open_ids = stream.open_ids, set()
        for request_id in ids:
            self._streams.pop(request_id, None)
        if ids:
            self._command(lambda: self._abort(ids))

    def end_streams(self) -> None:
        """Tell every request that the server ends; later ones are refused with the same words."""
        self._is_closing = True
        self._end_all(_shutting_down())

    async def close(self) -> bool:
        """End every stream, stop the thread and free the engine. False: its step does not end, so neither does it."""
        self.end_streams()
        self._wake_up.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        return not self._thread.is_alive()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake_up.set()

    def _submit(self, requests: Sequence[EngineRequest], stream: OutputStream, queued: "asyncio.Future[None]") -> None:
        """On the engine thread: hand the prompts over and let the event loop know the ids before any output."""
        ids: list[int] = []
        try:
            for request in requests:
                ids += self._engine.submit(
                    request.prompt_tokens,
                    request.params,
                    request.cache_salt,
                    request.grammar,
                    request.begins_after,
                    request.share,
                )
        except GlintError as problem:
            self._abort(ids)
            self._loop.call_soon_threadsafe(_refuse, queued, problem)
            return
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._loop.call_soon_threadsafe(self._register, ids, stream, queued)

    def _abort(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self._engine.abort(request_id)

    def _register(self, ids: list[int], stream: OutputStream, queued: "asyncio.Future[None]") -> None:
        """On the event loop: the ids of a stream; one whose submitter has gone meanwhile is ended."""
        stream.choices = {request_id: index for index, request_id in enumerate(ids)}
        stream.open_ids = set(ids)
        self._streams |= dict.fromkeys(ids, stream)
        if queued.done():
            self.cancel(stream)
        else:
            queued.set_result(None)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_commands()
                if self._engine.has_work:
                    self._step()
                else:
                    self._busy_since = None
                    self._wake_up.wait()
        except BaseException as problem:
            is_known = isinstance(problem, RankFailed)
            log.error(
                "the engine failed; every request in flight ends with an error: %s", problem, exc_info=not is_known
            )
            failure = self._failure = _describe_failure(problem)
            self._loop.call_soon_threadsafe(self._fail, failure)
        finally:
            self._engine.close()

    def _run_commands(self) -> None:
        self._wake_up.clear()
        while self._commands:
            self._commands.popleft()()

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.monotonic()
        summary = self._engine.last_step
        if summary.serial != self._last_serial:
            self._last_serial = summary.serial
            self._last_step_at = now
        self._cpu_seconds = time.thread_time()
        self._may_deliver.acquire()
        self._loop.call_soon_threadsafe(self._deliver, outputs, summary, now)

    def _deliver(self, outputs: list[StepOutput], summary: StepSummary, now: float) -> None:
        self._may_deliver.release()
        gaps: list[float] = []
        touched: dict[OutputStream, None] = {}
        for request_id in summary.started_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.start(request_id, now - summary.seconds)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
                stream.open_ids.discard(output.request_id)
            gap = stream.push(output, now)
            touched[stream] = None
            if gap is not None:
                gaps.append(gap)
        for stream in touched:
            stream.wake()
        self._on_step(summary, gaps)

    def _end_all(self, problem: Problem) -> None:
        for stream in set(self._streams.values()):
            stream.open_ids.clear()
            stream.end(problem)
        self._streams.clear()
        for queued in list(self._queued):
            if not queued.done():
                queued.set_exception(problem)

    def give_up(self, failure: str) -> None:
        """Tell every request that the engine is gone; later ones are refused with the same words."""
        self._failure = failure
        self._end_all(engine_failed(500, failure))

    def _fail(self, failure: str) -> None:
        self.give_up(failure)
        self._on_failure(failure)


def _refuse(queued: "asyncio.Future[None]", problem: GlintError) -> None:
    if not queued.done():
        queued.set_exception(problem)


def _describe_failure(problem: BaseException) -> str:
    """Why the engine failed, in words that clients may see: which rank it was, where one was; the log has the rest."""
    return f"the engine failed: {problem}" if isinstance(problem, RankFailed) else "the engine failed"


def engine_failed(status: int, failure: str) -> Problem:
    """What a request is told whose engine is gone."""
    return Problem(status, f"{failure}; the server ends, send the request again once it is back", code="engine_failed")


def _shutting_down() -> Problem:
    return Problem(503, "the server is shutting down; send the request again", code="shutting_down")
