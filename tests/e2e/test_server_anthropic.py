"""The official Anthropic client against a real server process on the sample model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, ToolUseBlock

from tests.e2e.questions import Town
from tests.e2e.served import Served

GREEDY = {"temperature": 0}
QUESTION = [{"role": "user", "content": "Name three colours of the rainbow."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
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
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    """The official client; a request that fails is not tried again."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def model(server: Served) -> str:
    """The name of the served model."""
    return server.model


def text_of(message: Message) -> str:
    """All text of a message."""
    return "".join(part.text for part in message.content if part.type == "text")


def test_chat(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=24, messages=QUESTION, extra_body=GREEDY)
    assert (message.type, message.role, message.model) == ("message", "assistant", model)
    assert text_of(message).strip()
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert (message.stop_reason == "max_tokens") == (message.usage.output_tokens == 24)
    assert message._request_id == message.id


def test_a_stream_ends_with_the_message_of_a_chat(client: anthropic.Anthropic, model: str) -> None:
    whole = client.messages.create(model=model, max_tokens=24, messages=QUESTION, extra_body=GREEDY)
    with client.messages.stream(model=model, max_tokens=24, messages=QUESTION, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
        assert stream.request_id == message.id
    assert len(pieces) > 1 and "".join(pieces) == text_of(whole) == text_of(message)
    assert (message.stop_reason, message.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_system_and_sampling_change_the_answer(client: anthropic.Anthropic, model: str) -> None:
    def ask(**changes: Any) -> str:
        fields = {"model": model, "max_tokens": 8, "messages": QUESTION, "extra_body": GREEDY}
        return text_of(client.messages.create(**fields | changes))

    hint = {"type": "ephemeral"}
    as_text = ask(system="You only ever answer with the word NO.")
    parts = [{"type": "text", "text": "You only ever answer "}, {"type": "text", "text": "with the word NO."}]
    assert as_text == ask(system=[parts[0], parts[1] | {"cache_control": hint}]) != ask()
    hot = {"temperature": 1.5, "top_p": 0.99, "top_k": 40, "seed": 3}
    assert ask(extra_body=hot) == ask(extra_body=hot) != ask(extra_body=hot | {"seed": 4})


def test_stop_sequences(client: anthropic.Anthropic, model: str) -> None:
    whole = text_of(client.messages.create(model=model, max_tokens=24, messages=QUESTION, extra_body=GREEDY))
    stop = whole[8:12]
    message = client.messages.create(
        model=model, max_tokens=24, messages=QUESTION, stop_sequences=["\0never", stop], extra_body=GREEDY
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "get_weather"}, pytest.param({"type": "any"}, marks=pytest.mark.slow)]
)
def test_a_tool_loop(client: anthropic.Anthropic, model: str, choice: dict[str, Any]) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": model, "max_tokens": 200, "tools": [WEATHER], "extra_body": GREEDY}
    forced = asked | {"tool_choice": choice | {"disable_parallel_tool_use": True}}
    message = client.messages.create(messages=question, **forced)
    assert message.stop_reason == "tool_use"
    (call,) = [part for part in message.content if isinstance(part, ToolUseBlock)]
    assert call.name == "get_weather" and call.input["city"] in ("Paris", "Rome")
    with client.messages.stream(messages=question, **forced) as stream:
        streamed = stream.get_final_message()
    assert [part.input for part in streamed.content if part.type == "tool_use"] == [call.input]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}
    history = [*question, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=history, **asked | {"tool_choice": {"type": "none"}, "max_tokens": 8})
    alone = client.messages.count_tokens(model=model, messages=question).input_tokens
    shown = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert shown > alone + 30
    assert not any(part.type == "tool_use" for part in answer.content)


def test_an_answer_that_fits_a_schema(client: anthropic.Anthropic, model: str) -> None:
    question: list[Any] = [{"role": "user", "content": "Describe the town Oslo as JSON."}]
    message = client.messages.parse(
        model=model, max_tokens=200, messages=question, output_format=Town, extra_body=GREEDY
    )
    town = message.parsed_output
    assert isinstance(town, Town) and json.loads(text_of(message)) == town.model_dump()


