"""Properties over generated outputs: the pieces do not matter, the arguments are JSON, what was written is read."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from glint.text.output import OutputStart, ParsedOutput, parse_output
from glint.text.tools import Tool
from tests.pure.output_text import (
    CALL_PARIS,
    PLAIN,
    REASONING,
    TOOLS,
    UNDECIDED,
    arguments_of,
    read,
    read_pieces,
    write_call_45,
    write_call_47,
)

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
WORDS = (
    "get_weather",
    "now",
    "get",
    "city",
    "days",
    "place",
    "note",
    "unknown",
    "5",
    "null",
    '{"a": 1}',
    "[",
    '"',
    "\\",
)
BITS = ("<", "</", ">", "<tool_", "</arg_", "\n", " ", "\r\n", "\t", "\u3000", "é", "🌍", "\u0301", "\u2028", "\x00")
STARTS = st.sampled_from(list(OutputStart))

noise = st.lists(st.one_of(st.sampled_from(TAGS + WORDS + BITS), st.text(max_size=5)), max_size=25).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(max_size=20) | st.sampled_from(["5", "null", "a < b", " x\n", "<b>", "</tool_call", "\\n"]),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "object": st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    "array": st.lists(json_values, max_size=3),
}


def holds_tag(value: Any) -> bool:
    """Whether a value would be written with a tag in it."""
    written = json.dumps(value, ensure_ascii=False)
    return any(tag in written for tag in TAGS)


@st.composite
def outputs(draw: st.DrawFn) -> str:
    """An output of real structure, with noise in it, and with some of its characters left out."""
    parts = [draw(noise) + "</think>"] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 3))):
        parts.append(draw(noise) if draw(st.booleans()) else "\n")
        write = draw(st.sampled_from([write_call_45, write_call_47]))
        names = st.sampled_from(["city", "days", "place", "note", "other"])
        arguments = draw(st.dictionaries(names, st.one_of(*BY_TYPE.values(), noise), max_size=3))
        parts.append(write(draw(st.sampled_from(["get_weather", "now", "unknown"])), arguments))
    text = "".join(parts)
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(text)))
        text = text[:begin] + draw(noise) + text[begin + draw(st.integers(0, 12)) :]
    return text


def cut(text: str, places: list[int]) -> list[str]:
    """The text cut at some places, counted modulo its length."""
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in itertools.pairwise(marks)]


@given(noise | outputs(), STARTS, st.booleans(), st.lists(st.integers(0, 10_000), max_size=30), st.integers(0, 5))
def test_pieces_do_not_matter(
    text: str, start: OutputStart, discards_calls: bool, places: list[int], num_tools: int
) -> None:
    tools = TOOLS[:num_tools]
    expected = parse_output(text, start, tools, discards_calls)
    assert read_pieces(cut(text, places), start, tools, discards_calls) == expected
    assert read_pieces(text, start, tools, discards_calls) == expected
    assert not (discards_calls and expected.calls)


@given(noise | outputs(), STARTS)
def test_every_cut_into_two_gives_the_same(text: str, start: OutputStart) -> None:
    read(text[:300], start)


def test_every_cut_of_whole_answers() -> None:
    arguments = {"city": 'a "b"\n\\ é🌍 <b>', "days": 3, "place": {"x": [None]}, "note": None}
    for write in (write_call_45, write_call_47):
        call = write("get_weather", arguments)
        text = f"<think>a < b</think>\n\nLet me.\n{call}\n<tool_call>unknown<arg_key>k</arg_key></tool_call>{call}\n"
        output = read(text, UNDECIDED)
        assert arguments_of(output) == [("get_weather", arguments)] * 2
        assert output.reasoning == "a < b"
        assert output.content == "Let me.\n\n<tool_call>unknown<arg_key>k</arg_key></tool_call>"


@given(
    st.text(alphabet=st.one_of(st.characters(exclude_characters=">"), st.sampled_from("< /tahrgkc_\n")), max_size=60)
)
def test_a_text_without_a_whole_tag_is_unchanged(text: str) -> None:
    assert read_pieces(text, UNDECIDED) == read_pieces([text], PLAIN) == ParsedOutput("", text, ())
    assert read_pieces(text, REASONING) == ParsedOutput(text, "", ())


WITHOUT_CALLS = st.text(max_size=60).filter(lambda text: "<tool_call>" not in text)


@given(WITHOUT_CALLS, WITHOUT_CALLS)
def test_content_around_a_call_is_unchanged(before: str, after: str) -> None:
    text = f".{before}{CALL_PARIS}.{after}"
    assert parse_output(text, PLAIN, TOOLS).content == f".{before}.{after}"


@given(st.data())
def test_calls_that_were_written_are_read_back(data: st.DataObject) -> None:
    names = st.text(alphabet="abcXYZ_09-é", min_size=1, max_size=8)
    types = data.draw(st.dictionaries(names, st.sampled_from(sorted(BY_TYPE)), max_size=4))
    tool = Tool("call_it", parameters={"properties": {name: {"type": kind} for name, kind in types.items()}})
    calls = []
    for _ in range(data.draw(st.integers(1, 3))):
        given_names = data.draw(st.permutations(sorted(types)))
        pairs = (
            (name, data.draw(BY_TYPE[types[name]].filter(lambda value: not holds_tag(value)))) for name in given_names
        )
        calls.append(("call_it", dict(pairs)))
    for write in (write_call_45, write_call_47):
        text = "\n".join(write(name, arguments) for name, arguments in calls)
        places = data.draw(st.lists(st.integers(0, 10_000), max_size=10))
        output = read_pieces(cut(text, places), tools=[tool])
        assert arguments_of(output) == calls
        assert output.content == ""


@given(st.text(max_size=10).flatmap(lambda text: st.permutations([text, *TAGS[2:5]])).map("".join), st.booleans())
def test_tags_inside_a_closed_string_are_kept(value: str, is_last: bool) -> None:
    """Only a value end that structure follows, or a call end that a call follows, cannot be told from the real one."""
    arguments = {"text": value + "."} if is_last else {"text": value + ".", "path": "p"}
    tool = Tool("write", parameters={"properties": {"text": {"type": "string"}, "path": {"type": "string"}}})
    assume("</tool_call><tool_call>" not in "".join(value.split()))
    assert arguments_of(read_pieces(write_call_47("write", arguments), tools=[tool])) == [("write", arguments)]
