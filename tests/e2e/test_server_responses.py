"""The official OpenAI client on /v1/responses of a real server process on the sample model."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.e2e.questions import Town
from tests.e2e.served import Served
from tests.pure.scripted_model import without_ids

QUESTION = "Name three colours of the rainbow."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def model(server: Served) -> str:
    """The name of the served model."""
    return server.model


def ask(client: openai.OpenAI, model: str, **changes: Any) -> Response:
    """A greedy answer to the question, with some fields changed."""
    fields = {"model": model, "input": QUESTION, "max_output_tokens": 12, "temperature": 0}
    return client.responses.create(**fields | changes)


def comparable(response: Response) -> dict[str, Any]:
    """A response with nothing in it that two of the same question need not share."""
    found = without_ids(response)
    return found | {"usage": [found["usage"]["input_tokens"], found["usage"]["output_tokens"]]}


def test_a_response(client: openai.OpenAI, model: str) -> None:
    response = ask(client, model, metadata={"topic": "colours"}, user="ann")
    assert response.output_text.strip() and response.model == model
    assert response.metadata == {"topic": "colours"} and response.user == "ann"
    assert response.usage is not None and response.usage.output_tokens <= 12
    is_cut = response.usage.output_tokens == 12
    assert response.status == ("incomplete" if is_cut else "completed")
    assert (response.incomplete_details is not None) == is_cut
    assert response._request_id == response.id


def test_a_stream_ends_with_the_whole_response(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "input": "Say hello.", "max_output_tokens": 400, "temperature": 0}
    whole = client.responses.create(**fields)
    assert whole.status == "completed"
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert comparable(final) == comparable(whole)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 1 and "".join(pieces) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_stream_that_reaches_its_length_is_incomplete(client: openai.OpenAI, model: str) -> None:
    whole = ask(client, model, max_output_tokens=5)
    *_, last = ask(client, model, max_output_tokens=5, stream=True)
    assert last.type == "response.incomplete"
    assert comparable(last.response) == comparable(whole)
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[-1].status == "incomplete"


def test_instructions_and_sampling_change_the_answer(client: openai.OpenAI, model: str) -> None:
    short: dict[str, Any] = {"max_output_tokens": 8}
    told = ask(client, model, instructions="You only ever answer with the word NO.", **short).output_text
    items = [
        {"role": "developer", "content": "You only ever answer with the word NO."},
        {"role": "user", "content": QUESTION},
    ]
    assert told == ask(client, model, input=items, **short).output_text != ask(client, model, **short).output_text
    hot: dict[str, Any] = {"temperature": 1.5, "top_p": 0.99, **short}
    first, same, other = (ask(client, model, **hot, extra_body={"seed": seed, "top_k": 40}) for seed in (3, 3, 4))
    assert first.output_text == same.output_text != other.output_text


@pytest.mark.parametrize(
    "choice", [{"type": "function", "name": "get_weather"}, pytest.param("required", marks=pytest.mark.slow)]
)
def test_a_tool_loop(client: openai.OpenAI, model: str, choice: Any) -> None:
    conversation: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False, "max_output_tokens": 200}
    response = ask(client, model, input=conversation, tool_choice=choice, **asked)
    assert response.status == "completed"
    (call,) = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    fields: Any = {"model": model, "input": conversation, "tool_choice": choice, "temperature": 0, **asked}
    with client.responses.stream(**fields) as stream:
        assert comparable(stream.get_final_response()) == comparable(response)
    conversation += [item.to_dict() for item in response.output]
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}]
    answer = ask(client, model, input=conversation, tool_choice="none", **asked | {"max_output_tokens": 8})
    assert not any(item.type == "function_call" for item in answer.output)
    alone = ask(client, model, input=conversation[:1], max_output_tokens=1)
    assert answer.usage is not None and alone.usage is not None
    assert answer.usage.input_tokens > alone.usage.input_tokens + 30


def test_an_answer_that_fits_a_schema(client: openai.OpenAI, model: str) -> None:
    response = client.responses.parse(
        model=model,
        input="Describe the town Oslo as JSON.",
        text_format=Town,
        max_output_tokens=200,
        temperature=0,
    )
    assert isinstance(response.output_parsed, Town)
    assert json.loads(response.output_text) == response.output_parsed.model_dump()


def test_an_answer_that_fits_a_schema_beside_tools(client: openai.OpenAI, model: str) -> None:
    response = client.responses.parse(
        model=model,
        input="Describe the town Oslo as JSON.",
        text_format=Town,
        tools=[WEATHER],
        max_output_tokens=200,
        temperature=0,
    )
    assert response.status == "completed"
    for item in response.output:
        if item.type == "function_call":
            assert json.loads(item.arguments)["city"] in ("Paris", "Rome")
        else:
            assert isinstance(response.output_parsed, Town)


def test_an_answer_that_is_any_json_object(client: openai.OpenAI, model: str) -> None:
    text: Any = {"format": {"type": "json_object"}}
    response = ask(client, model, input="Describe Oslo as JSON.", text=text, max_output_tokens=24)
    assert response.text is not None and response.text.format is not None and response.text.format.type == "json_object"
    assert response.output_text.startswith("{")
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)


def test_a_prompt_that_came_before_is_read_from_the_cache(client: openai.OpenAI, model: str) -> None:
    question = "Count these words: " + "lemon lime melon " * 40
    first = ask(client, model, input=question, max_output_tokens=4).usage
    again = ask(client, model, input=question, max_output_tokens=4).usage
    assert first is not None and again is not None
    assert again.input_tokens_details.cached_tokens > 0
    assert again.input_tokens == first.input_tokens


def test_a_client_that_leaves_cancels(client: openai.OpenAI, server: Served, model: str) -> None:
    fields: Any = {"model": model, "input": "Write a very long story.", "max_output_tokens": 2000, "stream": True}
    stream = client.responses.create(**fields, extra_body={"seed": 1})
    created, *_ = (event for event, _ in zip(stream, range(6), strict=False))
    stream.close()
    server.wait_idle()
    deadline = time.monotonic() + 20
    lines: list[dict[str, str]] = []
    while not lines and time.monotonic() < deadline:
        lines = [line for line in server.outcome_lines() if line["request_id"] == created.response.id]
        time.sleep(0.05)
    assert [(line["outcome"], line["reason"]) for line in lines] == [("cancelled", "client_left")]


def test_a_stream_that_is_too_late_ends_with_an_error(client: openai.OpenAI, model: str) -> None:
    late = {"deadline_seconds": 0.5, "seed": 1}
    seen: list[Any] = []
    with pytest.raises(openai.APIError, match="deadline_seconds"):
        for event in ask(client, model, stream=True, temperature=1.0, max_output_tokens=2000, extra_body=late):
            seen.append(event)
    assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "failed")
    assert seen[-1].sequence_number == len(seen) - 1
    with pytest.raises(openai.APIStatusError) as ended:
        ask(client, model, temperature=1.0, max_output_tokens=2000, extra_body=late)
    assert ended.value.status_code == 504


def test_an_answer_without_a_length_goes_on_to_its_end(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "input": "Tell me about the sea in a few sentences.", "temperature": 0}
    response = client.responses.create(**fields)
    assert response.status == "completed" and response.usage is not None and response.usage.output_tokens > 16


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"extra_body": {"stop": "a"}}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000_000}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    client: openai.OpenAI, model: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, model, **changes)
    assert refused.value.param == field
    assert refused.value.request_id is not None


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        ask(client, "other")
