"""Behaviour that users of other engines reported as broken, one test each, named after the report."""

from __future__ import annotations

import json

from glint.text.output import (
    OutputParser,
    ParsedCall,
    ParsedOutput,
    ToolCallArguments,
    ToolCallBegun,
    find_start,
)
from glint.text.tools import Tool
from tests.pure.output_text import (
    CALL_PARIS,
    CONTENT,
    REASONING,
    TOOLS,
    UNDECIDED,
    arguments_of,
    read,
    read_pieces,
    write_call_45,
    write_call_47,
)

PARIS = ParsedCall("get_weather", '{"city":"Paris"}')
NOW_CALL = ParsedCall("now", "{}")


def test_vllm_32436_a_call_without_arguments() -> None:
    for text in ("<tool_call>now</tool_call>", "<tool_call>now\n</tool_call>", "<tool_call>\nnow\n\n</tool_call>"):
        assert read(text).calls == (NOW_CALL,)


def test_vllm_44326_a_call_without_arguments_in_a_stream() -> None:
    assert read_pieces("why</think><tool_call>now</tool_call>", REASONING).calls == (NOW_CALL,)


def test_sglang_15405_empty_arguments_are_written_once() -> None:
    parser = OutputParser(CONTENT, TOOLS)
    events = [event for character in "<tool_call>now</tool_call>" for event in parser.push(character)]
    events += parser.finish()
    assert [event.text for event in events if isinstance(event, ToolCallArguments)] == ["{}"]


def test_vllm_39253_several_tokens_in_one_step() -> None:
    text = write_call_47("get_weather", {"city": "Paris", "days": 3, "note": "a b c"})
    whole = read(text)
    for length in range(1, len(text)):
        assert read_pieces(text[begin : begin + length] for begin in range(0, len(text), length)) == whole


def test_vllm_39757_the_name_is_not_cut() -> None:
    for text in (CALL_PARIS, CALL_PARIS.replace("get_weather", "get_weather\n")):
        parser = OutputParser(CONTENT, TOOLS)
        events = [event for character in text for event in parser.push(character)]
        assert [event for event in events if isinstance(event, ToolCallBegun)] == [ToolCallBegun(0, "get_weather")]


def test_vllm_40195_string_or_null_is_a_string() -> None:
    text = write_call_47("get_weather", {"city": "Paris", "note": "5"})
    assert arguments_of(read(text)) == [("get_weather", {"city": "Paris", "note": "5"})]


def test_sglang_30644_digits_with_underscores_are_no_number() -> None:
    text = write_call_47("get_weather", {"days": "123_456"})
    assert arguments_of(read(text)) == [("get_weather", {"days": "123_456"})]


def test_vllm_47190_the_tag_that_opens_a_key_is_missing() -> None:
    tool = Tool("send_command_to_shell", parameters={"properties": {"command": {"type": "string"}}})
    for name in ("send_command_to_shellcommand", "send_command_to_shell command"):
        text = f"<tool_call>{name}</arg_key><arg_value>echo test</arg_value></tool_call>"
        assert arguments_of(read(text, tools=[tool])) == [("send_command_to_shell", {"command": "echo test"})]


def test_vllm_57826_the_last_closing_tag_is_missing() -> None:
    text = (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Seattle</arg_value><arg_key>note</arg_key><arg_value>x"
    )
    for end in ("", "</tool_call>", "</arg_value>", "</tool_call>\n"):
        assert arguments_of(read(text + end)) == [("get_weather", {"city": "Seattle", "note": "x"})]


def test_vllm_49248_the_tag_that_opens_a_value_is_missing() -> None:
    for space in ("", "\n", " \n "):
        text = f"<tool_call>get_weather<arg_key>city</arg_key>{space}how many days left</arg_value></tool_call>"
        assert arguments_of(read(text)) == [("get_weather", {"city": "how many days left"})]


def test_vllm_54971_stray_tags_do_not_get_into_the_key() -> None:
    for key in ("<arg_key>path</arg_key></arg_key>", "<arg_key><arg_key>path</arg_key>"):
        text = f"<tool_call>write_file{key}<arg_value>src/x.py</arg_value></tool_call>"
        assert arguments_of(read(text)) == [("write_file", {"path": "src/x.py"})]


def test_vllm_42400_a_call_inside_reasoning_is_a_call() -> None:
    assert read(f"I need the weather.{CALL_PARIS}", REASONING) == ParsedOutput("I need the weather.", "", (PARIS,))
    assert read(f"hm\n{CALL_PARIS}</think>\nok", REASONING) == ParsedOutput("hm\n", "ok", (PARIS,))


def test_vllm_48095_a_forced_call_is_not_left_in_content() -> None:
    for start in (CONTENT, UNDECIDED):
        assert read(CALL_PARIS, start) == ParsedOutput("", "", (PARIS,))
    assert read(f"</think>{CALL_PARIS}", REASONING) == ParsedOutput("", "", (PARIS,))


def test_vllm_47504_arguments_are_not_repeated_in_the_stream() -> None:
    parser = OutputParser(CONTENT, TOOLS)
    events = [event for character in CALL_PARIS for event in parser.push(character)]
    joined = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
    assert joined == '{"city":"Paris"}'


