"""Every field that clients may add, through the official clients: valid and invalid values, streamed and whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from glint.server.anthropic.messages import MessagesBody
from glint.server.openai.chat import ChatBody
from glint.server.openai.completions import TextBody
from glint.server.openai.responses import ResponsesBody
from tests.e2e.served import Served

Ask = Callable[[str, bool, dict[str, Any]], str]

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]
PROMPT = "The capital of France is"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
OBJECT = r'\{\s*"kind"\s*:\s*"[ab]"\s*\}'
LARK = 'start: "I say " WORD\nWORD: /[a-c]{3}/'
GBNF = 'root ::= "I say " word\nword ::= [a-c]{3}'
BODIES: dict[str, type[msgspec.Struct]] = {
    "chat": ChatBody,
    "completions": TextBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
}
OPENAI = "chat completions responses"
BOTH = "chat completions"


@dataclass(frozen=True)
class Row:
    """A field of some routes. Its valid values hold the answer to `form`, or without one change nothing."""

    routes: str
    field: str
    valid: list[Any]
    invalid: list[Any]
    form: str | None = None


ROWS = [
    Row(OPENAI, "metadata", [{}, {"team": "a"}], [{str(n): "x" for n in range(17)}, {"a": 5}, "x"]),
    Row("messages", "metadata", [{}, {"user_id": "u"}], [{"user_id": 5}, {"team": "a"}, "x"]),
    Row(OPENAI, "user", ["someone"], [5, ["x"]]),
    Row(OPENAI, "store", [False], [True, "false"]),
    Row(OPENAI, "service_tier", ["auto", "default"], ["flex", 1]),
    Row("messages", "service_tier", ["auto", "standard_only"], ["default", 1]),
    Row(OPENAI, "safety_identifier", ["hash"], [5, ["x"]]),
    Row(OPENAI, "prompt_cache_key", ["key"], [7]),
    Row(OPENAI, "prompt_cache_retention", ["in_memory", "24h"], ["1h", 24]),
    Row(OPENAI, "prompt_cache_options", [{}, {"mode": "implicit", "ttl": "30m"}], [{"mode": "explicit"}, {"a": 1}, 5]),
    Row("chat", "verbosity", ["medium"], ["low", 1]),
    Row("responses", "text", [{"verbosity": "medium"}], [{"verbosity": "low"}, "x"]),
    Row(OPENAI, "cache_salt", ["salt"], ["", 5, "x" * 1025]),
    Row(OPENAI + " messages", "priority", [-1000, 0, 1000], [-1001, 1001, 1.5, "5", True]),
    Row(BOTH, "min_tokens", [0, 3], [-1, 7, 1.5, "5"]),
    Row("chat", "continue_final_message", [False], ["yes", True]),
    Row("chat", "add_generation_prompt", [True], [False, "yes"]),
    Row("chat", "modalities", [["text"]], [["text", "audio"], "text"]),
    Row("chat", "prediction", [{"type": "content", "content": "Red"}], [{"type": "x"}, "Red"]),
    Row("chat", "do_sample", [True, False], ["no"]),
    Row("chat", "tool_stream", [True, False], ["no"]),
    Row("chat", "user_id", ["someone"], [5]),
    Row("chat", "echo", [False], [True]),
    Row("completions", "echo", [False], ["yes"]),
    Row("chat", "add_special_tokens", [False], [True]),
    Row("completions", "add_special_tokens", [True, False], ["no"]),
    *(Row("chat", name, [True], [False]) for name in ("include_reasoning", "separate_reasoning", "stream_reasoning")),
    Row("chat", "tool_choice", ["auto", "none"], ["required", "any"]),
    Row("chat", "top_logprobs", [0], [1]),
    Row(BOTH, "cache_prompt", [True], [False]),
    Row(BOTH, "use_beam_search", [False], [True]),
    Row(BOTH, "length_penalty", [1.0, 2], ["1"]),
    Row(BOTH, "spaces_between_special_tokens", [True], [False]),
    Row(BOTH, "return_token_ids", [False], [True]),
    Row(BOTH, "return_tokens_as_token_ids", [False], [True]),
    Row(BOTH, "stop_token_sequences", [[], [[5, 6, 7]]], [[[]], [[10**6]], [5], [[1]] * 17, [[1] * 257]]),
    Row(BOTH, "guided_json", [SCHEMA, json.dumps(SCHEMA)], [5, "[1]", {"type": "nothing"}], OBJECT),
    Row(BOTH, "guided_regex", ["x[0-9]{3}y"], ["(", 5], "x[0-9]{3}y"),
    Row(BOTH, "guided_choice", [["north", "south"]], [[], [1], "north"], "north|south"),
    Row(BOTH, "guided_grammar", [LARK, GBNF], ["nonsense", 5], "I say [abc]{3}"),
    Row(
        BOTH,
        "structured_outputs",
        [{"grammar": LARK}, {"grammar": GBNF}],
        [{"grammar": "start: <|user|>"}, {"grammar": 'root ::= "a'}, {"grammar": LARK, "regex": "a"}, {}],
        "I say [abc]{3}",
    ),
    Row(BOTH, "structured_outputs", [{"json": json.dumps(SCHEMA)}], [{"json": "[1]"}], OBJECT),
]
CASES = [pytest.param(route, row, id=f"{route}-{row.field}") for row in ROWS for route in row.routes.split()]


@pytest.fixture(scope="module")
def ask(client: openai.OpenAI, server: Served) -> Iterator[Ask]:
    """Asks a route for a short greedy answer with some fields; gives its text."""
    model = server.model
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=180) as other:

        def chat(stream: bool, fields: dict[str, Any]) -> str:
            asked = {"model": model, "messages": QUESTION, "max_tokens": 6, "temperature": 0, "extra_body": fields}
            if not stream:
                return client.chat.completions.create(**asked).choices[0].message.content or ""
            chunks = client.chat.completions.create(stream=True, **asked)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        def completions(stream: bool, fields: dict[str, Any]) -> str:
            asked = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "extra_body": fields}
            if not stream:
                return str(client.completions.create(**asked).choices[0].text)
            return "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked))

        def responses(stream: bool, fields: dict[str, Any]) -> str:
            asked = {"model": model, "input": QUESTION, "max_output_tokens": 6, "temperature": 0, "extra_body": fields}
            if not stream:
                return str(client.responses.create(**asked).output_text)
            events = client.responses.create(stream=True, **asked)
            return "".join(event.delta for event in events if event.type == "response.output_text.delta")

        def messages(stream: bool, fields: dict[str, Any]) -> str:
            greedy = {"temperature": 0} | fields
            asked = {"model": model, "messages": QUESTION, "max_tokens": 6, "extra_body": greedy}
            if not stream:
                return "".join(part.text for part in other.messages.create(**asked).content)
            with other.messages.stream(**asked) as events:
                return "".join(events.text_stream)

        routes = {"chat": chat, "completions": completions, "responses": responses, "messages": messages}
        yield lambda route, stream, fields: routes[route](stream, fields)


@pytest.fixture(scope="module")
def plain(ask: Ask) -> dict[str, str]:
    """The answer of every route without any of the fields."""
    return {route: ask(route, False, {}) for route in BODIES}


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("route", BODIES)
def test_valid_values_change_no_answer(ask: Ask, plain: dict[str, str], route: str, turn: int) -> None:
    rows = [row for row in ROWS if route in row.routes.split() and row.form is None]
    fields = {row.field: row.valid[min(turn, len(row.valid) - 1)] for row in rows}
    assert ask(route, False, fields) == plain[route] == ask(route, True, fields)


@pytest.mark.parametrize(("route", "row"), [case for case in CASES if case.values[1].form is not None])
def test_a_constraint_holds_the_answer(ask: Ask, route: str, row: Row) -> None:
    for value in row.valid:
        whole = ask(route, False, {row.field: value, "max_tokens": 40})
        assert re.fullmatch(str(row.form), whole), value
        assert ask(route, True, {row.field: value, "max_tokens": 40}) == whole


@pytest.mark.parametrize(("route", "row"), CASES)
def test_an_invalid_value_is_refused_by_name(ask: Ask, route: str, row: Row) -> None:
    for value in row.invalid:
        for stream in (False, True):
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
                ask(route, stream, {row.field: value})
            error = refused.value
            assert row.field in error.message, value
            if isinstance(error, openai.APIError):
                assert re.match(rf"{row.field}\b", str(error.param)), value


@pytest.mark.parametrize("route", BODIES)
def test_a_field_that_is_null_is_not_there(ask: Ask, plain: dict[str, str], route: str) -> None:
    needed = {"model", "messages", "prompt", "input", "max_tokens", "max_output_tokens", "temperature"}
    nulls: dict[str, Any] = dict.fromkeys([*BODIES[route].__struct_fields__, "audio", "functions", "container"])
    nulls = {name: None for name in nulls if name not in needed}
    assert ask(route, False, nulls) == plain[route] == ask(route, True, {**nulls, "stream": True})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_fields_that_exclude_each_other(client: openai.OpenAI, ask: Ask, fields: dict[str, Any], field: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            ask("chat", stream, fields)
        assert refused.value.param == field and field in refused.value.message
