"""Patterns that cost too much: refused at once where it shows, else the end of their own request alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.raw_http import check_all_free
from tests.e2e.served import Served

RARE = "(.*~.{0,400}){0,400}b"


def ask(server: Served, **fields: Any) -> httpx.Response:
    """A chat completion."""
    question = [{"role": "user", "content": "Say something."}]
    body = {"messages": question, "max_tokens": 80, "temperature": 0} | fields
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=180)


def with_pattern(pattern: str) -> dict[str, Any]:
    """The fields that ask for a text of this pattern."""
    return {"response_format": {"type": "regex", "pattern": pattern}}


def biased(server: Served) -> dict[str, Any]:
    """What makes the model write hardly anything but tildes and a's."""
    tokens = {}
    for text in ("~", "a"):
        answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=60)
        (tokens[text],) = answer.json()["tokens"]
    return {"logit_bias": {str(token): 100 for token in tokens.values()}, "temperature": 2, "seed": 3}


def test_a_pattern_that_fails_in_the_middle_is_refused_by_name(server: Served) -> None:
    answer = ask(server, **with_pattern(r"(\w+\s?){1,200}"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format" and "limit of work for one token" in error["message"]
    string = {"type": "string", "pattern": "[^\n]{1,500}"}
    schema = {"type": "object", "properties": {"a": string}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(server, response_format=named)
    assert answer.status_code == 400 and "between ^ and $" in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_pattern_that_fails_late_ends_its_own_request_alone(server: Served, is_streamed: bool) -> None:
    hostile = with_pattern(RARE) | biased(server) | {"stream": is_streamed}
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(ask, server, max_tokens=12)
        answer = ask(server, **hostile)
        beside = neighbour.result()
    assert beside.status_code == 200 and beside.json()["choices"][0]["message"]["content"]
    alone = ask(server, max_tokens=12)
    assert alone.json()["choices"][0]["message"] == beside.json()["choices"][0]["message"]
    if is_streamed:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if "choices" in event)
        assert set(text) <= set("~a") and "[DONE]" not in answer.text
        error = events[-1]["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error["code"] == "answer_failed" and "limit of" in error["message"]
    check_all_free(server)
