"""Requests that would keep the server busy for others are refused before the work."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.served import Served

DEEP = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/completions",
            {"prompt": [[5] * 6000] * 4, "n": 2, "echo": True, "logprobs": 20, "max_tokens": 1},
            "logprobs",
        ),
        ("/generate", {"prompt": [5] * 7000, "n": 4, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a b " * 1_000_000, "max_tokens": 1}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 1_000_000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}, DEEP]}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [[] for _ in range(200_000)]}]}, None),
    ],
)
def test_what_is_too_much_is_refused(server: Served, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


ASKED = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
    ("/generate", {"prompt": [5, 6], "max_tokens": 1}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_priority_is_a_whole_number_within_bounds(server: Served, path: str, body: dict[str, Any]) -> None:
    for priority in (-1000, 0, 1000, None):
        answer = httpx.post(f"{server.url}{path}", json=body | {"priority": priority}, timeout=60)
        assert answer.status_code == 200, answer.text
    for priority in (-1001, 1001, 2**70, 0.5, "high", True):
        answer = httpx.post(f"{server.url}{path}", json=body | {"priority": priority}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "priority"


def test_a_developer_is_a_system_for_every_route(server: Served) -> None:
    counts = [
        httpx.post(
            f"{server.url}/tokenize",
            json={"messages": [{"role": role, "content": "Be short."}, {"role": "user", "content": "hi"}]},
            timeout=60,
        ).json()["tokens"]
        for role in ("system", "developer")
    ]
    assert counts[0] == counts[1]
