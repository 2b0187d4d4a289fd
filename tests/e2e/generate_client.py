"""Streams of /generate with their tokens: asked for, cancelled, and run again alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

SECONDS = 300.0


@dataclass
class Stream:
    """One request and what came back for it; `cancel_after` events the client goes away."""

    body: dict[str, Any]
    cancel_after: int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether the client left before the end."""
        return self.cancel_after is not None and self.completion_tokens is None

    async def run(self, client: httpx.AsyncClient) -> Stream:
        """Send the request and read its events, every one of which must be in order."""
        num_events = 0
        async with client.stream("POST", "/generate", json=self.body | {"stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in event_lines(answer):
                if not line.startswith(b"data: "):
                    assert line == b"", line
                    continue
                self._take(json.loads(line[6:]))
                num_events += 1
                if num_events == self.cancel_after:
                    return self
        assert self.completion_tokens == len(self.token_ids), self
        assert self.finish_reason in ("stop", "length"), self
        if self.finish_reason == "length":
            assert self.completion_tokens == self.body["max_tokens"], self
        return self

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        if "usage" in event:
            self.completion_tokens = event["usage"]["completion_tokens"]
            return
        assert self.finish_reason is None, f"an event after the last: {event}"
        self.token_ids += event["token_ids"]
        self.text += event["text"]
        self.finish_reason = event.get("finish_reason")


async def event_lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of an event stream, which end at a newline alone; httpx also ends them at separators inside a text."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    assert rest == b"", rest


def make_client(url: str) -> httpx.AsyncClient:
    """A client for as many streams at once as one likes."""
    return httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=httpx.Limits(max_connections=None))