def test_sglang_30925_no_markup_leaks_when_no_call_is_wanted() -> None:
    text = f"why</think>Sure. {CALL_PARIS}"
    for length in range(len(text)):
        output = read_pieces(text[:length], REASONING, discards_calls=True)
        assert output.calls == ()
        if length >= text.index("<tool_call>") + len("<tool_call>"):
            assert output.content == "Sure. "


def test_sglang_33324_the_index_is_the_call_s_and_not_the_tool_s() -> None:
    parser = OutputParser(CONTENT, TOOLS)
    events = parser.push(f"<tool_call>now</tool_call>{CALL_PARIS}<tool_call>now</tool_call>")
    begun = [event for event in events if isinstance(event, ToolCallBegun)]
    assert begun == [ToolCallBegun(0, "now"), ToolCallBegun(1, "get_weather"), ToolCallBegun(2, "now")]


def test_sglang_36688_streamed_numbers_and_broken_numbers() -> None:
    for value, expected in (("123", 123), ("123abc", "123abc"), ("12", 12), ("-", "-")):
        text = f"<tool_call>get_weather<arg_key>days</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert arguments_of(read(text)) == [("get_weather", {"days": expected})]


def test_vllm_44098_the_last_piece_is_not_lost() -> None:
    text = write_call_45("get_weather", {"city": "Paris", "days": 3})
    assert arguments_of(read_pieces([text[:-1], text[-1:]])) == [("get_weather", {"city": "Paris", "days": 3})]
    assert arguments_of(read_pieces([text[:20], text[20:]])) == [("get_weather", {"city": "Paris", "days": 3})]


def test_sglang_37645_an_answer_without_thinking() -> None:
    """With reasoning opened by the prompt and never closed there is no content: what was written is reasoning."""
    assert read("The answer is 4.", REASONING) == ParsedOutput("The answer is 4.", "", ())
    assert read("The answer is 4.", UNDECIDED) == ParsedOutput("", "The answer is 4.", ())
    assert read("The answer is 4.", CONTENT) == ParsedOutput("", "The answer is 4.", ())


def test_vllm_31319_the_prompt_opens_the_reasoning() -> None:
    start = find_start("[gMASK]<sop><|user|>2+2?<|assistant|><think>", has_think_token=True)
    assert read("Easy.</think>4", start) == ParsedOutput("Easy.", "4", ())
    start = find_start("[gMASK]<sop><|user|>\n2+2?<|assistant|>", has_think_token=True)
    assert read("\n<think>Easy.</think>\n4", start) == ParsedOutput("Easy.", "4", ())
    start = find_start("[gMASK]<sop><|user|>2+2?<|assistant|></think>", has_think_token=True)
    assert read("4", start) == ParsedOutput("", "4", ())


def test_sglang_11888_arguments_stream_while_they_are_written() -> None:
    parser = OutputParser(CONTENT, TOOLS)
    parser.push("<tool_call>write_file\n<arg_key>text</arg_key>\n<arg_value>")
    for line in ("import os\n", "print('é')\n", '"""\\"""\n'):
        (event,) = parser.push(line)
        assert isinstance(event, ToolCallArguments)
        assert json.loads(f'"{event.text}"') == line


def test_sglang_37634_two_calls_in_one_piece() -> None:
    text = CALL_PARIS + write_call_47("get_weather", {"city": "Rome", "days": 2})
    assert arguments_of(read_pieces([text])) == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Rome", "days": 2}),
    ]


def test_sglang_33902_undeclared_tools_are_treated_alike_in_and_out_of_streams() -> None:
    text = CALL_PARIS.replace("get_weather", "get_news")
    assert read(text) == read_pieces(text) == ParsedOutput("", text, ())


def test_vllm_42026_whitespace_of_string_arguments_is_kept() -> None:
    arguments = {"path": " a b ", "text": "\n\n    return 1\t\n"}
    for write in (write_call_45, write_call_47):
        assert arguments_of(read(write("write_file", arguments))) == [("write_file", arguments)]


def test_sglang_12456_nothing_is_escaped_twice() -> None:
    arguments = {"path": "C:\\new\\table", "text": '{"a": "b\\n\\"c\\""}'}
    assert arguments_of(read(write_call_47("write_file", arguments))) == [("write_file", arguments)]


def test_vllm_30920_text_beyond_ascii_is_passed_on_as_it_is() -> None:
    text = write_call_47("get_weather", {"city": "北京 🌦 Köln"})
    assert read(text).calls == (ParsedCall("get_weather", '{"city":"北京 🌦 Köln"}'),)


def test_sglang_15753_unions_and_references_in_schemas() -> None:
    parameters = {
        "$defs": {"Size": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "properties": {
            "size": {"$ref": "#/$defs/Size"},
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "items": {"oneOf": [{"type": "array"}, {"type": "string"}]},
        },
    }
    arguments = {"size": None, "text": "7", "items": ["a"]}
    text = write_call_47("f", arguments)
    assert arguments_of(read(text, tools=[Tool("f", parameters=parameters)])) == [("f", arguments)]
