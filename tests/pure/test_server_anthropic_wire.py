"""What /v1/messages takes in and gives out, against the types and the stream reader of Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from glint.server.anthropic.input import read_conversation
from glint.server.anthropic.messages import MessagesBody, PromptBody, stream_error
from glint.server.anthropic.stream import MessageWriter, message_end, message_start, whole_message
from glint.server.generation.generation import ApiFinishReason, Delta
from glint.server.generation.parts import Parts, encode_events
from glint.server.http.body import decode
from glint.server.http.problems import Problem
from glint.server.limits import Limits
from glint.text.output import ContentText, ReasoningText, ToolCallArguments, ToolCallBegun, ToolCallEnded
from tests.pure.server_deltas import (
    USAGE,
    Segment,
    as_events,
    deltas,
    endings,
    make_delta,
    read_events,
    segments,
    split_events,
)

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TYPES = {"reasoning": "thinking", "text": "text", "call": "tool_use"}


def stream(steps: list[Delta]) -> list[dict[str, Any]]:
    """The events of a stream of these steps."""
    parts = Parts(MessageWriter())
    events = [message_start("msg-1", "glm", USAGE)]
    for step in steps:
        events += parts.add_delta(step)
    return read_events(encode_events(events + message_end(parts, USAGE)))


def whole(steps: list[Delta]) -> dict[str, Any]:
    """The answer of these steps without a stream."""
    parts = Parts(MessageWriter())
    for step in steps:
        parts.add_delta(step)
    return json.loads(msgspec.json.encode(whole_message("msg-1", "glm", parts, USAGE)))


def accumulate(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the official client makes of a stream."""
    snapshot, buffers = None, {}
    for event in events:
        typed = EVENTS.validate_python(event)
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return snapshot.to_dict()


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with nothing in it that is drawn anew for every answer."""
    kept = [{name: value for name, value in part.items() if name != "id"} for part in message["content"]]
    found = {name: value for name, value in message.items() if value is not None}
    return found | {"content": kept}


@given(st.data(), segments())
def test_a_stream_adds_up_to_the_whole_answer(data: st.DataObject, answer: list[Segment]) -> None:
    reason, stop = data.draw(endings(answer))
    steps = data.draw(deltas(data.draw(split_events(answer)), reason, stop))
    at_once = whole([make_delta(as_events(answer), reason, stop)])
    assert without_ids(accumulate(stream(steps))) == without_ids(at_once)
    Message.model_validate(at_once)
    assert [part["type"] for part in at_once["content"]] == [TYPES[kind] for kind, _, _ in answer]
    for part, (kind, name, text) in zip(at_once["content"], answer, strict=True):
        if kind == "call":
            assert (part["name"], part["input"]) == (name, json.loads(text))
        else:
            assert part["thinking" if kind == "reasoning" else "text"] == text


def test_the_events_of_a_stream_come_in_the_known_order() -> None:
    events = stream(
        [
            make_delta([ReasoningText("Hm")]),
            make_delta([ContentText("I look.")]),
            make_delta([ToolCallBegun(0, "now"), ToolCallArguments(0, "{}"), ToolCallEnded(0)], "tool_calls"),
        ]
    )
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        "message_start",
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "stop"),
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in events if "index" in event] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert events[3]["delta"] == {"type": "signature_delta", "signature": ""}
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    ("reason", "stop", "wanted"),
    [
        ("stop", None, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("tool_calls", "END", ("stop_sequence", "END")),
    ],
)
def test_stop_reasons(reason: ApiFinishReason, stop: str | None, wanted: tuple[str, str | None]) -> None:
    message = whole([make_delta([ContentText("a")], reason, stop)])
    assert (message["stop_reason"], message["stop_sequence"]) == wanted


def test_cached_tokens_count_apart() -> None:
    usage = whole([make_delta([ContentText("a")], "stop")])["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (14, 16, 12)


def test_arguments_keep_their_bytes() -> None:
    text = '{"n": 1e400, "big": 123456789012345678901234567890, "x": 1.10}'
    parts = Parts(MessageWriter())
    parts.add_delta(make_delta([ToolCallBegun(0, "f"), ToolCallArguments(0, text), ToolCallEnded(0)], "tool_calls"))
    assert text.encode() in msgspec.json.encode(whole_message("msg-1", "glm", parts, USAGE))


def test_an_error_ends_a_stream_as_an_event() -> None:
    (event,) = read_events(stream_error(Problem(504, "too late", code="deadline_exceeded"), "msg-1"))
    assert event["error"] == {"type": "timeout_error", "message": "too late"}


def body(**changes: Any) -> bytes:
    """A body of /v1/messages with some fields changed."""
    fields = {"model": "glm", "max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps(fields | changes).encode()


def read(messages: list[dict[str, Any]], system: Any = None) -> list[dict[str, Any]]:
    """The messages of a chat that a conversation stands for."""
    given = decode(body(messages=messages, **({} if system is None else {"system": system})), MessagesBody)
    return read_conversation(given.system, given.messages, Limits())


def test_a_tool_loop_becomes_a_chat() -> None:
    thinking = {"type": "thinking", "thinking": "Hm", "signature": ""}
    call = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"zone": "CET"}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "noon"}]}
    failure = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True}
    hint = {"type": "ephemeral", "ttl": "1h"}
    messages = read(
        [
            {"role": "user", "content": [{"type": "text", "text": "When", "cache_control": hint}]},
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "I look.", "citations": None}, call]},
            {
                "role": "user",
                "content": [result, failure, {"type": "text", "text": "And"}, {"type": "text", "text": "?"}],
            },
        ],
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": " short."}],
    )
    function = {"name": "now", "arguments": {"zone": "CET"}}
    assert messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "When"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no clock"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": ""}]}]}, "type"),
        ({"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]}, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"name": "f", "input_schema": {}, "input_examples": []}]}, "input_examples"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"effort": "minimal"}}, "output_config.effort"),
        ({"service_tier": "batch"}, "service_tier"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(Problem) as refused:
        decode(body(**changes), MessagesBody)
    assert refused.value.status == 400 and field in (refused.value.param or "")
    assert field in refused.value.message


def test_max_tokens_is_needed_but_not_for_counting() -> None:
    fields = json.loads(body())
    del fields["max_tokens"]
    raw = json.dumps(fields).encode()
    decode(raw, PromptBody)
    with pytest.raises(Problem, match="'max_tokens' is missing"):
        decode(raw, MessagesBody)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "Hm"}]}], "messages[0].content[0]"),
        ([{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "1"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}], "messages[0].content"),
    ],
)
def test_conversations_that_cannot_be_read(messages: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(Problem) as refused:
        read(messages)
    assert (refused.value.status, refused.value.param) == (400, field)
