"""A model behind a URL: the chat route of glint's server or of any other that OpenAI's clients can talk to."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from glint.bench.stream import LONGEST_MESSAGE, error_message
from glint.conversation import FAILED, AnswerDelta, Message
from glint.errors import RequestError

TIMEOUT_SECONDS = 600.0
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
CUT = "the connection was lost before the answer was complete"


@dataclass(frozen=True)
class Address:
    """Where a server is, and the key that it asks for."""

    url: str
    scheme: str
    host: str
    port: int | None
    prefix: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Address:
        """Reads http://host:port, with or without a path and a final /v1."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if host is None or parts.scheme not in CONNECTIONS or parts.query or parts.fragment or not url.isascii():
            raise RequestError(f"--url {url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("--api-key holds characters that no HTTP header can carry; check it for line ends")
        return cls(url, parts.scheme, host, port, parts.path.rstrip("/").removesuffix("/v1"), api_key)

    @contextmanager
    def request(self, method: str, path: str, document: Any = None) -> Iterator[http.client.HTTPResponse]:
        """Sends JSON, if any, and gives the response; an error of the server or on the way raises `RequestError`."""
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        body = None if document is None else json.dumps(document)
        connection = CONNECTIONS[self.scheme](self.host, self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, f"{self.prefix}{path}", body, headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self._refusal(response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as problem:
            reason = str(problem) or type(problem).__name__
            raise RequestError(f"{self.url} does not answer ({reason}); is the server running there?") from problem
        finally:
            connection.close()

    def _refusal(self, status: int, body: bytes) -> RequestError:
        message = f"{self.url} refuses with HTTP {status}: {error_message(body)}"
        is_key = status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)
        return RequestError(f"{message}; give its key with --api-key or GLINT_API_KEY" if is_key else message)


def find_model(address: Address, name: str | None) -> str:
    """The served name that was asked for, or the only one that the server has."""
    if name is not None:
        return name
    with address.request("GET", "/v1/models") as response:
        document = _read_json(response.read())
    entries = document.get("data") if isinstance(document, dict) else None
    listed = entries if isinstance(entries, list) else []
    names = [str(entry["id"]) for entry in listed if isinstance(entry, dict) and "id" in entry]
    if len(names) != 1:
        served = f"serves {', '.join(names)}" if names else "names no model"
        raise RequestError(f"{address.url} {served}; choose one with --model NAME")
    return names[0]


class RemoteModel:
    """A model behind a URL; `changes` are the sampling fields of the command line, the others follow the server."""

    def __init__(self, address: Address, name: str, changes: dict[str, Any]) -> None:
        self._address = address
        self._body = {"model": name, "stream": True, "stream_options": {"include_usage": True}, **changes}

    def answer(self, messages: Sequence[Message]) -> Iterator[AnswerDelta]:
        """The answer to a conversation; the model's thinking is apart from its text."""
        counter = TokenCounter()
        finish_reason = None
        with self._address.request("POST", "/v1/chat/completions", {**self._body, "messages": messages}) as response:
            try:
                for event in read_events(response):
                    if event.get("error"):
                        yield AnswerDelta(finish_reason=FAILED, failure=error_message(json.dumps(event).encode()))
                        return
                    delta = counter.count(read_delta(event), event.get("usage"))
                    finish_reason = delta.finish_reason or finish_reason
                    yield delta
            except (OSError, http.client.HTTPException):
                finish_reason = None
        if finish_reason is None:
            yield AnswerDelta(finish_reason=FAILED, failure=f"{CUT}; ask again")


class TokenCounter:
    """Counts the tokens of an answer: a chunk with text as one, corrected by the server's usage where it comes."""

    def __init__(self) -> None:
        self._counted = 0

    def count(self, delta: AnswerDelta, usage: Any) -> AnswerDelta:
        """The delta with the tokens that it adds to the count."""
        known = usage.get("completion_tokens") if isinstance(usage, dict) else None
        now = known if isinstance(known, int) else self._counted + bool(delta.text or delta.reasoning)
        added, self._counted = now - self._counted, now
        return delta._replace(num_tokens=added)


def read_events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        event = _read_json(data)
        if not isinstance(event, dict):
            event = {"error": f"a piece of the stream is no JSON object: {data[:LONGEST_MESSAGE]!r}"}
        yield event


def read_delta(event: dict[str, Any]) -> AnswerDelta:
    """The part of the first choice in one chunk; servers call the thinking `reasoning_content` or `reasoning`."""
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    sent = choice.get("delta")
    delta = sent if isinstance(sent, dict) else {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    return AnswerDelta(
        _text(delta.get("content")), _text(reasoning), finish_reason=_text(choice.get("finish_reason")) or None
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _read_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
