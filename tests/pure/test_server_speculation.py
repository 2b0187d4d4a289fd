"""What clients see of speculation: counts of drafts, and counts of thinking that do not depend on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glint.server.generation.generation import Generation, Usage
from glint.server.openai.output import openai_usage

OPEN, CLOSE, OTHER = 7, 8, 1
TAGS = {"<think>": OPEN, "</think>": CLOSE}


def count(tokens: tuple[int, ...], was_reasoning: bool, is_reasoning: bool) -> int:
    """The tokens of thinking among those of one output."""
    generation: Any = SimpleNamespace(_state=SimpleNamespace(tokenizer=SimpleNamespace(token_to_id=TAGS.get)))
    return Generation._count_reasoning(generation, tokens, was_reasoning, is_reasoning)


@pytest.mark.parametrize("place", range(4))
def test_thinking_counts_the_same_in_one_output_as_in_many(place: int) -> None:
    tokens = [OTHER] * 4
    tokens[place] = CLOSE
    together = count(tuple(tokens), True, False)
    states = [index <= place for index in range(5)]
    singly = sum(count((token,), states[index], states[index + 1]) for index, token in enumerate(tokens))
    assert together == singly == place + 1


@pytest.mark.parametrize("place", range(4))
def test_thinking_that_begins_among_tokens_counts_from_there(place: int) -> None:
    tokens = [OTHER] * 4
    tokens[place] = OPEN
    assert count(tuple(tokens), False, True) == 3 - place


def test_outputs_on_one_side_count_whole_or_not_at_all() -> None:
    assert count((OTHER, OTHER, OTHER), True, True) == 3
    assert count((OTHER, OTHER), False, False) == 0


def test_usage_names_drafts_only_where_there_were_some() -> None:
    assert openai_usage(Usage(3))["completion_tokens_details"] == {"reasoning_tokens": 0}
    usage = Usage(prompt_tokens=3, completion_tokens=9, draft_tokens=10, accepted_draft_tokens=6)
    found = openai_usage(usage)
    assert found["completion_tokens"] == 9
    assert found["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 4,
    }
