"""The glint command lines that deployment files hold, read by glint's own parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from glint.cli import make_parser, run_check, run_serve

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What glint makes of the words after its name; words that it refuses are an assertion error."""
    try:
        return make_parser().parse_args(list(words))
    except SystemExit as refusal:
        raise AssertionError(f"glint refuses: {' '.join(words)}") from refusal


def parse_serve(words: Sequence[str]) -> argparse.Namespace:
    """The flags of a `glint serve` line."""
    chosen = parse(words)
    assert chosen.run is run_serve, words
    return chosen


def parse_check(words: Sequence[str]) -> argparse.Namespace:
    """The flags of a `glint check` line."""
    chosen = parse(words)
    assert chosen.run is run_check, words
    return chosen


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """A text with its `${NAME}`, `${NAME:-default}` and `${NAME:?message}` filled in as a shell would."""

    def value_of(match: re.Match[str]) -> str:
        if values.get(match["name"]):
            return values[match["name"]]
        assert match["kind"] == "-", f"{match['name']} is needed: {match['text']}"
        return match["text"]

    return VARIABLE.sub(value_of, text)


def seconds(text: str) -> float:
    """A time such as 640s, 5s or 90, in seconds."""
    match = re.fullmatch(r"(\d+)s?", text)
    assert match is not None, text
    return float(match[1])
