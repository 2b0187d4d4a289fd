"""Well-formed calls in both formats: names, arguments as they stream, indexes, and calls that are not wanted."""

from __future__ import annotations

import pytest

from glint.text.output import (
    ContentText,
    OutputParser,
    ParsedCall,
    ParsedOutput,
    ToolCallArguments,
    ToolCallBegun,
    ToolCallEnded,
)
from glint.text.tools import Tool
from tests.pure.output_text import (
    CALL_PARIS,
    CONTENT,
    PLAIN,
    REASONING,
    TOOLS,
    UNDECIDED,
    arguments_of,
    read,
    write_call_45,
    write_call_47,
)

PARIS = ParsedCall("get_weather", '{"city":"Paris"}')
NOW_CALL = ParsedCall("now", "{}")
UNKNOWN = "<tool_call>fly<arg_key>to</arg_key>\n<arg_value>the <moon></arg_value></tool_call>"


def test_one_call_in_the_format_of_each_model() -> None:
    arguments = {"city": "Paris", "days": 3, "hours": [1, 2], "place": {"x": {"y": None}}, "is_metric": True}
    for text in (write_call_47("get_weather", arguments), write_call_45("get_weather", arguments)):
        assert arguments_of(read(text)) == [("get_weather", arguments)]
        assert read(text).content == ""


def test_reasoning_content_and_two_calls_with_line_ends_between_them() -> None:
    text = f"why\n</think>\n\nI look.\n\n{CALL_PARIS}\n<tool_call>now\n</tool_call>\n"
    assert read(text, REASONING) == ParsedOutput("why\n", "I look.\n\n", (PARIS, NOW_CALL))


def test_space_that_touches_a_call_is_dropped() -> None:
    assert read(f"why</think> \n {CALL_PARIS} \n ", REASONING) == ParsedOutput("why", "", (PARIS,))
    for start in (PLAIN, UNDECIDED, CONTENT):
        assert read(f" \n{CALL_PARIS}\n", start) == ParsedOutput("", "", (PARIS,))


def test_text_between_and_after_calls_is_content() -> None:
    text = f"one {CALL_PARIS}\ntwo\n{CALL_PARIS} three "
    assert read(text) == ParsedOutput("", "one \ntwo\n three ", (PARIS, PARIS))


def test_the_name_comes_once_and_whole_and_strings_stream() -> None:
    parser = OutputParser(CONTENT, TOOLS)
    assert parser.push("<tool_call>get") == []
    assert parser.push("_weather\n") == []
    assert parser.push("<arg_key>") == [ToolCallBegun(0, "get_weather")]
    assert parser.push("city") == []
    assert parser.push("</arg_key>\n<arg_value>") == [ToolCallArguments(0, '{"city":"')]
    assert parser.push(' New "Y') == [ToolCallArguments(0, ' New \\"Y')]
    assert parser.push("ork\n<") == [ToolCallArguments(0, "ork\\n")]
    assert parser.push("b>") == [ToolCallArguments(0, "<b>")]
    assert parser.push("</arg_value>") == []
    assert parser.push("\n<arg_key>days</arg_key><arg_value>") == [ToolCallArguments(0, '","days":')]
    assert parser.push("1") == []
    assert parser.push("2") == []
    assert parser.push("</arg_value></tool_call>") == [ToolCallArguments(0, "12}"), ToolCallEnded(0)]
    assert parser.push("<tool_call>now</tool_call>") == [
        ToolCallBegun(1, "now"),
        ToolCallArguments(1, "{}"),
        ToolCallEnded(1),
    ]
    assert parser.finish() == []


def test_keys_are_stripped_and_values_are_not() -> None:
    value = " \n\t two  words \r\n "
    text = f"<tool_call> get_weather \n<arg_key> city\n</arg_key> \n <arg_value>{value}</arg_value> \n </tool_call>"
    assert arguments_of(read(text)) == [("get_weather", {"city": value})]


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        'say "hi" \\ \\n \\u0041 / \b\f\x00\x1f\x7f',
        "line\r\nline\u2028line",
        "naïve 東京 🌍 \u0301e",
        "&lt;b&gt; <b>a < b</b> <<<< </ <arg <tool_call <arg_key",
        '{"a": [1, 2]}',
        "null",
        "123",
        "<think>hm</think>",
        "x <tool_call>now</tool_call> y",
        "a </tool_call> b",
        "a </arg_value> b",
        "a <arg_key>b</arg_key> c",
        "<arg_value>",
        "</arg_value></arg_value>",
        "re.compile('<arg_key>(.*?)</arg_key>\\\\s*<arg_value>(.*?)</arg_value>')",
    ],
)
def test_the_bytes_of_a_string_are_untouched(value: str) -> None:
    arguments = {"path": "a.py", "text": value}
    for text in (write_call_47("write_file", arguments), write_call_45("write_file", arguments)):
        assert arguments_of(read(text)) == [("write_file", arguments)]


