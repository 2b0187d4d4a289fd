"""Where a thinking budget begins to count, where it stops, and what it forces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from glint.engine.thinking import CALL_NAME_TOKENS, ThinkingLimit, ThinkingTokens
from glint.sampling import SamplingParams

OPEN, CLOSE, CALL, CALL_END, KEY, BLANK, WORD = 40, 41, 42, 43, 44, 3, 7
TOKENS = ThinkingTokens(CLOSE, OPEN, CALL, CALL_END, KEY, lambda token: b" " if token == BLANK else b"w")
CLOSING = (11, 12)


def forced_after(
    written: Sequence[int], budget: int = 2, is_thinking: bool = True, closing: Sequence[int] = ()
) -> int | None:
    """The one token that may come behind what was written; None where every token may."""
    limit = ThinkingLimit(SamplingParams(thinking_budget=budget), TOKENS, closing, is_thinking, 45, None)
    for token in written:
        limit.accept(token)
    words = limit.mask()
    if words is None:
        return None
    assert len(words) == 2
    (forced,) = [token for token in range(64) if words[token // 32] >> token % 32 & 1]
    return forced


@pytest.mark.parametrize(
    ("written", "is_thinking", "forced"),
    [
        ([], True, None),
        ([WORD], True, None),
        ([WORD, BLANK], True, CLOSE),
        ([OPEN, WORD], True, CLOSE),
        ([WORD, CLOSE], True, None),
        ([WORD, WORD, CLOSE, WORD, WORD, WORD], True, None),
        ([WORD, WORD, CLOSE, OPEN], True, CLOSE),
        ([WORD, CLOSE, BLANK, OPEN, WORD], True, CLOSE),
        ([WORD, CLOSE, WORD, OPEN, WORD, WORD], True, None),
        ([], False, None),
        ([WORD, WORD, WORD], False, None),
        ([WORD, OPEN, WORD, WORD], False, None),
        ([OPEN, WORD], False, None),
        ([OPEN, WORD, WORD], False, CLOSE),
        ([BLANK, OPEN, WORD, WORD], False, CLOSE),
        ([CLOSE, OPEN, WORD, WORD], False, CLOSE),
        ([WORD, CALL_END, OPEN, WORD, WORD], False, CLOSE),
    ],
)
def test_thinking_is_counted_where_the_output_parser_finds_it(
    written: list[int], is_thinking: bool, forced: int | None
) -> None:
    assert forced_after(written, is_thinking=is_thinking) == forced


@pytest.mark.parametrize(
    ("written", "forced"),
    [
        ([CALL, WORD, WORD, WORD], None),
        ([CALL, WORD, KEY, *[WORD] * 100], None),
        ([CALL, WORD, CALL_END, WORD], None),
        ([CALL, WORD, CALL_END, OPEN], CLOSE),
        ([CALL, WORD, KEY, WORD, CALL_END, OPEN], CLOSE),
        ([CALL, *[WORD] * (CALL_NAME_TOKENS - 1)], None),
        ([CALL, *[WORD] * CALL_NAME_TOKENS], CLOSE),
        ([KEY, WORD], CLOSE),
        ([CALL, WORD, BLANK, WORD, CALL_END], CLOSE),
        ([CALL, WORD, BLANK, WORD, KEY], CLOSE),
        ([CALL, CALL_END], CLOSE),
        ([CALL, WORD, CALL], CLOSE),
    ],
)
def test_a_call_ends_thinking_and_what_never_becomes_one_does_not(written: list[int], forced: int | None) -> None:
    assert forced_after(written) == forced


def test_the_closing_text_comes_once_and_whole() -> None:
    begun = [WORD, WORD]
    for token in (*CLOSING, CLOSE):
        assert forced_after(begun, closing=CLOSING) == token
        begun.append(token)
    assert forced_after(begun, closing=CLOSING) is None
    assert forced_after([*begun, OPEN], closing=CLOSING) == CLOSE
    assert forced_after([WORD, CLOSE, OPEN, WORD], closing=CLOSING) == CLOSING[0], "it did not come yet"


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [([], False), ([WORD], False), ([OPEN], True), ([OPEN, WORD], True), ([OPEN, CLOSE], False), ([CLOSE, OPEN], True)],
)
def test_the_last_tag_of_a_prompt_says_whether_it_ends_inside_thinking(prompt: list[int], is_open: bool) -> None:
    assert TOKENS.ends_open(prompt) == is_open
