"""What of a request is prepared on a worker thread, and what at once."""

from __future__ import annotations

import pytest

from glint.sampling import SamplingParams
from glint.server.generation.request import ChatPrompt, GenerationRequest, TextPrompt
from glint.text.grammar import Constraint, Regex

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
