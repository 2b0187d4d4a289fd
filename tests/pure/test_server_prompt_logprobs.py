"""One entry of prompt_logprobs: the token itself first, then the likeliest with their ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from glint.server.openai.output import prompt_entry
from glint.text.tokenizer import Tokenizer

TOKENIZER = cast(Tokenizer, SimpleNamespace(token_bytes=lambda token: b"t%d" % token))


@pytest.mark.parametrize(
    ("known", "count", "num_ranked", "ranks"),
    [
        ({7: -1.0, 3: -0.5}, 2, 2, {"7": 2, "3": 1}),
        ({7: -9.0, 3: -0.5, 4: -1.0}, 2, 2, {"7": None, "3": 1, "4": 2}),
        ({7: -1.0, 3: -0.5, 4: -1.0}, 2, 2, {"7": None, "3": 1, "4": 2}),
        ({7: -3.0, 3: -0.5, 4: -1.0}, 1, 3, {"7": 3, "3": 1}),
        ({7: -3.0}, 0, 0, {"7": None}),
        ({7: float("-inf")}, 1, 1, {"7": 1}),
    ],
)
def test_ranks(known: dict[int, float], count: int, num_ranked: int, ranks: dict[str, int | None]) -> None:
    entry: dict[str, Any] = msgspec.json.decode(bytes(prompt_entry(7, known, TOKENIZER, count, num_ranked)))
    assert [(token, one["rank"]) for token, one in entry.items()] == [*ranks.items()]
    assert all(one["decoded_token"] == f"t{token}" for token, one in entry.items())
    assert all(one["logprob"] == max(known[int(token)], -9999.0) for token, one in entry.items())