def test_a_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 24, "extra_body": GREEDY}
    whole = text_of(client.messages.create(messages=QUESTION, **asked))
    cut = whole.index(" ", 4)
    for begun in (whole[:cut], [{"type": "text", "text": whole[:cut]}]):
        prefilled: list[Any] = [*QUESTION, {"role": "assistant", "content": begun}]
        rest = text_of(client.messages.create(messages=prefilled, **asked))
        assert rest.startswith(whole[cut:][:8])
        with client.messages.stream(messages=prefilled, **asked) as stream:
            assert "".join(stream.text_stream) == rest
    plain = client.messages.count_tokens(model=model, messages=QUESTION).input_tokens
    assert plain < client.messages.count_tokens(model=model, messages=prefilled).input_tokens < plain + cut


def test_models_have_the_shape_of_anthropic(client: anthropic.Anthropic, model: str) -> None:
    page = client.models.list()
    (entry,) = page.data
    assert (entry.id, entry.type, entry.display_name, page.has_more) == (model, "model", model, False)
    assert (page.first_id, page.last_id) == (model, model) and entry.created_at.year >= 2025
    assert client.models.retrieve(model) == entry and [found.id for found in client.models.list()] == [model]
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.models.retrieve("other")


def test_counted_tokens_are_those_of_the_prompt(client: anthropic.Anthropic, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "messages": QUESTION, "system": "Be short.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**fields)
    usage = client.messages.create(max_tokens=4, **fields).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    longer: list[Any] = [{"role": "user", "content": "Hello! " + str(QUESTION[0]["content"])}]
    assert client.messages.count_tokens(**fields | {"messages": longer}).input_tokens == counted.input_tokens + 2


def test_a_prompt_that_came_before_is_read_from_the_cache(client: anthropic.Anthropic, model: str) -> None:
    question: list[Any] = [{"role": "user", "content": "Count these words: " + "apple pear plum " * 40}]
    first = client.messages.create(model=model, max_tokens=4, messages=question).usage
    again = client.messages.create(model=model, max_tokens=4, messages=question).usage
    assert again.cache_read_input_tokens is not None and again.cache_read_input_tokens > 0
    total = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert again.input_tokens + again.cache_read_input_tokens == total


def test_a_client_that_leaves_cancels(client: anthropic.Anthropic, server: Served, model: str) -> None:
    question: list[Any] = [{"role": "user", "content": "Write a very long story."}]
    with client.messages.stream(
        model=model, max_tokens=2000, messages=question, extra_body={"temperature": 1.0, "seed": 1}
    ) as stream:
        for _, _ in zip(range(4), stream.text_stream, strict=False):
            pass
        message_id = stream.current_message_snapshot.id
    server.wait_idle()
    deadline = time.monotonic() + 20
    lines: list[dict[str, str]] = []
    while not lines and time.monotonic() < deadline:
        lines = [line for line in server.outcome_lines() if line["request_id"] == message_id]
        time.sleep(0.05)
    assert [(line["outcome"], line["reason"]) for line in lines] == [("cancelled", "client_left")]


def test_a_stream_that_is_too_late_ends_with_an_error(client: anthropic.Anthropic, model: str) -> None:
    late = {"deadline_seconds": 0.5, "temperature": 1.0, "seed": 1}
    with (
        pytest.raises(anthropic.APIStatusError) as ended,
        client.messages.stream(model=model, max_tokens=2000, messages=QUESTION, extra_body=late) as stream,
    ):
        stream.until_done()
    assert ended.value.body["error"]["type"] == "timeout_error"
    assert "deadline_seconds" in ended.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"extra_body": {"logit_bias": {}}}, "logit_bias"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "get_weather"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "Red "}]}, "messages[1].content"),
        (
            {"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "Red\n"}]}]},
            "messages[1].content",
        ),
        (
            {
                "messages": [*QUESTION, {"role": "assistant", "content": "Red"}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
            "messages[1] begins the answer",
        ),
        (
            {
                "messages": [
                    *QUESTION,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                ]
            },
            "messages[1] has tool calls",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    client: anthropic.Anthropic, model: str, changes: dict[str, Any], field: str
) -> None:
    fields: dict[str, Any] = {"model": model, "max_tokens": 16, "messages": QUESTION}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**fields | changes)
    assert field in refused.value.body["error"]["message"]
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id is not None


def test_another_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(model="other", max_tokens=8, messages=QUESTION)


def test_max_tokens_must_be_given(server: Served, model: str) -> None:
    answer = httpx.post(f"{server.url}/v1/messages", json={"model": model, "messages": QUESTION}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the field 'max_tokens' is missing; add it"
    assert answer.json()["type"] == "error"
