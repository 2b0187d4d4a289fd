"""A server with the real pages whose answers a test writes: for what no model says on demand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from glint.server.web import WebFiles, read_files
from tests.e2e.served import free_port

START_SECONDS = 30.0
USAGE = {
    "prompt_tokens": 1234,
    "completion_tokens": 21,
    "prompt_tokens_details": {"cached_tokens": 1000},
    "completion_tokens_details": {"reasoning_tokens": 3, "accepted_prediction_tokens": 8},
}


def chunk(**delta: Any) -> dict[str, Any]:
    """A chunk of a chat completion."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def event(content: Any) -> bytes:
    """A server-sent event with this JSON."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@dataclass(frozen=True)
class Reply:
    """One answer: pieces of a stream, or a status other than 200 with its error.

    The stream waits for ever after its pieces where `hangs`, and ends without its last event where `breaks`. Halfway it
    waits for `goes_on`, if there is one.
    """

    pieces: tuple[bytes, ...] = ()
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    breaks: bool = False
    goes_on: threading.Event | None = None


def says(content: str = "", reasoning: str = "", calls: tuple[tuple[str, str], ...] = (), **how: Any) -> Reply:
    """An answer with this text, streamed in pieces that break within characters, words and events."""
    made = [chunk(reasoning_content=reasoning)] if reasoning else []
    made += [chunk(content=content[at : at + 7]) for at in range(0, len(content), 7)]
    for index, (name, arguments) in enumerate(calls):
        call = {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": arguments}}
        made.append(chunk(tool_calls=[call]))
    if not (how.get("hangs") or how.get("breaks")):
        made += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": USAGE}]
    raw = b": keep alive\n\n" + b"".join(event(content) for content in made)
    return Reply(tuple(raw[at : at + 61] for at in range(0, len(raw), 61)), **how)


class ScriptedServer:
    """Answers chat completions with the replies of a test, in order; `asked` has what the page sent."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.reset()

    def reset(self) -> None:
        """Forget the replies and questions of the test before."""
        self.replies: list[Reply] = []
        self.asked: list[dict[str, Any]] = []
        self.not_ready = 0

    async def list_models(self, request: Request) -> Response:
        """The model, once the server has said often enough that it is loading."""
        if self.not_ready > 0:
            self.not_ready -= 1
            error = {"message": "the server is loading", "code": "not_ready"}
            return JSONResponse({"error": error}, 503, {"Retry-After": "1"})
        return JSONResponse({"data": [{"id": "scripted", "max_model_len": 4096}]})

    async def complete(self, request: Request) -> Response:
        """The next reply."""
        self.asked.append(await request.json())
        reply = self.replies.pop(0)
        if reply.status != 200:
            return JSONResponse({"error": reply.error}, reply.status, reply.headers)
        return StreamingResponse(self._stream(reply), media_type="text/event-stream")

    async def _stream(self, reply: Reply) -> AsyncIterator[bytes]:
        for index, piece in enumerate(reply.pieces):
            if reply.goes_on is not None and index == len(reply.pieces) // 2:
                await asyncio.to_thread(reply.goes_on.wait, START_SECONDS)
            yield piece
            await asyncio.sleep(0.003)
        if reply.hangs:
            await asyncio.sleep(600)
        if not reply.breaks:
            yield b"data: [DONE]\n\n"


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """A scripted server for the time of a block."""
    port = free_port()
    scripted = ScriptedServer(port)
    routes = [
        Route("/v1/models", scripted.list_models, methods=["GET"]),
        Route("/v1/chat/completions", scripted.complete, methods=["POST"]),
    ]
    app = WebFiles(Starlette(routes=routes), read_files())
    config = uvicorn.Config(app, port=port, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        assert time.monotonic() < deadline, "the scripted server does not start"
        time.sleep(0.01)
    try:
        yield scripted
    finally:
        server.should_exit = server.force_exit = True
        thread.join(START_SECONDS)
