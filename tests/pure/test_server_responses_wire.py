"""What /v1/responses takes in and gives out, against the types and the stream reader of OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from glint.server.generation.generation import Delta
from glint.server.generation.parts import encode_events
from glint.server.http.body import decode
from glint.server.http.problems import Problem
from glint.server.limits import Limits
from glint.server.openai.responses import ResponsesBody, stream_error
from glint.server.openai.responses_input import decode_reasoning, encode_reasoning, read_input
from glint.server.openai.responses_stream import ResponseBuilder
from glint.server.openai.responses_tools import ToolSet
from glint.text.output import ContentText, ReasoningText, ToolCallArguments, ToolCallBegun, ToolCallEnded
from tests.pure.server_deltas import (
    TEXTS,
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

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL_NAME = ToolSet(None, None, allows_several=True).call_name
TYPES = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
SETTINGS = {
    "id": "resp-1",
    "object": "response",
    "created_at": 1,
    "model": "glm",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


def stream(steps: list[Delta], adds_encrypted: bool = False) -> list[dict[str, Any]]:
    """The events of a stream of these steps."""
    answer = ResponseBuilder(SETTINGS, adds_encrypted, CALL_NAME)
    events = answer.begun()
    for step in steps:
        events += answer.parts.add_delta(step)
    return read_events(encode_events([*events, answer.ended(answer.whole(USAGE, 2))]))


def whole(steps: list[Delta], adds_encrypted: bool = False) -> dict[str, Any]:
    """The answer of these steps without a stream."""
    answer = ResponseBuilder(SETTINGS, adds_encrypted, CALL_NAME)
    for step in steps:
        answer.parts.add_delta(step)
    return json.loads(msgspec.json.encode(answer.whole(USAGE, 2)))


def final_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that the official client ends a stream with."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    last: Any = None
    for event in events:
        for seen in state.handle_event(EVENTS.validate_python(event)):
            last = seen
    return dict(last.response.to_dict())


def join_deltas(events: list[dict[str, Any]]) -> list[str]:
    """The text of each output item, joined from its pieces alone."""
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            texts[event["output_index"]] = ""
        elif event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    return [texts[index] for index in sorted(texts)]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """The response with nothing in it that is drawn anew for every answer, nor what only the client adds."""
    drawn = ("id", "call_id", "parsed_arguments")
    kept = [{name: value for name, value in item.items() if name not in drawn} for item in response["output"]]
    for item in kept:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return response | {"output": kept}


@given(st.data(), segments(), st.booleans())
def test_a_stream_adds_up_to_the_whole_answer(data: st.DataObject, answer: list[Segment], adds_encrypted: bool) -> None:
    reason, stop = data.draw(endings(answer))
    events = stream(data.draw(deltas(data.draw(split_events(answer)), reason, stop)), adds_encrypted)
    at_once = whole([make_delta(as_events(answer), reason, stop)], adds_encrypted)
    assert without_ids(final_response(events)) == without_ids(at_once)
    Response.model_validate(at_once)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [item["type"] for item in at_once["output"]] == [TYPES[kind] for kind, _, _ in answer]
    assert join_deltas(events) == [text for _, _, text in answer]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_the_events_of_a_stream_come_in_the_known_order() -> None:
    events = stream(
        [
            make_delta([ReasoningText("Hm")]),
            make_delta([ContentText("I look.")]),
            make_delta([ToolCallBegun(0, "now"), ToolCallArguments(0, "{}"), ToolCallEnded(0)], "tool_calls"),
        ]
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_an_answer_that_reached_its_length_is_incomplete_and_so_is_its_last_item() -> None:
    response = whole([make_delta([ReasoningText("Hm")]), make_delta([ContentText("I")], "length")])
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_usage() -> None:
    usage = whole([make_delta([ContentText("a")], "stop")])["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (30, 12, 42)
    assert usage["input_tokens_details"]["cached_tokens"] == 16
    assert usage["output_tokens_details"]["reasoning_tokens"] == 5


def test_a_failed_stream_tells_what_there_was_and_why() -> None:
    answer = ResponseBuilder(SETTINGS, False, CALL_NAME)
    answer.parts.add_delta(make_delta([ContentText("I")]))
    failed = answer.failed(Problem(504, "too late", code="deadline_exceeded"))
    assert failed["response"]["status"] == "failed" and failed["response"]["error"]["message"] == "too late"
    assert failed["response"]["output"][0]["content"][0]["text"] == "I"
    (event,) = read_events(stream_error(Problem(504, "too late", code="deadline_exceeded"), "resp-1"))
    assert event["error"]["message"] == "too late"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encoded_reasoning_can_be_decoded(text: str) -> None:
    assert decode_reasoning(encode_reasoning(text), "input[0]") == text


@given(TEXTS, TEXTS, st.booleans())
def test_an_answer_can_be_sent_back_as_it_is(thought: str, text: str, adds_encrypted: bool) -> None:
    call = [ToolCallBegun(0, "now"), ToolCallArguments(0, '{"zone": "CET"}'), ToolCallEnded(0)]
    output = whole([make_delta([ReasoningText(thought), ContentText(text), *call], "tool_calls")], adds_encrypted)[
        "output"
    ]
    if adds_encrypted:
        del output[0]["content"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "noon"}
    messages = read_input([{"role": "user", "content": "When?"}, *output, result], "Be short.", Limits())
    function = {"name": "now", "arguments": '{"zone": "CET"}'}
    assert messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "When?"},
        {
            "role": "assistant",
            "content": text,
            "reasoning_content": thought,
            "tool_calls": [{"id": output[2]["call_id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": output[2]["call_id"], "content": "noon"},
    ]


def test_items_of_a_conversation() -> None:
    calls = [
        {"type": "function_call", "call_id": name, "name": name, "arguments": text}
        for name, text in (("a", "{}"), ("b", ""))
    ]
    messages = read_input(
        [
            {"role": "developer", "content": "Be short."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "When"}]},
            *calls,
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
            {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."},
        ],
        None,
        Limits(),
    )
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "assistant",
    ]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["a", "b"]
    assert [message["content"] for message in messages] == ["Be short.", "When", "", "1", "One.", "Two."]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.type"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"conversation": "c"}, "conversation"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stop": ["a"]}, "stop"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(Problem) as refused:
        decode(json.dumps({"input": "Hi"} | changes).encode(), ResponsesBody)
    assert (refused.value.status, refused.value.param) == (400, field)
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([], "input"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": ""}]}], "input[0].content[0].type"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ([{"role": "user", "content": "a", "name": "Ann"}], "input[0].name"),
        ([{"type": "reasoning", "encrypted_content": "?"}], "input[0].encrypted_content"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}], "input[0].arguments"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}], "input[0].arguments"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[" * 9999}], "input[0].arguments"),
        ([{"type": "function_call", "call_id": "a", "name": "", "arguments": "{}"}], "input[0].name"),
        ([{"type": "reasoning", "summary": [{"type": "text", "text": "a"}]}], "input[0].summary[0].type"),
        ([{"role": "user", "content": [{"type": "input_text", "text": ""}] * 2000}], "input[0].content"),
        ([{"role": "user", "content": "a"}] * 5000, "input"),
    ],
)
def test_input_that_cannot_be_read(items: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(Problem) as refused:
        read_input(items, None, Limits())
    assert (refused.value.status, refused.value.param) == (400, field)
