"""How requests end: by their deadline, and each with exactly one line."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.raw_http import (
    check_all_free,
    outcomes_since,
)
from tests.e2e.served import Served

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(server: Served, stream: bool) -> None:
    server.wait_idle()
    before = server.count_outcomes()
    body = LONG | {"deadline_seconds": 0.3, "stream": stream}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    (line,) = outcomes_since(server, before, 1)
    assert (line["outcome"], line["reason"]) == ("cancelled", "deadline_exceeded")
    if stream:
        assert answer.status_code == 200 and line["status"] == "200"
        assert "deadline_exceeded" in answer.text.strip().splitlines()[-1]
    else:
        assert answer.status_code == 504 and line["status"] == "504"
        assert answer.json()["error"]["code"] == "deadline_exceeded"
    check_all_free(server)


def test_every_request_has_exactly_one_line(server: Served) -> None:
    server.wait_idle()
    before = server.count_outcomes()
    short = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
    expected = []
    for path, body, outcome in (
        ("/generate", short, "length"),
        ("/generate", short | {"stream": True}, "length"),
        ("/generate", short | {"n": 3}, "length"),
        ("/v1/completions", short | {"prompt": ["a", "b"]}, "length"),
        ("/v1/chat/completions", chat | {"stream": True}, "length"),
        ("/v1/chat/completions", chat | {"no_such": 1}, "refused"),
        ("/v1/chat/completions", chat | {"model": "other"}, "refused"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}, None),
        ("/v1/messages", {"model": server.model, "max_tokens": 3} | {"messages": chat["messages"]}, None),
        ("/tokenize", {"prompt": "Hi"}, "finished"),
        ("/generate", short | {"prompt": ""}, "refused"),
        ("/generate", short | {"deadline_seconds": -1}, "refused"),
    ):
        httpx.post(f"{server.url}{path}", json=body, timeout=60)
        expected.append((path, outcome))
    httpx.post(f"{server.url}/generate", content=b"{", timeout=60)
    expected.append(("/generate", "refused"))
    lines = outcomes_since(server, before, len(expected))
    for line, (path, outcome) in zip(lines, expected, strict=True):
        assert line["route"] == path and outcome in (line["outcome"], None)
    assert len({line["request_id"] for line in lines}) == len(lines)
    assert [line["completion_tokens"] for line in lines[:4]] == ["3", "3", "9", "6"]
