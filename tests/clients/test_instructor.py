"""instructor: an answer is an object of a pydantic model, in the modes that OpenAI's routes have."""

from __future__ import annotations

import asyncio
from typing import Any

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException

from tests.clients import server
from tests.clients.questions import TOWN_QUESTION, Town, Weather

ASKED: dict[str, Any] = {
    "model": server.MODEL,
    "messages": [{"role": "user", "content": TOWN_QUESTION}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
}
SETTINGS: dict[str, Any] = {"base_url": server.URL, "api_key": server.KEY, "max_retries": 0}


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_an_object_of_each_mode(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(**SETTINGS), mode=mode)
    town, completion = client.create_with_completion(response_model=Town, **ASKED)
    assert isinstance(town, Town)
    message = completion.choices[0].message
    text = message.tool_calls[0].function.arguments if message.tool_calls else message.content
    assert Town.model_validate_json(text).model_dump() == town.model_dump()
    assert bool(message.tool_calls) == mode.value.startswith("tool")
    assert completion.usage.completion_tokens > 0


def test_the_provider_by_its_name() -> None:
    client = instructor.from_provider(f"openai/{server.MODEL}", base_url=server.URL, api_key=server.KEY)
    asked = {name: value for name, value in ASKED.items() if name != "model"}
    assert isinstance(client.create(response_model=Town, **asked), Town)


def test_the_object_grows_in_a_stream() -> None:
    client = instructor.from_openai(openai.OpenAI(**SETTINGS), mode=instructor.Mode.TOOLS)
    whole = client.create(response_model=Town, **ASKED)
    parts = list(client.create_partial(response_model=Town, **ASKED))
    assert len(parts) > 1 and parts[-1].model_dump() == whole.model_dump()


def test_asynchronous_calls() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(**SETTINGS), mode=instructor.Mode.TOOLS)
    question = [{"role": "user", "content": server.WEATHER_QUESTION}]
    weather = asyncio.run(client.create(response_model=Weather, **ASKED | {"messages": question}))
    assert isinstance(weather, Weather)


def test_the_responses_route() -> None:
    client = instructor.from_openai(openai.OpenAI(**SETTINGS), mode=instructor.Mode.RESPONSES_TOOLS)
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    assert isinstance(client.create(response_model=Town, max_output_tokens=200, **asked), Town)


def test_errors_are_those_of_openai() -> None:
    client = instructor.from_openai(openai.OpenAI(**SETTINGS | {"api_key": "wrong"}))
    with pytest.raises(InstructorRetryException) as refused:
        client.create(response_model=Town, **ASKED)
    assert isinstance(refused.value.__cause__, openai.AuthenticationError)
