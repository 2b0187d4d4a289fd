"""Texts that GLM models write, the tools they are written for, and the ways to read them, for the output tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from glint.text.output import (
    ContentText,
    OutputCollector,
    OutputEvent,
    OutputParser,
    OutputStart,
    ParsedOutput,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegun,
    ToolCallEnded,
    parse_output,
)
from glint.text.tools import Tool

REASONING, CONTENT = OutputStart.REASONING, OutputStart.CONTENT
UNDECIDED, PLAIN = OutputStart.UNDECIDED, OutputStart.PLAIN

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": "number"},
            "is_metric": {"type": "boolean"},
            "hours": {"type": "array", "items": {"type": "integer"}},
            "place": {"type": "object"},
            "note": {"type": ["string", "null"]},
        },
    },
)
NOW = Tool("now", parameters={"type": "object", "properties": {}})
GET = Tool("get", parameters={"type": "object", "properties": {"key": {"type": "string"}}})
WRITE = Tool(
    "write_file",
    parameters={"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
)
FREE = Tool("free")
TOOLS = (WEATHER, NOW, GET, WRITE, FREE)

CALL_PARIS = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"


def write_value(value: Any) -> str:
    """A value as GLM writes it: strings bare, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_call_47(name: str, arguments: dict[str, Any]) -> str:
    """A call in the format of GLM-4.7."""
    pairs = (f"<arg_key>{k}</arg_key><arg_value>{write_value(v)}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


def write_call_45(name: str, arguments: dict[str, Any]) -> str:
    """A call in the format of GLM-4.5 and 4.6."""
    pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{write_value(v)}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def check_events(pushes: Iterable[list[OutputEvent]]) -> None:
    """What holds for all events: calls count from 0 and nest properly, no text is empty, neighbours are merged."""
    open_index: int | None = None
    num_calls = 0
    for events in pushes:
        for event, following in itertools.zip_longest(events, events[1:]):
            if isinstance(event, ReasoningText | ContentText):
                assert event.text and type(event.text) is str
                assert open_index is None
            elif isinstance(event, ToolCallBegun):
                assert open_index is None and event.index == num_calls
                open_index = event.index
                num_calls += 1
            else:
                assert event.index == open_index
                if isinstance(event, ToolCallEnded):
                    open_index = None
                else:
                    assert isinstance(event, ToolCallArguments) and event.text and type(event.text) is str
            assert type(event) is not type(following)
    assert open_index is None


def read_pieces(
    pieces: Iterable[str],
    start: OutputStart = CONTENT,
    tools: Sequence[Tool] = TOOLS,
    discards_calls: bool = False,
    followed_by: str | None = "",
) -> ParsedOutput:
    """What the pieces, pushed one by one, give; checks what holds for all events."""
    parser = OutputParser(start, tools, discards_calls)
    pushes = [parser.push(piece) for piece in pieces]
    pushes.append(parser.finish(followed_by))
    check_events(pushes)
    collector = OutputCollector()
    for events in pushes:
        collector.add(events)
    result = collector.result()
    for call in result.calls:
        assert isinstance(json.loads(call.arguments), dict)
    return result


def read(
    text: str, start: OutputStart = CONTENT, tools: Sequence[Tool] = TOOLS, discards_calls: bool = False
) -> ParsedOutput:
    """What a text gives, read at once, after checking that every cut into two and into single characters gives it."""
    expected = parse_output(text, start, tools, discards_calls)
    assert read_pieces(text, start, tools, discards_calls) == expected
    for cut in range(len(text) + 1):
        assert read_pieces([text[:cut], text[cut:]], start, tools, discards_calls) == expected
    return expected


def arguments_of(output: ParsedOutput) -> list[tuple[str, dict[str, Any]]]:
    """The calls with their arguments read as JSON; a name that occurs twice is an error."""

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return [(call.name, json.loads(call.arguments, object_pairs_hook=refuse_repeats)) for call in output.calls]