def test_a_call_of_an_undeclared_tool_is_content_verbatim() -> None:
    assert read(f"a\n{UNKNOWN}\nb") == ParsedOutput("", f"a\n{UNKNOWN}\nb", ())
    assert read(f"why</think>\n{UNKNOWN}", REASONING) == ParsedOutput("why", UNKNOWN, ())
    assert read(f"why{UNKNOWN} b", REASONING) == ParsedOutput("why", f"{UNKNOWN} b", ())
    assert read(f"{UNKNOWN}{CALL_PARIS}{UNKNOWN}") == ParsedOutput("", UNKNOWN * 2, (PARIS,))
    assert read(UNKNOWN[:-20]) == ParsedOutput("", UNKNOWN[:-20], ())


def test_space_before_the_reasoning_is_no_content_of_a_call_that_ends_it() -> None:
    assert read(f"\n <think>why{UNKNOWN}", UNDECIDED) == ParsedOutput("why", UNKNOWN, ())
    assert read(f"\n <think>why{CALL_PARIS}", UNDECIDED) == ParsedOutput("why", "", (PARIS,))


def test_with_no_tools_every_call_is_undeclared() -> None:
    assert read(f"a {CALL_PARIS} b", tools=()) == ParsedOutput("", f"a {CALL_PARIS} b", ())


def test_names_are_compared_whole() -> None:
    for name in ("get_weathers", "Get_weather", "weather", "ge"):
        text = f"<tool_call>{name}</tool_call>"
        assert read(text) == ParsedOutput("", text, ())
    assert read("<tool_call>get<arg_key>key</arg_key><arg_value>v</arg_value></tool_call>").calls == (
        ParsedCall("get", '{"key":"v"}'),
    )


def test_unwanted_calls_are_dropped_with_all_their_markup() -> None:
    text = f"why</think>\n{CALL_PARIS}\nanswer\n{UNKNOWN}\n<tool_call></tool_call>{CALL_PARIS[:50]}"
    assert read(text, REASONING, discards_calls=True) == ParsedOutput("why", "\nanswer\n", ())
    assert read(f"why{CALL_PARIS}answer", REASONING, discards_calls=True) == ParsedOutput("why", "answer", ())
    assert read("<tool_call>get_wea", discards_calls=True) == ParsedOutput("", "", ())
    assert read(CALL_PARIS, tools=(), discards_calls=True) == ParsedOutput("", "", ())


def test_unwanted_tags_that_are_no_call_do_not_take_the_answer_with_them() -> None:
    answer = " is the tag that opens a call, and a name follows it. " * 8
    output = read(f"<tool_call>{answer}</tool_call>", CONTENT, discards_calls=True)
    assert output == ParsedOutput("", answer, ())


def test_a_call_tag_that_no_name_follows_is_text() -> None:
    for text in ("<tool_call></tool_call>", "<tool_call>two words</tool_call>", "a <tool_call> b"):
        assert read(text) == ParsedOutput("", text, ())
    long = "<tool_call>" + "word " * 100 + "</tool_call>"
    assert read(f"{long}{CALL_PARIS}") == ParsedOutput("", long, (PARIS,))


def test_prose_behind_a_call_tag_is_not_held_for_ever() -> None:
    parser = OutputParser(CONTENT, TOOLS)
    events = [event for _ in range(100) for event in parser.push("<tool_call> word " if _ == 0 else "word ")]
    text = "".join(event.text for event in events if isinstance(event, ContentText))
    assert len(events) > 40 and text == "<tool_call> " + "word " * 100


@pytest.mark.parametrize("length", [256, 257])
def test_a_name_may_have_256_characters(length: int) -> None:
    name = "n" * length
    text = f"<tool_call>{name}</tool_call>"
    expected = ParsedOutput("", "", (ParsedCall(name, "{}"),)) if length == 256 else ParsedOutput("", text, ())
    assert read(text, tools=[Tool(name)]) == expected


def test_names_that_other_interfaces_use() -> None:
    names = ("mcp__server__list-files", "fs.read", "ns/tool:v2", "wetter_für_köln")
    tools = [Tool(name) for name in names]
    for name in names:
        assert read(f"<tool_call>{name}</tool_call>", tools=tools).calls == (ParsedCall(name, "{}"),)
