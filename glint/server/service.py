"""Runs the engine on a thread of its own and delivers its outputs on the event loop."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from glint.engine.engine import Engine, StepSummary
from glint.engine.request import StepOutput
from glint.engine.reuse import Reuse
from glint.engine.share import DEFAULT_SHARE, Share
from glint.errors import EngineError, GlintError, RankFailed
from glint.sampling import SamplingParams
from glint.server.http.problems import Problem
from glint.text.grammar import Grammar

log = logging.getLogger("glint.server")
WARM_UP_TOKENS = 4
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class EngineRequest:
    """One prompt for the engine. The grammar holds after the token `begins_after`.

    `share` names the tenant that the engine computes the request for. `reuse` says what later requests can share.
    `is_thinking` says whether the prompt ends inside thinking; None leaves that to the engine.
    """

    prompt_tokens: Sequence[int]
    params: SamplingParams
    cache_salt: int = 0
    grammar: Grammar | None = None
    begins_after: int | None = None
    share: Share = DEFAULT_SHARE
    reuse: Reuse | None = None
    is_thinking: bool | None = None


class OutputStream:
    """The output of one request, on the event loop.

    `choices` maps each request id to its choice index; `open_ids` are the ids that have not ended. Outputs wait here
    until the reader takes them, so a slow reader delays no other request. A stream ends with the last output of its
    last choice, or early by `end` with the problem that the reader gets.
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
        """Record that the first step of a choice began."""
        if self.first_step_at is None:
            self.first_step_at = now
        self.on_start(self.choices[request_id])

    def push(self, output: StepOutput, now: float) -> float | None:
        """Add the output of a step; returns the time since the previous output of the choice, None for the first."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self._arrived.append(output)
        before = self._last_at.get(output.request_id)
        self._last_at[output.request_id] = now
        return None if before is None else now - before

    def end(self, problem: Problem) -> None:
        """End the stream early; the reader gets the problem."""
        if self._problem is None:
            self._problem = problem
            self.wake()

    async def take(self) -> list[StepOutput]:
        """Wait for outputs and return all that are new; raises the problem that ended the stream."""
        while not self._arrived and self._problem is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_now()

    def take_now(self) -> list[StepOutput]:
        """Return all new outputs, perhaps none; raises the problem that ended the stream."""
        if self._problem is not None:
            raise self._problem
        arrived, self._arrived = self._arrived, []
        return arrived

    def listen(self, on_arrival: Callable[[], None] | None) -> None:
        """Call `on_arrival` whenever there is something to take, instead of waking a waiting `take`."""
        self._on_arrival = on_arrival
        if on_arrival is not None and (self._arrived or self._problem is not None):
            on_arrival()

    def wake(self) -> None:
        """Notify the reader that there is something to take."""
        if self._on_arrival is not None:
            self._on_arrival()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineService:
    """Runs an engine on its own thread. Callers use all methods on the event loop.

    Commands wait for the end of the running step. The outputs of a step reach the event loop in one call. The engine
    delivers the next step only after that call: an event loop that is behind slows the engine down, and never writes
    more than one step between two polls of its sockets. Once the engine fails, every stream ends with a problem, and
    `on_failure` is called with the reason; the service does not use the engine again.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepSummary, list[StepOutput], list[float]], None],
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
        """CPU time of the engine's Python thread, without the native threads."""
        return self._cpu_seconds

    @property
    def is_failed(self) -> bool:
        """Whether the engine has failed."""
        return self._failure is not None

    @property
    def num_open_choices(self) -> int:
        """The number of choices that have not ended."""
        return len(self._streams)

    def stalled_seconds(self) -> float:
        """Seconds with work but without a completed step; 0 while idle."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else max(0.0, time.monotonic() - max(busy_since, self._last_step_at))

    async def start(self) -> None:
        """Start the thread and warm the engine up with a few real tokens."""
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
        """Submit the prompts of a request, all or none; `on_start` is called for each choice after its first step.

        Choices are numbered over all prompts. Raises `RequestError` where the engine refuses a prompt.
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
        """Abort the open choices of a stream. The caller ends the stream for its reader."""
        ids, stream.open_ids = stream.open_ids, set()
        for request_id in ids:
            self._streams.pop(request_id, None)
        if ids:
            self._command(lambda: self._abort(ids))

    def end_streams(self) -> None:
        """End every stream because the server shuts down; later requests are refused with the same problem."""
        self._is_closing = True
        self._end_all(_shutting_down())

    async def close(self) -> bool:
        """End every stream, stop the thread and free the engine. False: a step does not end."""
        self.end_streams()
        self._wake_up.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        return not self._thread.is_alive()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake_up.set()

    def _submit(self, requests: Sequence[EngineRequest], stream: OutputStream, queued: "asyncio.Future[None]") -> None:
        """On the engine thread: submit the prompts. The event loop gets the ids before any output."""
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
                    request.reuse,
                    request.is_thinking,
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
        """On the event loop: register the ids of a stream; cancel it where the submitter has gone meanwhile."""
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
                stream.start(request_id, now - summary.seconds_ago - summary.seconds)
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
        self._on_step(summary, outputs, gaps)

    def _end_all(self, problem: Problem) -> None:
        for stream in set(self._streams.values()):
            stream.open_ids.clear()
            stream.end(problem)
        self._streams.clear()
        for queued in list(self._queued):
            if not queued.done():
                queued.set_exception(problem)

    def fail_all(self, failure: str) -> None:
        """End every stream because the engine failed; later requests are refused with the same reason."""
        self._failure = failure
        self._end_all(engine_failed(500, failure))

    def _fail(self, failure: str) -> None:
        self.fail_all(failure)
        self._on_failure(failure)


def _refuse(queued: "asyncio.Future[None]", problem: GlintError) -> None:
    if not queued.done():
        queued.set_exception(problem)


def _describe_failure(problem: BaseException) -> str:
    """Why the engine failed, as clients may read it: the failed rank, if any. The log has the rest."""
    return f"the engine failed: {problem}" if isinstance(problem, RankFailed) else "the engine failed"


def engine_failed(status: int, failure: str) -> Problem:
    """The problem of a request whose engine has failed."""
    return Problem(status, f"{failure}; the server ends, send the request again once it is back", code="engine_failed")


def _shutting_down() -> Problem:
    return Problem(503, "the server is shutting down; send the request again", code="shutting_down")
