"""Chats that think, on a server whose cache is too small for their thinking: what their second turns find there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.served import served
from tests.e2e.small_glm import write_small_glm

NUM_CHATS = 6
PAGE_TOKENS = 16
PAGE_BYTES = 8192
NUM_PAGES = 64
THINKING_TOKENS = 400


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server whose pages hold all questions and the thinking of two chats."""
    folder = tmp_path_factory.mktemp("reuse")
    flags = ("--kv-cache-memory-bytes", str(NUM_PAGES * PAGE_BYTES), "--max-model-len", "1024")
    model = str(write_small_glm(folder / "glm"))
    with (
        served(folder / "log", "--model", model, *flags) as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        assert sum(running.stats()["pages"].values()) == NUM_PAGES
        yield client


def ask(http: httpx.Client, messages: list[Any], max_tokens: int, **fields: Any) -> tuple[int, int]:
    """Prompt tokens of a chat and how many of them were cached; the model thinks and calls nothing."""
    call = http.post("/tokenize", json={"prompt": "<tool_call>", "add_special_tokens": False}).json()["tokens"]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    answer = http.post("/v1/chat/completions", json=body | {"logit_bias": {str(token): -100 for token in call}})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def second_turns(http: httpx.Client, thinking_tokens: int, **fields: Any) -> list[bool]:
    """For each chat, whether its second turn finds every full page of its first question."""
    questions = [[{"role": "user", "content": f"{index} " + "hello world " * 20}] for index in range(NUM_CHATS)]
    lengths = [ask(http, question, thinking_tokens, **fields)[0] for question in questions]
    answer = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
    found = [ask(http, question + answer, 1, **fields)[1] for question in questions]
    return [hits >= (length - 1) // PAGE_TOKENS * PAGE_TOKENS for hits, length in zip(found, lengths, strict=True)]


def test_dropped_thinking_takes_no_hits_from_second_turns(http: httpx.Client) -> None:
    """Salts keep the three rounds apart."""
    assert all(second_turns(http, 1, cache_salt="without thinking"))
    assert all(second_turns(http, THINKING_TOKENS, cache_salt="dropped"))
    assert not any(second_turns(http, THINKING_TOKENS, cache_salt="kept", clear_thinking=False)[: NUM_CHATS // 2])
