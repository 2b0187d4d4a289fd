"""The flags of speculation: ours, vLLM's and SGLang's."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from glint.flags import add_engine_flags, engine_args


def parse(*words: str) -> Any:
    """The number of drafts that a command line asks for."""
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_args(parser.parse_args(words)).num_speculative_tokens


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "auto"),
        (("--num-speculative-tokens", "auto"), "auto"),
        (("--num-speculative-tokens", "0"), 0),
        (("--speculative-num-steps", "3"), 3),
        (("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'), 2),
        (("--speculative-config", '{"method": "glm4_moe_mtp", "num_speculative_tokens": 1}'), 1),
        (("--speculative-config", ' {"num_speculative_tokens": 4}'), 4),
        (("--speculative-config", '{"method": "mtp"}'), "auto"),
    ],
)
def test_all_spellings_are_read(words: tuple[str, ...], expected: Any) -> None:
    assert parse(*words) == expected


@pytest.mark.parametrize(
    "text",
    [
        "some",
        "",
        "1.5",
        "{",
        '{"method": "ngram", "num_speculative_tokens": 2}',
        '{"method": "mtp", "num_speculative_tokens": true}',
        '{"method": "mtp", "num_speculative_tokens": "2"}',
        '{"method": "mtp", "model": "other", "num_speculative_tokens": 2}',
    ],
)
def test_what_is_not_known_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--speculative-config", text)
    assert f"'{text}' is not a value of it" in capsys.readouterr().err
