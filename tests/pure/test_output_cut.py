"""Answers that end anywhere: no part of a tag gets into names, arguments, reasoning or content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glint.text.output import OutputParser, ParsedCall, ParsedOutput, parse_output
from glint.text.tools import Tool
from tests.pure.output_text import (
    CALL_PARIS,
    CONTENT,
    PLAIN,
    REASONING,
    TOOLS,
    UNDECIDED,
    arguments_of,
    read_pieces,
    write_call_45,
    write_call_47,
    write_value,
)
from tests.pure.test_output_splits import TAGS

CITY = Tool("pick", parameters={"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}})
COUNT = Tool("count", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
CUT = None


def read_cut(text: str, tools: tuple[Tool, ...] = TOOLS) -> ParsedOutput:
    """What a text gives that was cut, read at once and character by character."""
    output = parse_output(text, CONTENT, tools, followed_by=CUT)
    assert read_pieces(text, CONTENT, tools, followed_by=CUT) == output
    return output


def test_an_enumerated_value_before_a_cut_closing_tag() -> None:
    text = "<tool_call>pick<arg_key>city</arg_key><arg_value>Paris</arg_value></too"
    for end in ("", "<", "</", "</too", "</tool_call", "</tool_call>", "\n", "\n<arg_", "<arg_key>", "<arg_key>ci"):
        cut = text.removesuffix("</too") + end
        for pieces in (read_pieces(cut, tools=[CITY], followed_by=CUT), read_pieces([cut], tools=[CITY])):
            assert pieces == ParsedOutput("", "", (ParsedCall("pick", '{"city":"Paris"}'),))


def test_a_key_before_a_cut_value_tag() -> None:
    begin = "<tool_call>count<arg_key>n</arg_key>"
    for end in ("", "<", "<arg_", "<arg_value", "\n", "\n<arg_", "</arg", "<tool_c"):
        assert read_cut(begin + end, (COUNT,)) == ParsedOutput("", "", (ParsedCall("count", "{}"),))


@pytest.mark.parametrize("start", [CONTENT, UNDECIDED, PLAIN])
@pytest.mark.parametrize(
    "text", ["<tool_call>", "<tool_call>\n", "<tool_call>get_wea", "\n<tool_call>get_wea", "\n<tool_"]
)
def test_a_cut_in_the_name_gives_neither_call_nor_content(start: Any, text: str) -> None:
    blank = "\n" if text == "\n<tool_" and start is not CONTENT else ""
    assert parse_output(text, start, TOOLS, followed_by=CUT) == ParsedOutput("", blank, ())
    assert read_pieces(text, start, followed_by=CUT) == ParsedOutput("", blank, ())


def test_a_dangling_call_tag_is_not_shown() -> None:
    assert parse_output("why <tool_call>", REASONING, TOOLS) == ParsedOutput("why ", "", ())
    assert parse_output("a\n<tool_call>", CONTENT, TOOLS) == ParsedOutput("", "a\n", ())
    assert parse_output(f"{CALL_PARIS}\n<tool_call>", CONTENT, TOOLS).content == ""


def test_the_name_of_another_tool_is_not_called_where_the_name_may_go_on() -> None:
    assert read_cut("<tool_call>get") == ParsedOutput("", "", ())
    for end in ("\n", "<", "</tool", "<arg_k", "<arg_key>"):
        assert read_cut(f"<tool_call>get{end}").calls == (ParsedCall("get", "{}"),)
    assert read_cut("<tool_call>now").calls == (ParsedCall("now", "{}"),)
    assert read_cut("<tool_call>get_weather city").calls == ()
    assert read_cut("<tool_call>get_weathercity</arg_k") == ParsedOutput("", "", ())


def test_prose_behind_a_call_tag_is_content_to_its_end() -> None:
    text = "the tag <tool_call> opens a call, and a <"
    assert parse_output(text, CONTENT, TOOLS) == ParsedOutput("", text, ())
    assert parse_output(text, CONTENT, TOOLS, followed_by=CUT) == ParsedOutput("", text[:-1], ())


def test_a_partial_tag_at_the_end_of_content_counts_only_where_the_answer_was_cut() -> None:
    for tail in ("<", "<tool_ca", "</thi"):
        assert parse_output(f"a {tail}", CONTENT, TOOLS) == ParsedOutput("", f"a {tail}", ())
        assert parse_output(f"a {tail}", CONTENT, TOOLS, followed_by=CUT) == ParsedOutput("", "a ", ())
        assert parse_output(f"a {tail}", REASONING, TOOLS, followed_by=CUT) == ParsedOutput("a ", "", ())
    assert parse_output("a <tool_ca", CONTENT, (), followed_by=CUT) == ParsedOutput("", "a <tool_ca", ())
    assert parse_output("a </thi", PLAIN, (), followed_by=CUT) == ParsedOutput("", "a </thi", ())


def test_a_partial_tag_before_a_stop_string_is_text_unless_they_make_a_tag_together() -> None:
    assert parse_output("if a <", CONTENT, TOOLS, followed_by="\n\n") == ParsedOutput("", "if a <", ())
    assert parse_output("look: <", CONTENT, TOOLS, followed_by="tool_call>now") == ParsedOutput("", "look: ", ())
    assert parse_output("look: <too", CONTENT, TOOLS, followed_by="l") == ParsedOutput("", "look: ", ())


def test_a_partial_tag_that_cannot_end_a_value_is_its_text() -> None:
    begin = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"
    for end in ("<th", "<tool_ca", "</think", "<b", "<arg_v"):
        assert arguments_of(read_cut(f"{begin}Paris {end}")) == [("get_weather", {"city": f"Paris {end}"})]
    for end in ("<", "</", "<arg_k", "</arg_value", "</tool_", "<arg_key>", "<arg_key>da", "</arg_value>da"):
        assert arguments_of(read_cut(f"{begin}Paris {end}")) == [("get_weather", {"city": "Paris "})]


def test_the_end_of_an_undeclared_call_is_content_as_far_as_it_came() -> None:
    text = "<tool_call>unknown<arg_key>k</arg_key><arg_value>v"
    assert read_cut(text) == ParsedOutput("", text, ())
    assert read_cut(f"{text}</arg_va") == ParsedOutput("", text, ())


ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("get_weather", {"city": "Paris", "days": 12, "scale": -1.5e3, "is_metric": True, "hours": [1, 22], "note": None}),
    ("get_weather", {"place": {"x": [1, {"y": "a < b"}], "z": "</b>"}, "city": 'a <b> & \\ "c" é🌍 <tool <arg </'}),
    ("now", {}),
    ("write_file", {"path": "a < b", "text": "x <tool_call>now</tool_call> y </arg_value> z <think>"}),
    ("get", {"key": ""}),
    ("free", {"a": "1", "b": " two\n"}),
)


def check_cut(text: str, whole: ParsedOutput, calls: list[tuple[str, dict[str, Any]]], **options: Any) -> None:
    """That what a cut text gives is a beginning of what the whole text gives."""
    output = parse_output(text, followed_by=CUT, **options)
    assert read_pieces(text, followed_by=CUT, **options) == output
    assert whole.reasoning.startswith(output.reasoning) and whole.content.startswith(output.content)
    assert not any(tag[:2] in output.content + output.reasoning for tag in TAGS)
    found = arguments_of(output)
    assert [name for name, _ in found] == [name for name, _ in calls[: len(found)]]
    assert found[:-1] == calls[: max(0, len(found) - 1)]
    if not found:
        return
    given, wanted = list(found[-1][1].items()), list(calls[len(found) - 1][1].items())
    assert given[:-1] == wanted[: max(0, len(given) - 1)]
    if given:
        assert given[-1][0] == wanted[len(given) - 1][0]
        assert write_value(wanted[len(given) - 1][1]).startswith(write_value(given[-1][1]))


@pytest.mark.parametrize("write", [write_call_45, write_call_47])
@pytest.mark.parametrize("start", [REASONING, CONTENT, UNDECIDED])
def test_every_cut_of_whole_answers_gives_their_beginning(write: Any, start: Any) -> None:
    before = "why\n</think>\nLet me look.\n" if start is REASONING else "Let me look.\n"
    text = before + "\n".join(write(name, arguments) for name, arguments in ARGUMENTS)
    whole = parse_output(text, start, TOOLS)
    calls = arguments_of(whole)
    assert calls == list(ARGUMENTS)
    for length in range(len(text) + 1):
        check_cut(text[:length], whole, calls, start=start, tools=TOOLS)


def test_every_cut_of_an_answer_under_an_enumeration() -> None:
    text = write_call_47("pick", {"city": "Paris"}) + write_call_47("pick", {"city": "Rome"})
    whole = parse_output(text, CONTENT, (CITY,))
    for length in range(len(text) + 1):
        check_cut(text[:length], whole, arguments_of(whole), start=CONTENT, tools=(CITY,))


def test_no_more_is_held_back_than_may_be_a_tag() -> None:
    parser = OutputParser(CONTENT, TOOLS)
    parser.push("<tool_call>write_file<arg_key>text</arg_key><arg_value>")
    held = ""
    for character in "a < b <c> </d> <arg <too </t x":
        (text,) = [event.text for event in parser.push(character)] or [""]
        held += character
        assert held.startswith(text)
        held = held[len(json.loads(f'"{text}"')) :]
        assert not held or any(tag.startswith(held) for tag in TAGS)
