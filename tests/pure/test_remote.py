"""A chat with a server: its model, its stream, its thinking, its errors, and a lost connection."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from glint import cli
from glint.conversation import AnswerDelta
from glint.errors import RequestError
from glint.remote import Address, RemoteModel, find_model

HELLO = [{"role": "user", "content": "hello"}]


class Behaviour:
    """What a server lists, what it streams, and what it was sent."""

    def __init__(self, *lines: str, status: int = 200, models: tuple[str, ...] = ("only",)) -> None:
        self.lines = lines
        self.status = status
        self.models = models
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []


@contextmanager
def listening(behaviour: Behaviour) -> Iterator[str]:
    """A server of Python's own library; gives its address."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": name} for name in behaviour.models]}))

        def do_POST(self) -> None:
            behaviour.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send(behaviour.status, "".join(f"{line}\n" for line in behaviour.lines))

        def _send(self, status: int, text: str) -> None:
            behaviour.keys.append(self.headers["Authorization"])
            behaviour.paths.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def chunk(finish_reason: str | None = None, **delta: str) -> str:
    """A line of a stream with a delta of the first choice."""
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def ask(behaviour: Behaviour, **changes: Any) -> list[AnswerDelta]:
    """The answer of a server."""
    with listening(behaviour) as url:
        return list(RemoteModel(Address.parse(f"{url}/v1", "secret"), "name", changes).answer(HELLO))


@pytest.mark.parametrize("thinking", ["reasoning_content", "reasoning"])
def test_a_stream_is_thinking_text_and_counts(thinking: str) -> None:
    usage = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 7}})
    behaviour = Behaviour(
        chunk(role="assistant", content=""),
        ": a comment of the stream",
        chunk(**{thinking: "hm"}),
        chunk(content="for"),
        chunk(content="ty"),
        chunk("stop"),
        usage,
        "data: [DONE]",
    )
    deltas = ask(behaviour, temperature=0.0, max_tokens=9)
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.text for delta in deltas) == "forty"
    assert sum(delta.num_tokens for delta in deltas) == 7
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    (body,) = behaviour.bodies
    assert body["messages"] == HELLO and body["model"] == "name" and body["stream"] is True
    assert (body["temperature"], body["max_tokens"]) == (0.0, 9) and "top_p" not in body
    assert behaviour.keys == ["Bearer secret"] and behaviour.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("lines", "failure"),
    [
        ((chunk(content="for"),), "the connection was lost before the answer was complete"),
        ((chunk(content="for"), 'data: {"error": {"message": "the engine stopped"}}'), "the engine stopped"),
        (("data: no", chunk("stop")), "no JSON object"),
        (("data: []",), "no JSON object"),
        (('data: {"choices": 5}', 'data: {"choices": [{"delta": 3}]}'), "connection was lost"),
    ],
)
def test_a_stream_that_fails_is_a_failed_answer(lines: tuple[str, ...], failure: str) -> None:
    last = ask(Behaviour(*lines))[-1]
    assert last.finish_reason == "failed" and failure in (last.failure or "")


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "HTTP 401: wrong.*--api-key or GLINT_API_KEY"), (429, "HTTP 429: wrong$"), (503, "HTTP 503: wrong$")],
)
def test_a_refusal_is_a_sentence(status: int, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ask(Behaviour('{"error": {"message": "wrong"}}', status=status))


def test_the_only_model_is_taken_and_several_are_named() -> None:
    with listening(Behaviour()) as url:
        assert find_model(Address.parse(url), None) == "only"
        assert find_model(Address.parse(url), "another") == "another"
    for models, said in ((("a", "b"), "serves a, b; choose one with --model"), ((), "names no model")):
        with listening(Behaviour(models=models)) as url, pytest.raises(RequestError, match=said):
            find_model(Address.parse(url), None)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://h/?a=b", "http://hä"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="is no address of a server; give one such as"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
        (["--url", "http://127.0.0.1:1", "--tp", "2"], "--tp is of an engine in this process"),
        (["--url", "http://127.0.0.1:1", "--engine", "x"], "--engine is of an engine in this process"),
        (["--api-key", "x"], "--api-key is of a server that --url names"),
    ],
)
def test_a_chat_that_cannot_begin_is_one_sentence(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", *flags]) == 1
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and error.count("\n") == 1
