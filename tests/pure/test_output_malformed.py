"""Calls with tags left out, doubled or cut off: what is clear is read, nothing raises, the arguments stay JSON."""

from __future__ import annotations

import pytest

from glint.text.output import ParsedCall, ParsedOutput
from tests.pure.output_text import CALL_PARIS, REASONING, UNDECIDED, arguments_of, read, read_pieces

PARIS = ("get_weather", {"city": "Paris"})
PARIS_3 = ("get_weather", {"city": "Paris", "days": 3})


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris<arg_key>days</arg_key><arg_value>3</tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3"
        "</tool_call>",
        "<tool_call>get_weather<arg_key>city<arg_value>Paris</arg_value><arg_key>days<arg_value>3</arg_value></tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key>Paris</arg_value><arg_key>days</arg_key>\n3</arg_value></tool_call>",
        "<tool_call>get_weathercity</arg_key><arg_value>Paris</arg_value>days</arg_key><arg_value>3</arg_value>",
        "<tool_call>get_weather city</arg_key><arg_value>Paris</arg_value>\ndays</arg_key>\n<arg_value>3</arg_value>",
        "<tool_call>get_weather<arg_key><arg_key>city</arg_key></arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key></arg_key>\n<arg_value>3</arg_value></tool_call>",
        "<tool_call>get_weather</arg_value><arg_key>city</arg_value><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "<tool_call>get_weather<arg_key>note</arg_key><arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>scale</tool_call>",
    ],
    ids=[
        "no value ends",
        "no value end before the call end",
        "no key ends",
        "no value beginnings",
        "no key beginnings",
        "no key beginnings, with space",
        "doubled key tags",
        "the wrong closing tags",
        "keys without values",
    ],
)
def test_tags_that_are_missing_or_doubled(text: str) -> None:
    output = read(text)
    assert arguments_of(output) == [PARIS_3]
    assert output.content == ""
    assert arguments_of(read(f"{text}\n<tool_call>now</tool_call>"))[-1] == ("now", {})


def test_no_closing_tags_at_all() -> None:
    text = "<tool_call>get_weather<arg_key>city<arg_value>Paris<arg_key>days</arg_key>3"
    assert arguments_of(read(text)) == [PARIS_3]


def test_a_call_that_was_not_closed_before_the_next() -> None:
    open_call = CALL_PARIS.removesuffix("</tool_call>")
    assert arguments_of(read(f"{open_call}\n{CALL_PARIS}")) == [PARIS, PARIS]
    assert arguments_of(read(f"<tool_call>now<tool_call>now{CALL_PARIS}")) == [("now", {}), ("now", {}), PARIS]


def test_a_value_without_a_key_gets_the_empty_key() -> None:
    text = (
        "<tool_call>get_weather<arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    )
    assert arguments_of(read(text)) == [("get_weather", {"": "Paris", "days": 3})]


def test_a_key_that_comes_twice_counts_once() -> None:
    pair = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"
    pairs = pair.format("city", "Paris") + pair.format("city", "Rome") + pair.format("days", 3)
    assert arguments_of(read(f"<tool_call>get_weather{pairs}</tool_call>")) == [PARIS_3]


def test_a_closing_tag_that_nothing_opened_is_dropped() -> None:
    assert read(f"a</tool_call>b {CALL_PARIS}</tool_call>") == ParsedOutput(
        "", "ab ", (ParsedCall("get_weather", '{"city":"Paris"}'),)
    )
    assert arguments_of(read("<tool_call>now</arg_value>")) == [("now", {})]


def test_text_behind_a_name_and_a_stray_tag_is_content() -> None:
    output = read("<tool_call>now</arg_value>\n It is noon. </tool_call>")
    assert output == ParsedOutput("", "It is noon. ", (ParsedCall("now", "{}"),))


def test_a_tag_before_the_name_of_no_declared_argument_is_text_of_the_value() -> None:
    for value in ("a<arg_key>b</arg_key>c", "a<arg_key>cit", "a<arg_key>city</arg_key>c", "a</arg_value>days b"):
        text = f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert arguments_of(read(text)) == [("get_weather", {"city": value})]


def test_where_nothing_is_declared_any_word_is_a_next_key() -> None:
    text = "<tool_call>free<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</tool_call>"
    assert arguments_of(read(text)) == [("free", {"a": "1", "b": "2"})]
    text = "<tool_call>free<arg_key>a</arg_key><arg_value>1<arg_key>two words</arg_key></arg_value></tool_call>"
    assert arguments_of(read(text)) == [("free", {"a": "1<arg_key>two words</arg_key>"})]


def test_a_call_cut_off_anywhere_still_gives_an_object() -> None:
    text = (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Pa\\ris</arg_value>"
        '<arg_key>place</arg_key><arg_value>{"x": [1, 2]}</arg_value></tool_call>'
    )
    for length in range(len("<tool_call>get_weather"), len(text)):
        output = read_pieces([text[:length]])
        assert read_pieces(text[:length]) == output
        assert [call.name for call in output.calls] == ["get_weather"]
        assert output.content == ""
    assert arguments_of(read(text[: text.index(": [1")])) == [("get_weather", {"city": "Pa\\ris", "place": '{"x"'})]


def test_a_name_that_was_cut_off_is_never_called() -> None:
    assert read("<tool_call>get_weat") == ParsedOutput("", "", ())
    assert read("hm <tool_call>get_weat", REASONING) == ParsedOutput("hm ", "", ())
    assert read("<tool_call>get_weat", tools=()) == ParsedOutput("", "<tool_call>get_weat", ())


def test_an_unclosed_value_keeps_its_last_bytes() -> None:
    begin = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"
    for value in ("", " Par", "Paris\n", "Paris <t", "Paris <b", "Paris <arg_key>x"):
        assert arguments_of(read(begin + value)) == [("get_weather", {"city": value})]


def test_tags_in_any_order_never_raise() -> None:
    tags = (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    for first in tags:
        for second in tags:
            for third in tags:
                text = f"{first}now{second}city{third}"
                assert read_pieces(text, UNDECIDED) == read_pieces([text], UNDECIDED)
