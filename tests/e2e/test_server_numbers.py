"""Numbers of request bodies: a refusal names the field, the value and bounds that are true.

Each refusal's own bounds are sent back to the server: the values at them must be accepted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served

CHAT, TEXT, RESPONSES, MESSAGES, GENERATE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
)
TALK = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "max_tokens": 1, "logprobs": True},
    TEXT: {"prompt": "x", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
    MESSAGES: {"messages": TALK, "max_tokens": 1},
    GENERATE: {"prompt": "x", "max_tokens": 1},
}
CONTEXT, VOCABULARY = 8192, 49152
SAMPLING = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-37, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**64 - 1),
}
PENALTIES = {
    "repetition_penalty": (1e-37, 1000.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "n": (1, 16),
    "logit_bias": (-100.0, 100.0),
    "stop_token_ids": (0, VOCABULARY - 1),
}
BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    CHAT: SAMPLING | PENALTIES | {"top_logprobs": (0, 20), "prompt_logprobs": (0, 20)},
    TEXT: SAMPLING | PENALTIES | {"logprobs": (0, 20), "prompt_logprobs": (0, 20), "prompt": (0, VOCABULARY - 1)},
    RESPONSES: {**SAMPLING, "repetition_penalty": (1e-37, 1000.0)},
    MESSAGES: SAMPLING,
    GENERATE: SAMPLING | PENALTIES | {"logprobs": (0, 20), "prompt_logprobs": (0, 20), "prompt": (0, VOCABULARY - 1)},
}
CASES = [(path, field) for path, fields in BOUNDS.items() for field in fields]
LISTS = ("stop_token_ids", "prompt")
TOLD = re.compile(r"from (-?[\d.e+-]+) to (-?[\d.e+-]*\d)")


class Sender:
    """Posts bodies of which one field has a number that is written as it is given."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self._model = model

    def __call__(self, path: str, field: str, text: str) -> httpx.Response:
        """The answer to a body whose field has this number."""
        body = {name: value for name, value in BODIES[path].items() if name != field}
        if path == MESSAGES:
            body["model"] = self._model
        if field == "max_completion_tokens":
            del body["max_tokens"]
        value = f"[{text}]" if field in LISTS else f'{{"5": {text}}}' if field == "logit_bias" else text
        raw = json.dumps(body)[:-1] + f', "{field}": {value}}}'
        return self._client.post(path, content=raw, headers={"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def send(server: Served) -> Iterator[Sender]:
    """Posts to the shared server over one connection."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield Sender(client, server.model)


def refusal(answer: httpx.Response, path: str, field: str) -> str:
    """The text of a 400 that names the field."""
    assert answer.status_code == 400, (field, answer.text)
    error = answer.json()["error"]
    message = str(error["message"])
    assert re.search(rf"\b{field}\b", message), message
    if path != MESSAGES:
        assert re.fullmatch(rf"{field}(\[.*\])?", error["param"] or ""), error
    return message


def outside(bounds: tuple[float, float]) -> tuple[float, float]:
    """The numbers next to the bounds, outside."""
    low, high = bounds
    if isinstance(low, int):
        return low - 1, high + 1
    return math.nextafter(low, -math.inf), math.nextafter(high, math.inf)


@pytest.mark.parametrize(("path", "field"), CASES)
def test_bounds_are_told_and_true(send: Sender, path: str, field: str) -> None:
    low, high = BOUNDS[path][field]
    below, above = outside((low, high))
    if field == "top_k":
        assert send(path, field, "-1").status_code == 200
        below = -2
    bounds: set[str] = set()
    for value in (below, above):
        message = refusal(send(path, field, repr(value)), path, field)
        assert repr(value) in message, message
        told = TOLD.search(message)
        assert told is not None, message
        assert tuple(map(type(low), told.groups())) == (low, high), message
        bounds.update(told.groups())
    for bound in bounds:
        assert send(path, field, bound).status_code == 200, bound


@pytest.mark.parametrize(("path", "field"), CASES)
def test_numbers_that_no_field_has(send: Sender, path: str, field: str) -> None:
    low, _ = BOUNDS[path][field]
    for text in ("1e308", "1e999", "9" * 400, "-" + "9" * 400):
        refusal(send(path, field, text), path, field)
    for text in ("NaN", "Infinity", "-Infinity"):
        answer = send(path, field, text)
        assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]
    is_real = isinstance(low, float)
    for text in ("-0.0", "1e-300"):
        answer = send(path, field, text)
        if is_real and low <= 0:
            assert answer.status_code == 200, answer.text
        else:
            message = refusal(answer, path, field)
            assert ("expected integer" if not is_real else text) in message


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (TEXT, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
        (GENERATE, "max_tokens"),
    ],
)
def test_the_longest_answer_is_told(send: Sender, path: str, field: str) -> None:
    for text in ("0", "-1", "-0.0", "1e-300", "1e308", str(2**31), "9" * 30):
        message = refusal(send(path, field, text), path, field)
        if path == TEXT and text == "0":
            assert "set echo to true" in message
            continue
        assert "e" in text or "." in text or (text in message and str(CONTEXT) in message and "from 1 to" in message)
    message = refusal(send(path, field, str(CONTEXT)), path, field)
    room = re.search(r"room for (\d+)", message)
    assert room is not None and int(room[1]) < CONTEXT
    message = refusal(send(path, field, str(int(room[1]) + 1)), path, field)
    assert f"room for {room[1]}" in message


@pytest.mark.parametrize(
    "changes", [{"prompt": "x " * 9000}, {"prompt": "x" * 1_000_000}, {"prompt": "x", "max_tokens": CONTEXT}]
)
def test_over_the_context_has_the_code_and_the_words_that_clients_know(server: Served, changes: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=changes, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert f"this model's maximum context length is {CONTEXT} tokens" in error["message"]
    if "max_tokens" in changes:
        return
    body = {"messages": [{"role": "user", "content": changes["prompt"]}], "max_tokens": 1, "model": server.model}
    refused = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert refused.status_code == 400 and "prompt is too long: " in refused.json()["error"]["message"]


def test_n_and_the_deadline_name_their_flags(send: Sender) -> None:
    assert "--max-choices" in refusal(send(CHAT, "n", "17"), CHAT, "n")
    for text in ("0", "-0.0", "3600.5", "1e308"):
        message = refusal(send(CHAT, "deadline_seconds", text), CHAT, "deadline_seconds")
        assert "above 0 and at most 3600" in message and "--max-request-timeout" in message
    assert send(CHAT, "deadline_seconds", "3600").status_code == 200


def test_best_of_names_n(send: Sender) -> None:
    message = refusal(send(TEXT, "best_of", "3"), TEXT, "best_of")
    assert "3" in message and "n, which is 1" in message
    assert send(TEXT, "best_of", "1").status_code == 200
