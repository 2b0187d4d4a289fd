"""The cost of reading is linear in the text, however it is cut and whatever it says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from glint.text import arguments, tags
from glint.text.output import OutputParser, OutputStart, parse_output
from glint.text.tools import Tool
from tests.pure.output_text import read_pieces

VALUE = "<tool_call>write<arg_key>text</arg_key><arg_value>"
NUMBER = "<tool_call>write<arg_key>size</arg_key><arg_value>"
WRITE = Tool("write", parameters={"properties": {"text": {"type": "string"}, "size": {"type": ["integer", "object"]}}})
HARD_TEXTS = {
    "opening brackets": ("", "<"),
    "tag beginnings": ("", "</tool_cal"),
    "keys in content": ("", "<arg_key>"),
    "calls without names": ("", "<tool_call>"),
    "think tags": ("a", "</think><think>"),
    "space at an edge": ("", " "),
    "calls": ("", "<tool_call>write</tool_call>\n"),
    "undeclared calls": ("", "<tool_call>x<arg_key>"),
    "a string that grows": (VALUE, "word "),
    "keys in a value": (VALUE, "<arg_key>"),
    "key beginnings in a value": (VALUE, "<arg_key>siz"),
    "value ends in a value": (VALUE, "</arg_value> "),
    "call ends in a value": (VALUE, "</tool_call> "),
    "space behind a value": (VALUE + "</arg_value>", " "),
    "a key that grows": ("<tool_call>write<arg_key>", "word "),
    "a number that grows": (NUMBER, "1"),
    "an object that grows": (NUMBER + "{", '"a": [1, 2], '),
    "escaped quotes": (NUMBER + '"', '\\"'),
    "brackets": (NUMBER, "[{"),
}


class CountingPattern:
    """A pattern that adds up how many characters it is given to search."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.num_characters = 0
        self._pattern = pattern

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        """The matches, as the pattern itself finds them."""
        self.num_characters += len(text)
        return self._pattern.finditer(text)


def count_steps(text: str, piece_length: int) -> int:
    """How many Python lines run while the text is read."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    parser = OutputParser(OutputStart.UNDECIDED, [WRITE])
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for begin in range(0, len(text), piece_length):
            parser.push(text[begin : begin + piece_length])
        parser.finish()
    finally:
        sys.settrace(previous)
    return num_lines


@pytest.mark.parametrize("name", HARD_TEXTS)
@pytest.mark.parametrize("piece_length", [1, pytest.param(100_000, marks=pytest.mark.slow)])
def test_twice_the_text_takes_twice_the_steps(name: str, piece_length: int) -> None:
    head, unit = HARD_TEXTS[name]
    length = 2 * 1024
    once = count_steps(head + unit * (length // len(unit)), piece_length)
    twice = count_steps(head + unit * (2 * length // len(unit)), piece_length)
    assert twice < 2.1 * once + 500


@pytest.mark.parametrize("name", HARD_TEXTS)
@pytest.mark.parametrize("piece_length", [7, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_every_character_is_searched_a_bounded_number_of_times(
    name: str, piece_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_tags, for_brackets = CountingPattern(tags.ALL_PATTERN), CountingPattern(arguments.BRACKET)
    monkeypatch.setattr(tags, "ALL_PATTERN", for_tags)
    monkeypatch.setattr(arguments, "BRACKET", for_brackets)
    head, unit = HARD_TEXTS[name]
    text = head + unit * (20_000 // len(unit))
    parser = OutputParser(OutputStart.UNDECIDED, [WRITE])
    for begin in range(0, len(text), piece_length):
        parser.push(text[begin : begin + piece_length])
    parser.finish()
    num_pieces = len(text) // piece_length + 1
    assert len(text) <= for_tags.num_characters <= len(text) + num_pieces * tags.MAX_TAIL
    assert for_brackets.num_characters <= len(text)


@pytest.mark.parametrize("name", HARD_TEXTS)
def test_long_texts_read_at_once_and_in_pieces_give_the_same(name: str) -> None:
    head, unit = HARD_TEXTS[name]
    text = head + unit * (20_000 // len(unit))
    pieces = (text[begin : begin + 997] for begin in range(0, len(text), 997))
    assert read_pieces(pieces, OutputStart.UNDECIDED, [WRITE]) == parse_output(text, OutputStart.UNDECIDED, [WRITE])
