"""How a request is prepared: on a worker thread or at once, its special tokens, and names of other servers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers.processors import TemplateProcessing

from glint.sampling import SamplingParams
from glint.server.auth import Tenant
from glint.server.generation.generation import Generation
from glint.server.generation.prepare import prepare
from glint.server.generation.request import ChatPrompt, GenerationRequest, TextPrompt
from glint.server.openai.chat import with_known_names
from glint.server.state import ServerState
from glint.text.grammar import Constraint, Regex
from glint.text.tokenizer import Tokenizer
from tests.pure.scripted_model import make_state
from tests.pure.text_folder import write_tokenizer

CHAT = ChatPrompt([{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize(
    ("prompt", "constraint", "needs_worker"),
    [
        (TextPrompt([1, 2, 3]), None, False),
        (TextPrompt([1, 2, 3]), Regex("a+"), True),
        (TextPrompt("Hello"), None, True),
        (CHAT, None, True),
    ],
)
def test_only_token_ids_without_a_grammar_are_prepared_at_once(
    prompt: ChatPrompt | TextPrompt, constraint: Constraint | None, needs_worker: bool
) -> None:
    assert GenerationRequest(prompt, SamplingParams(), 60.0, constraint).needs_worker is needs_worker


def test_a_text_gets_special_tokens_unless_they_are_turned_off(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    fast = Fast.from_file(str(path))
    first = fast.token_to_id("[gMASK]")
    fast.post_processor = TemplateProcessing(single="[gMASK] $A", special_tokens=[("[gMASK]", first)])
    fast.save(str(path))
    state = SimpleNamespace(tokenizer=Tokenizer(tmp_path), check_length=lambda *_: None, max_model_len=100)

    def tokens(*prompt: Any) -> list[int]:
        request = GenerationRequest(TextPrompt(*prompt), SamplingParams(max_tokens=1), 60.0)
        return list(prepare(cast(ServerState, state), request, Tenant(0)).engine_request.prompt_tokens)

    assert tokens("hello") == tokens("hello", True) == [first, *tokens("hello", False)] == fast.encode("hello").ids


def test_the_time_to_the_first_token_counts_when_the_token_is_there(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as workers:
        state = make_state(tmp_path, 0, workers)
    service: Any = state.service
    service.script = ["one two three"]
    request = GenerationRequest(TextPrompt([1, 2, 3]), SamplingParams(max_tokens=8), 60.0)

    def first_tokens() -> dict[str, Any]:
        return dict(state.metrics.as_dict()["time_to_first_token_seconds"])

    async def generate() -> None:
        generation = Generation(state, [prepare(state, request, Tenant(0))], seconds_gone=100.0)
        await generation.begin()
        assert first_tokens()["count"] == 0
        async for _ in generation.deltas():
            assert first_tokens()["count"] == 1 and first_tokens()["sum"] >= 100.0
        generation.close()

    asyncio.run(generate())
    assert service.script == [] and first_tokens()["count"] == 1


@pytest.mark.parametrize(
    ("message", "known"),
    [
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "assistant", "reasoning": "a"}, {"role": "assistant", "reasoning_content": "a"}),
        (
            {"role": "assistant", "reasoning": "a", "reasoning_content": "a"},
            {"role": "assistant", "reasoning_content": "a"},
        ),
        (
            {"role": "assistant", "reasoning": "a", "reasoning_content": "b"},
            {"role": "assistant", "reasoning": "a", "reasoning_content": "b"},
        ),
        (
            {"role": "assistant", "reasoning": None, "reasoning_content": "b"},
            {"role": "assistant", "reasoning": None, "reasoning_content": "b"},
        ),
    ],
)
def test_names_of_other_servers_in_messages(message: dict[str, Any], known: dict[str, Any]) -> None:
    assert with_known_names(message) == known
