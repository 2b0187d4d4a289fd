"""One HTTP call of a generating route: it is read, run, answered or refused, and recorded exactly once."""

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from glint.server.auth import Tenant, tenant_of
from glint.server.fields import check_count
from glint.server.generation.generation import ANSWER_FAILED, CLIENT_LEFT, Delta, Generation
from glint.server.generation.prepare import PreparedRequest, prepare
from glint.server.generation.request import GenerationRequest
from glint.server.http.body import decode, read_json
from glint.server.http.connection import WRITE_NOW
from glint.server.http.problems import ANTHROPIC_PATHS, Problem, problem_of, send_problem
from glint.server.in_flight import CANCELLED, CANCELLED_BY_ADMIN, CANCELLED_BY_OWNER
from glint.server.outcomes import Outcome, RequestOutcome, RequestRecord
from glint.server.state import Result, ServerState

JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
LINE_ENDS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029"]
Body = TypeVar("Body")


class HttpCall:
    """One call as a handler sees it. A handler raises `Problem`, and the route answers with it."""

    def __init__(self, state: ServerState, prefix: str, scope: Scope, receive: Receive, send: Send) -> None:
        self.state = state
        self.request_id = f"{prefix}-{secrets.token_hex(12)}"
        self._record = RequestRecord(self.request_id, str(scope["path"]), state.outcomes.write, state.metrics.record)
        self.created = int(time.time())
        self.generation: Generation | None = None
        self.status: int | None = None
        self.is_streaming = False
        self.user: str | None = None
        self._ended_by: Problem | None = None
        self._scope = scope
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None

    @property
    def route(self) -> str:
        """The path of the call."""
        return str(self._scope["path"])

    @property
    def tenant(self) -> Tenant:
        """The tenant whose key the call carries."""
        return tenant_of(self._scope)

    async def read(self, kind: type[Body]) -> Body:
        """Read the body and check it against its type; from now on a client that leaves ends the call."""
        self.state.outcomes.admit(self.request_id, self.route)
        try:
            body = decode(await read_json(self._scope, self._receive, self.state.limits), kind)
        except ClientDisconnect as gone:
            raise _client_left() from gone
        self._watcher = asyncio.create_task(self._watch())
        self.state.in_flight.add(self)
        return body

    async def begin(self, *requests: GenerationRequest) -> Generation:
        """Prepare one generation request per prompt and submit them to the engine together."""
        prepared = [await self._prepare(request) for request in requests]
        self._check_logprobs(prepared)
        self.generation = Generation(self.state, prepared, self._record.seconds)
        self._check_open()
        await self.generation.begin()
        self._check_open()
        return self.generation

    def cancel(self, problem: Problem) -> None:
        """End the call early, whatever it waits for. The first problem is the one that its client gets."""
        if self._ended_by is None:
            self._ended_by = problem
        if self.generation is not None:
            self.generation.cancel(problem)

    def describe(self) -> dict[str, object]:
        """What a listing shows of the call: no prompt, no text, no key."""
        generation = self.generation
        stream = None if generation is None else generation.stream
        usage = None if generation is None else generation.usage
        return {
            "id": self.request_id,
            "route": self.route,
            "state": "preparing" if stream is None else "waiting" if stream.first_step_at is None else "running",
            "age_seconds": round(self._record.seconds, 3),
            "choices": None if generation is None else generation.num_choices,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "output_tokens": 0 if usage is None else usage.completion_tokens,
        }

    async def work(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function on a worker thread, unless the call ends before it begins."""
        return await self.state.work(self.tenant.share(), self._unless_ended, function, *arguments)

    async def _prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Prepare a request, on a worker thread where it needs one."""
        if request.needs_worker:
            return await self.work(prepare, self.state, request, self.tenant)
        with self.state.preparing(self.tenant.share()):
            return prepare(self.state, request, self.tenant)

    def _check_open(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by

    def _unless_ended(self, function: Callable[..., Result], *arguments: Any) -> Result:
        self._check_open()
        if self._record.seconds > self.state.limits.max_deadline_seconds:
            raise Problem(504, "the request waited too long to be read; send it again", code="deadline_exceeded")
        return function(*arguments)

    def _check_logprobs(self, prompts: Sequence[PreparedRequest]) -> None:
        """Refuse prompt log-probabilities that would keep the server busy writing them."""
        params = prompts[0].engine_request.params
        if params.prompt_logprobs is not None:
            num_tokens = sum(len(prompt.engine_request.prompt_tokens) for prompt in prompts)
            count = num_tokens * params.n * (params.prompt_logprobs + 1)
            check_count("prompt_logprobs", count, self.state.limits.logprob_entries, "entries for the prompts")

    async def reply(self, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Send a response with a JSON body."""
        self.status = status
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*JSON_HEADERS, length, *(headers or [])])
        await self._send({"type": "http.response.body", "body": body})

    async def open_stream(self) -> None:
        """Begin a response of server-sent events."""
        self.status = 200
        self.is_streaming = True
        await self._start(200, STREAM_HEADERS)

    async def send_events(self, events: bytes) -> None:
        """Send events; waits while the client reads slowly."""
        await self._send({"type": "http.response.body", "body": escape_line_ends(events), "more_body": True})

    async def stream(self, generation: Generation, encode: Callable[[Delta], bytes]) -> None:
        """Send the events of every step until all choices have ended.

        While the client keeps up, the call that delivers a step writes its events. A slow client is waited for.
        """
        write: Callable[[bytes], bool] | None = self._scope.get("extensions", {}).get(WRITE_NOW)
        if write is not None:
            await generation.follow(lambda deltas: write(escape_line_ends(b"".join(map(encode, deltas)))))
        async for deltas in generation.deltas():
            events = b"".join(map(encode, deltas))
            if events:
                await self.send_events(events)

    async def end_stream(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, problem: Problem) -> None:
        """Respond with a problem in the form of the route's API."""
        self.status = problem.status
        await send_problem(self._send, self.route, problem, self.request_id)

    def close(self, problem: Problem | None) -> None:
        """End the call and record its outcome."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self.state.in_flight.remove(self)
        if self.generation is not None:
            self.generation.close()
        self._record.close(self._outcome(problem))

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        name = b"request-id" if self.route in ANTHROPIC_PATHS else b"x-request-id"
        named = [*headers, (name, self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": named})

    async def _watch(self) -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()
        self.cancel(_client_left())

    def _outcome(self, problem: Problem | None) -> RequestOutcome:
        generation = self.generation
        stream = None if generation is None else generation.stream
        usage = None if generation is None else generation.usage
        kind, reason = _classify(problem, [] if generation is None else generation.endings)
        started = None if stream is None else stream.first_step_at
        first = None if stream is None else stream.first_token_at
        last = None if stream is None else stream.last_token_at
        return RequestOutcome(
            request_id=self.request_id,
            route=self.route,
            outcome=kind,
            reason=reason,
            status=CLIENT_LEFT if self.status is None else self.status,
            num_choices=None if generation is None else generation.num_choices,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            queue_seconds=None if stream is None or started is None else max(0.0, started - stream.submitted_at),
            first_token_seconds=None if first is None else first - self._record.arrived_at,
            decode_seconds=None if first is None or last is None else last - first,
            total_seconds=self._record.seconds,
            user=self.user,
            draft_tokens=None if usage is None else usage.draft_tokens,
            accepted_draft_tokens=None if usage is None else usage.accepted_draft_tokens,
        )


def escape_line_ends(events: bytes) -> bytes:
    """Escape characters such as U+2028, at which some clients split the lines of a stream."""
    if not events.isascii():
        for raw, escaped in LINE_ENDS:
            events = events.replace(raw, escaped)
    return events


def _client_left() -> Problem:
    return Problem(CLIENT_LEFT, "the client has closed the connection", code="client_left")


def _classify(problem: Problem | None, endings: list[str]) -> tuple[Outcome, str]:
    """The outcome of a call and its reason. Of several choices, one that reached its length decides first."""
    if problem is None:
        ending: Outcome = "length" if "length" in endings else "stopped" if "stopped" in endings else "finished"
        return ending, ending
    if problem.status in (CLIENT_LEFT, CANCELLED, 503, 504) and problem.code in (
        "client_left",
        "deadline_exceeded",
        "shutting_down",
        CANCELLED_BY_ADMIN,
        CANCELLED_BY_OWNER,
    ):
        return "cancelled", problem.code
    has_failed = problem.status >= 500 or problem.code == ANSWER_FAILED
    return ("failed" if has_failed else "refused"), problem.code


StreamError = Callable[[Problem, str], bytes]


class GeneratingRoute:
    """An ASGI endpoint around a handler. Every call ends in exactly one response and one recorded outcome.

    While the queue is full a call is refused before its body is read: that must cost the running requests little.
    `stream_error` writes the last event of a stream that failed.
    """

    def __init__(
        self, state: ServerState, prefix: str, handle: Callable[[HttpCall], Awaitable[None]], stream_error: StreamError
    ) -> None:
        self._state = state
        self._prefix = prefix
        self._handle = handle
        self._stream_error = stream_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the handler; where it fails, respond with the problem."""
        began_at = time.monotonic()
        refusal = self._state.admission.find_refusal(tenant_of(scope).share())
        if refusal is not None:
            await self._refuse_unread(scope["path"], send, refusal, began_at)
            return
        call = HttpCall(self._state, self._prefix, scope, receive, send)
        problem: Problem | None = None
        try:
            try:
                await self._handle(call)
            except Exception as error:
                problem = problem_of(error, call.request_id).with_traceback(None)
                await self._refuse(call, problem)
        except asyncio.CancelledError:
            if problem is None:
                problem = Problem(503, "the server is shutting down; send the request again", code="shutting_down")
            if call.status is None:
                await call.refuse(problem)
            raise
        finally:
            call.close(problem)

    async def _refuse_unread(self, path: str, send: Send, problem: Problem, began_at: float) -> None:
        """Refuse and record a call. Its id opens nothing, so that it need not be hard to guess."""
        request_id, seconds = f"{self._prefix}-{random.getrandbits(96):024x}", time.monotonic() - began_at
        outcome = RequestOutcome(request_id, path, "refused", problem.code, problem.status, total_seconds=seconds)
        self._state.outcomes.write_soon(outcome)
        self._state.metrics.record(outcome)
        await send_problem(send, path, problem, request_id)

    async def _refuse(self, call: HttpCall, problem: Problem) -> None:
        if problem.status == CLIENT_LEFT:
            return
        if call.is_streaming:
            await call.send_events(self._stream_error(problem, call.request_id))
            await call.end_stream()
        elif call.status is None:
            await call.refuse(problem)
