"""`glint batch`: requests of a file in OpenAI's batch format, answered by the server's own handlers without HTTP.

Every field of a request means what it means to the server. An answer is appended to the output as one line once it is
complete, so a run that was stopped goes on where it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import msgspec

from glint.errors import EngineError, RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from glint.server.serve import Server
    from glint.server.settings import ServerSettings

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
OK = 200
SERVER_ERROR = 500
EXIT_FAILED = 1
IN_FLIGHT = 1024
MOST_WAITING = 10**9
LONGEST_SECONDS = 30 * 24 * 3600.0
SHOWN_PROBLEMS = 20
REPORT_SECONDS = 10.0
HEALTH_SECONDS = 1.0
FAILURE_SECONDS = 0.1


class InputLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the input."""

    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    body: msgspec.Raw


class InputBody(msgspec.Struct):
    """What a batch itself reads of a body; the server checks the rest."""

    stream: bool | None = None


class Response(msgspec.Struct):
    """The answer of the server."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct):
    """One line of the output."""

    id: str
    custom_id: str
    response: Response
    error: None = None


class Usage(msgspec.Struct):
    """The tokens of an answer, as the routes call them."""

    completion_tokens: int = 0
    output_tokens: int = 0


class AnswerBody(msgspec.Struct):
    """What the progress reads of an answer."""

    usage: Usage | None = None


def read_input(file: Path) -> dict[str, InputLine]:
    """The requests of a file by custom_id; all lines that cannot be used are refused together, by number."""
    found: dict[str, InputLine] = {}
    numbers: dict[str, int] = {}
    problems = []
    for number, text in enumerate(_read(file).split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            line = _read_line(text)
            if line.custom_id in found:
                raise RequestError(f"custom_id {line.custom_id!r} is that of line {numbers[line.custom_id]}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RequestError) as problem:
            problems.append(f"{file} line {number}: {problem}")
            continue
        found[line.custom_id], numbers[line.custom_id] = line, number
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = [*problems[:SHOWN_PROBLEMS], *([f"and {more} more lines"] if more > 0 else [])]
        raise RequestError("\n".join([*shown, "nothing has run: correct these lines and start again"]))
    if not found:
        raise RequestError(
            f"{file} holds no request; give a line of JSON with custom_id, method, url and body for each"
        )
    return found


def _read_line(text: bytes) -> InputLine:
    line = msgspec.json.decode(text, type=InputLine)
    if not line.custom_id:
        raise RequestError("custom_id is empty; give each line a name of its own")
    if msgspec.json.decode(line.body, type=InputBody).stream:
        raise RequestError("stream is true, but a batch has whole answers; leave stream out")
    return line


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as problem:
        raise RequestError(f"{file} cannot be read: {problem.strerror}; give a file of JSON lines") from problem


@contextmanager
def open_output(file: Path) -> Iterator[BinaryIO]:
    """The output, open for more lines; only one run at a time writes it."""
    try:
        with file.open("a+b") as output:
            try:
                fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RequestError(
                    f"{file} is being written by another run; wait for it, or name another file"
                ) from None
            yield output
            os.fsync(output.fileno())
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise RequestError(f"{file} cannot be written: {reason}; start again once it can, and it goes on") from problem


def read_output(output: BinaryIO, file: Path, asked: dict[str, InputLine]) -> dict[str, int]:
    """The status of every request that the output already answers; a last line that was cut is dropped."""
    output.seek(0)
    *lines, cut = output.read().split(b"\n")
    done: dict[str, int] = {}
    for number, text in enumerate(lines, start=1):
        try:
            line = msgspec.json.decode(text, type=OutputLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            message = f"{file} line {number} is no line of a batch's output ({problem}); name another file"
            raise RequestError(message) from problem
        if line.custom_id not in asked:
            raise RequestError(
                f"{file} line {number} answers {line.custom_id!r}, which is not asked for; name another file"
            )
        done[line.custom_id] = line.response.status_code
    if cut:
        output.truncate(output.tell() - len(cut))
    return done


class Progress:
    """Counts what is done, and shows it on standard error: as a bar on a terminal, else as a line now and then."""

    def __init__(self, num_done: int, num_all: int) -> None:
        self.num_failed = 0
        self._num_before = self._num_done = num_done
        self._num_all = num_all
        self.num_tokens = 0
        self._started = self._printed_at = time.monotonic()
        self._show: Callable[[int, str], None] = self._print_line

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the progress until the end of the block; its time begins here."""
        self._started = self._printed_at = time.monotonic()
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=self._num_all, completed=self._num_done)
            self._show = lambda num_done, text: bar.update(task, completed=num_done, description=text)
            yield

    def count(self, response: Response) -> None:
        """One more request is answered."""
        self._num_done += 1
        if response.status_code == OK:
            usage = msgspec.json.decode(response.body, type=AnswerBody).usage
            self.num_tokens += 0 if usage is None else usage.completion_tokens + usage.output_tokens
        else:
            self.num_failed += 1
        self._show(self._num_done, self._text())

    def _text(self) -> str:
        seconds = time.monotonic() - self._started
        left = seconds / (self._num_done - self._num_before) * (self._num_all - self._num_done)
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"{self.num_tokens / max(seconds, 1e-9):.1f} tok/s, {left:.0f} s left{failed}"

    def _print_line(self, num_done: int, text: str) -> None:
        now = time.monotonic()
        if now - self._printed_at >= REPORT_SECONDS:
            self._printed_at = now
            print(f"glint: {num_done} of {self._num_all}, {text}", file=sys.stderr, flush=True)


