"""Tool loops and structured answers with the official OpenAI client, forced through the grammar."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.questions import WEATHER_SCHEMA, Town
from tests.e2e.raw_http import check_all_free
from tests.e2e.served import Served

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": WEATHER_SCHEMA,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def asked(server: Served) -> dict[str, Any]:
    """A greedy chat about the weather."""
    question = {"role": "user", "content": "What is the weather in Paris for 3 days?"}
    return {"model": server.model, "messages": [question], "max_tokens": 120, "temperature": 0}


def check_weather(call: Any) -> dict[str, Any]:
    """The arguments of a call, which must fit the schema."""
    assert call.type == "function" and call.id and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days"} and arguments["city"] in ("Paris", "Rome")
    assert type(arguments["days"]) is int and 1 <= arguments["days"] <= 9
    return dict(arguments)


@pytest.mark.parametrize("choice", [NAMED, pytest.param("required", marks=pytest.mark.slow)])
def test_a_tool_loop(client: openai.OpenAI, asked: dict[str, Any], choice: Any) -> None:
    tools = [WEATHER] if choice == "required" else [CLOCK, WEATHER]
    forced = asked | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**forced)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
    assert message.tool_calls is not None and len(message.tool_calls) == 1
    arguments = check_weather(message.tool_calls[0])
    with client.chat.completions.stream(**forced) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and not final.message.content
    assert [check_weather(call) for call in final.message.tool_calls or []] == [arguments]
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 21 degrees."}
    history = [*asked["messages"], message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**asked | {"messages": history, "tools": tools, "max_tokens": 8})
    assert after.choices[0].message.content and after.choices[0].message.tool_calls is None
    assert after.usage is not None and answer.usage is not None
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_argument_pieces_have_no_markup(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    forced = asked | {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **forced)]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert not any(delta.content for delta in deltas) and {call.index for call in calls} == {0}
    assert [call.function.name for call in calls if call.function and call.function.name] == ["get_weather"]
    assert [call.id for call in calls if call.id] == [calls[0].id]
    text = "".join(call.function.arguments or "" for call in calls if call.function)
    assert isinstance(json.loads(text), dict) and "<" not in text


def test_a_call_without_arguments(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    forced = asked | {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**forced).choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "get_time" and json.loads(call.function.arguments) == {}
    with client.chat.completions.stream(**forced) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(streamed.function.arguments) == {}


def test_a_named_tool_is_called_once(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    answer = client.chat.completions.create(tools=[WEATHER], tool_choice=NAMED, **asked)
    assert answer.choices[0].finish_reason == "tool_calls" and len(answer.choices[0].message.tool_calls or []) == 1


def test_a_format_beside_tools(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    schema = {"name": "box", "schema": SCHEMA}
    both = asked | {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": schema}}
    chosen = client.chat.completions.create(parallel_tool_calls=False, **both).choices[0]
    if chosen.message.tool_calls:
        check_weather(chosen.message.tool_calls[0])
    else:
        assert chosen.message.content is not None and fits_schema(chosen.message.content)
    forced = client.chat.completions.create(tool_choice=NAMED, **both).choices[0].message
    assert forced.content is None and forced.tool_calls is not None and check_weather(forced.tool_calls[0])


def test_no_tools_are_called_with_choice_none(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    silent = asked | {"tools": [WEATHER], "tool_choice": "none", "max_tokens": 8}
    answer = client.chat.completions.create(**silent)
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].message.content
    plain = client.chat.completions.create(**asked | {"max_tokens": 8})
    assert plain.choices[0].message.content == answer.choices[0].message.content


def test_a_parsed_answer(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    question = [{"role": "user", "content": "Describe the town Oslo as JSON."}]
    answer = client.chat.completions.parse(response_format=Town, **asked | {"messages": question})
    town = answer.choices[0].message.parsed
    assert isinstance(town, Town) and answer.choices[0].finish_reason == "stop"


SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["size", "count"],
    "additionalProperties": False,
}


def fits_schema(text: str) -> bool:
    """Whether a text is an object of the schema above."""
    value = json.loads(text)
    return list(value) == ["size", "count"] and value["size"] in ("small", "large") and 0 <= value["count"] <= 20


def is_date(text: str) -> bool:
    """Whether a text is a date."""
    return re.fullmatch(r"20[0-9]{2}-[01][0-9]", text) is not None


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "box", "schema": SCHEMA}}},
        fits_schema,
    ),
    "regex": ({"response_format": {"type": "regex", "pattern": r"20[0-9]{2}-[01][0-9]"}}, is_date),
    "choice": ({"response_format": {"type": "choice", "choices": ["yes", "no"]}}, ["yes", "no"].__contains__),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, fits_schema),
    "structured regex": ({"structured_outputs": {"regex": r"20[0-9]{2}-[01][0-9]"}}, is_date),
    "structured choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"].__contains__),
}


ALIASES = ("structured json", "structured regex")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIASES else ()) for name in FORMATS]
)
def test_the_answer_has_the_format(client: openai.OpenAI, asked: dict[str, Any], name: str) -> None:
    changes, fits = FORMATS[name]
    hot = asked | {"temperature": 1.5, "seed": 2}
    answer = client.chat.completions.create(extra_body=changes, **hot)
    text = answer.choices[0].message.content
    assert text is not None and fits(text) and answer.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(extra_body=changes, stream=True, **hot)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_any_json_object(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    for changes in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = client.chat.completions.create(extra_body=changes, **asked | {"max_tokens": 16})
        text = answer.choices[0].message.content
        assert text is not None and text.lstrip().startswith("{")
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_completions_take_formats_as_well(client: openai.OpenAI, asked: dict[str, Any], server: Served) -> None:
    body = {"model": asked["model"], "prompt": ["Is it?", "Or not?"], "n": 2, "temperature": 2.0, "max_tokens": 9}
    changes = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(extra_body=changes, **body)
    assert len(answer.choices) == 4 and {choice.text for choice in answer.choices} <= {"yes", "no"}
    plain = httpx.post(f"{server.url}/generate", json={"prompt": "Is it?", "max_tokens": 9} | changes, timeout=60)
    assert plain.json()["choices"][0]["text"] in ("yes", "no")
    check_all_free(server)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}}, "type"),
        ({"response_format": {"type": "regex", "pattern": "("}}, "response_format"),
        ({"response_format": {"type": "regex", "pattern": "(?=x)"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"response_format": {"type": "choice", "choices": []}}, "choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "x", "choice": ["x"]}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs cannot be used: the grammar"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"tools": [WEATHER], "response_format": {"type": "regex", "pattern": "x"}}, "response_format"),
        (
            {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            "response_format",
        ),
        ({"tools": [WEATHER, WEATHER]}, "get_weather"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(
    server: Served, asked: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked | changes, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert field in f"{error['param']} {error['message']}"
