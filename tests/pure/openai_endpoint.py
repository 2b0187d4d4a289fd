"""A real HTTP server with a scripted clock that speaks OpenAI's streams, for the bench to measure.

It counts tokens itself: a token of a text is a word, and a chat template adds a fixed number. What it saw and when it
wrote are kept, on the clock of the same process.
"""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

TEMPLATE_TOKENS = 7
MODEL = "scripted"


@dataclass
class Script:
    """How the server behaves; times in seconds."""

    first: float = 0.0
    gap: float = 0.0
    tokens_per_chunk: int = 1
    framing: Literal["chunked", "close", "dribble"] = "chunked"
    separators: tuple[str, str] = (",", ":")
    tokenize: Literal["prompt", "content", "absent"] = "prompt"
    has_usage: bool = True
    tokens_short: int = 0
    status: int = 200
    error_at: int | None = None
    drop_at: int | None = None
    api_key: str | None = None
    stats: list[Any] = field(default_factory=list)


@dataclass
class Seen:
    """One completion as the server saw it."""

    body: dict[str, Any]
    received: float
    written: list[float] = field(default_factory=list)
    is_cancelled: bool = False


class ScriptedServer:
    """Listens on a free port of the loopback address, in a thread of its own."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.num_connections = 0
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) is not None:
                received = perf_counter()
                lines = head.decode().split("\r\n")
                method, path, _ = lines[0].split(" ")
                fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                document = json.loads(body) if body else {}
                if self.script.api_key is not None and fields.get("authorization") != f"Bearer {self.script.api_key}":
                    self._reply(writer, 401, {"error": {"message": "wrong key"}})
                elif path.endswith("completions") and document.get("stream"):
                    await self._stream(writer, path, Seen(document, received))
                else:
                    self._reply(writer, *self._answer(method, path, document))
                await writer.drain()
                if self.script.framing == "close":
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    def _reply(self, writer: asyncio.StreamWriter, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        writer.write(f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def _answer(self, method: str, path: str, document: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": MODEL}, {"id": "other"}]}
        if path == "/tokenize" and self.script.tokenize in document:
            return 200, {"tokens": [zlib.crc32(word.encode()) for word in document[self.script.tokenize].split()]}
        if path == "/tokenize" and self.script.tokenize == "content":
            return 200, {"tokens": []}
        if path == "/stats" and self.script.stats:
            return 200, self.script.stats.pop(0)
        if path == "/v1/chat/completions" and self.script.status == 200:
            return 200, {"choices": [], "usage": {"prompt_tokens": prompt_tokens(document)}}
        return 404, {"detail": "Not Found"}

    async def _stream(self, writer: asyncio.StreamWriter, path: str, seen: Seen) -> None:
        script = self.script
        self.seen.append(seen)
        if script.status != 200:
            self._reply(writer, script.status, {"error": {"message": "the queue is full", "code": script.status}})
            return
        framing = "" if script.framing == "close" else "Transfer-Encoding: chunked\r\n"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n".encode())
        is_chat = "chat" in path
        if is_chat:
            await self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
        count = seen.body["max_tokens"] - script.tokens_short
        for index in range(0, count, script.tokens_per_chunk):
            await asyncio.sleep(script.gap if index else script.first)
            if script.error_at is not None and index >= script.error_at:
                await self._event(writer, {"error": {"message": "the engine stopped"}})
                writer.write(b"0\r\n\r\n")
                return
            if script.drop_at is not None and index >= script.drop_at:
                writer.transport.abort()
                return
            text = ' "text": "' if index else " word"
            piece = {"delta": {"content": text}} if is_chat else {"text": text}
            await self._event(writer, {"choices": [{**piece, "finish_reason": None}], "usage": None})
            seen.written.append(perf_counter())
        last = {"delta": {}} if is_chat else {"text": ""}
        await self._event(writer, {"choices": [{**last, "finish_reason": "length"}], "usage": None})
        if script.has_usage:
            usage = {"prompt_tokens": prompt_tokens(seen.body), "completion_tokens": count}
            await self._event(writer, {"choices": [], "usage": usage})
        await self._write(writer, b"data: [DONE]\n\n")
        if script.framing != "close":
            writer.write(b"0\r\n\r\n")

    async def _event(self, writer: asyncio.StreamWriter, document: Any) -> None:
        text = json.dumps({"object": "text_completion", **document}, separators=self.script.separators)
        await self._write(writer, f"data: {text}\n\n".encode())

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self.script.framing == "close":
            writer.write(data)
        elif self.script.framing == "chunked":
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        else:
            for start in range(0, len(data), 40):
                part = data[start : start + 40]
                for half in (f"{len(part):X};kind=part\r".encode(), b"\n" + part[:11], part[11:] + b"\r", b"\n"):
                    writer.write(half)
                    await writer.drain()
                    await asyncio.sleep(0)
        await writer.drain()


def prompt_tokens(body: dict[str, Any]) -> int:
    """The tokens of a request's prompt as this server counts them."""
    if "prompt" in body:
        return len(body["prompt"])
    return TEMPLATE_TOKENS + sum(len(message["content"].split()) for message in body["messages"])


@contextmanager
def serving(script: Script) -> Iterator[ScriptedServer]:
    """Runs a server until the end of the block."""
    server = ScriptedServer(script)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    finished = asyncio.Event()

    async def work() -> None:
        listener = await asyncio.start_server(server._serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        started.set()
        await finished.wait()
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(finished.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