async def post(app: ASGIApp, line: InputLine) -> Response:
    """The answer of the server's application to one request."""
    request = [{"type": "http.request", "body": bytes(line.body), "more_body": False}]
    never = asyncio.Event()
    status, request_id, pieces = 0, "", []

    async def receive() -> Message:
        if not request:
            await never.wait()
        return request.pop()

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            pieces.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "path": line.url}
    await app({**scope, "headers": headers, "query_string": b""}, receive, send)
    return Response(status, request_id, msgspec.Raw(b"".join(pieces)))


@dataclass
class Batch:
    """The requests that are left, the server that answers them, and the file for the answers."""

    server: Server
    left: Iterator[InputLine]
    output: BinaryIO
    progress: Progress

    async def run(self, num_workers: int) -> None:
        """Answers everything that is left, so many requests at once; raises `EngineError` once the engine fails."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            workers = [group.create_task(self._work()) for _ in range(num_workers)]
            await asyncio.wait(workers)
            watching.cancel()

    async def _work(self) -> None:
        for line in self.left:
            response = await post(self.server.app, line)
            if response.status_code >= SERVER_ERROR:
                await asyncio.sleep(FAILURE_SECONDS)
                self._check_engine()
            written = OutputLine(f"batch_req_{secrets.token_hex(12)}", line.custom_id, response)
            self.output.write(msgspec.json.encode(written) + b"\n")
            self.output.flush()
            self.progress.count(response)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            self._check_engine()

    def _check_engine(self) -> None:
        if not self.server.is_healthy:
            raise EngineError(
                "the engine failed or makes no step; the log says why. Start again, and the batch goes on"
            )


async def answer_all(settings: ServerSettings, left: Sequence[InputLine], output: BinaryIO, progress: Progress) -> None:
    """Loads the model and answers every request; the output then has a line for each."""
    from glint.server.process.lifecycle import Startup
    from glint.server.serve import Server

    server = Server(settings, Startup())
    try:
        await server.start()
        with progress.shown():
            await Batch(server, iter(left), output, progress).run(min(in_flight(settings), len(left)))
    except ExceptionGroup as problems:
        raise problems.exceptions[0] from None
    finally:
        has_ended = await server.close()
        if not has_ended:
            print("glint: a step of the engine does not end; the process ends", file=sys.stderr, flush=True)
            os._exit(EXIT_FAILED)


def in_flight(settings: ServerSettings) -> int:
    """Requests that are given to the engine at once: enough that its batch is always full."""
    return max(IN_FLIGHT, 2 * (settings.engine_args.max_num_seqs or 0))


def read_settings(chosen: argparse.Namespace) -> ServerSettings:
    """The settings of the server in this process. Nothing is refused for a full queue or a long wait."""
    from glint.flags import engine_args, model_source
    from glint.server.auth import ApiKeys
    from glint.server.limits import Limits
    from glint.server.settings import ServerSettings

    source = model_source(chosen)
    return ServerSettings(
        model_dir=source.folder,
        repository=source.repository,
        commit=source.commit,
        model_names=tuple(chosen.served_model_name or [source.name]),
        keys=ApiKeys([]),
        engine_args=engine_args(chosen),
        library_path=chosen.engine,
        limits=Limits(
            waiting_requests=MOST_WAITING,
            waiting_tokens=MOST_WAITING,
            deadline_seconds=LONGEST_SECONDS,
            max_deadline_seconds=LONGEST_SECONDS,
        ),
    )


def run(chosen: argparse.Namespace) -> int:
    """Answers every request of the input that the output does not answer yet; exit code 1 if any failed."""
    from glint.server.process.logs import set_up_logging

    asked = read_input(chosen.input)
    with open_output(chosen.output) as output:
        done = read_output(output, chosen.output, asked)
        left = [line for custom_id, line in asked.items() if custom_id not in done]
        progress = Progress(len(done), len(asked))
        if left:
            set_up_logging("warning", False)
            try:
                asyncio.run(answer_all(read_settings(chosen), left, output, progress))
            except KeyboardInterrupt:
                print(f"\nglint: run it again to go on: {chosen.output} keeps what is answered", file=sys.stderr)
                raise
    num_failed = progress.num_failed + sum(status != OK for status in done.values())
    before = f", {len(done)} of them before" if done else ""
    print(f"glint: {len(asked)} requests are answered in {chosen.output}{before}; {num_failed} failed", file=sys.stderr)
    return EXIT_FAILED if num_failed else 0
