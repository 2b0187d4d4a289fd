"""Answers as a generation gives them, cut into steps at will, for the tests of what goes over the wire."""

from __future__ import annotations

import json
from typing import Any, Literal

from hypothesis import strategies as st

from glint.engine.request import StepOutput
from glint.server.generation.generation import ApiFinishReason, Delta, Usage
from glint.text.output import (
    ContentText,
    OutputEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegun,
    ToolCallEnded,
)

Segment = tuple[Literal["reasoning", "text", "call"], str, str]

USAGE = Usage(prompt_tokens=30, cached_tokens=16, completion_tokens=12, reasoning_tokens=5)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    """What an answer is made of: stretches of reasoning and text, neighbours of different kinds, and calls."""
    found: list[Segment] = []
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call"]), max_size=5)):
        if kind == "call":
            arguments = draw(st.dictionaries(TEXTS, JSON_VALUES, max_size=3))
            name = draw(st.sampled_from(["get_weather", "now"]))
            found.append(("call", name, json.dumps(arguments, ensure_ascii=draw(st.booleans()))))
        elif not found or found[-1][0] != kind:
            found.append((kind, "", draw(TEXTS)))
    return found


def as_events(answer: list[Segment]) -> list[OutputEvent]:
    """The events of an answer, each text in one piece."""
    events: list[OutputEvent] = []
    num_calls = 0
    for kind, name, text in answer:
        if kind == "call":
            index, num_calls = num_calls, num_calls + 1
            events += [ToolCallBegun(index, name), ToolCallArguments(index, text), ToolCallEnded(index)]
        else:
            events.append(ReasoningText(text) if kind == "reasoning" else ContentText(text))
    return events


@st.composite
def split_events(draw: st.DrawFn, answer: list[Segment]) -> list[OutputEvent]:
    """The events of an answer with its texts cut at random."""
    pieces: list[OutputEvent] = []
    for event in as_events(answer):
        if isinstance(event, ToolCallBegun | ToolCallEnded):
            pieces.append(event)
            continue
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(event.text) - 1)), max_size=3)))
        for begin, end in zip([0, *cuts], [*cuts, len(event.text)], strict=True):
            pieces.append(_with_text(event, event.text[begin:end]))
    return pieces


def _with_text(event: OutputEvent, text: str) -> OutputEvent:
    match event:
        case ToolCallArguments(index=index):
            return ToolCallArguments(index, text)
        case ReasoningText():
            return ReasoningText(text)
        case _:
            return ContentText(text)


@st.composite
def deltas(draw: st.DrawFn, events: list[OutputEvent], reason: ApiFinishReason, stop: str | None) -> list[Delta]:
    """The events grouped into steps at random, some of them empty, the last with the finish reason."""
    steps: list[list[OutputEvent]] = [[]]
    for event in events:
        if draw(st.booleans()):
            steps.append([])
        steps[-1].append(event)
    if draw(st.booleans()):
        steps.append([])
    return [make_delta(step) for step in steps[:-1]] + [make_delta(steps[-1], reason, stop)]


def make_delta(events: list[OutputEvent], reason: ApiFinishReason | None = None, stop: str | None = None) -> Delta:
    """One step of the first choice."""
    output = StepOutput(
        request_id=0,
        text="",
        token_ids=(1,),
        logprobs=None,
        prompt_logprobs=None,
        cached_tokens=16,
        finish_reason=None if reason is None else "length" if reason == "length" else "stop",
        failure=None,
        stop_reason=stop,
    )
    return Delta(0, events, "", output, reason)


@st.composite
def endings(draw: st.DrawFn, answer: list[Segment]) -> tuple[ApiFinishReason, str | None]:
    """A finish reason that the answer can have, and the stop string where one ended it."""
    has_calls = any(kind == "call" for kind, _, _ in answer)
    reason: ApiFinishReason = draw(st.sampled_from(["length", "tool_calls" if has_calls else "stop"]))
    return reason, draw(st.sampled_from([None, "END"])) if reason != "length" else None


def read_events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, read without any client: each is named by its type and has one line of data."""
    events = []
    for message in stream.decode().split("\n\n")[:-1]:
        name, data = message.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
