"""pydantic-ai: agents that answer in text and in objects, by both of OpenAI's routes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Literal

import pytest
from pydantic_ai import (
    Agent,
    ModelAuthenticationError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    NativeOutput,
    ToolOutput,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import server
from tests.clients.questions import TOWN_QUESTION, Town

SHORT: Any = {"temperature": 0, "max_tokens": 16}
LONG: Any = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}
MODELS = pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])


def model(kind: Any = OpenAIChatModel, key: str = server.KEY) -> Any:
    """A model of the running server."""
    return kind(server.MODEL, provider=OpenAIProvider(base_url=server.URL, api_key=key))


@MODELS
def test_an_agent_answers(kind: Any) -> None:
    system = {"role": "system", "content": "You are brief."}
    direct = server.chat(system, {"role": "user", "content": server.QUESTION})
    result = Agent(model(kind), instructions="You are brief.", model_settings=SHORT).run_sync(server.QUESTION)
    assert result.output == direct["choices"][0]["message"]["content"]
    assert result.usage.input_tokens == direct["usage"]["prompt_tokens"]
    assert result.usage.output_tokens == direct["usage"]["completion_tokens"] == 16


@MODELS
def test_a_stream_is_the_answer_in_pieces(kind: Any) -> None:
    async def pieces() -> list[str]:
        async with Agent(model(kind), model_settings=SHORT).run_stream(server.QUESTION) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    found = asyncio.run(pieces())
    assert "".join(found) == server.chat_text() and len(found) > 4


def test_a_conversation_goes_on() -> None:
    agent = Agent(model(), model_settings=SHORT)
    first = agent.run_sync(server.QUESTION)
    second = agent.run_sync("And two more?", message_history=first.all_messages())
    history = [
        {"role": "user", "content": server.QUESTION},
        {"role": "assistant", "content": first.output},
        {"role": "user", "content": "And two more?"},
    ]
    assert second.output == server.chat_text(*history)


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_an_object(form: Any) -> None:
    settings = LONG if form is ToolOutput else {name: LONG[name] for name in SHORT}
    agent = Agent(model(), output_type=form(Town), model_settings=settings, retries=0)
    assert isinstance(agent.run_sync(TOWN_QUESTION).output, Town)


def test_an_object_of_the_responses_route() -> None:
    agent = Agent(model(OpenAIResponsesModel), output_type=Town, model_settings=LONG, retries=0)
    assert isinstance(agent.run_sync(TOWN_QUESTION).output, Town)


def test_an_object_beside_a_tool() -> None:
    agent = Agent(model(), output_type=NativeOutput(Town), model_settings=LONG, retries=0)
    called = []

    @agent.tool_plain
    def get_country(town: Literal["Oslo", "Rome"]) -> str:
        """The country of a town."""
        called.append(town)
        return f"{town} is in Norway."

    with suppress(UsageLimitExceeded):
        result = agent.run_sync(TOWN_QUESTION, usage_limits=UsageLimits(request_limit=1))
        assert isinstance(result.output, Town) and not called
        return
    assert called in (["Oslo"], ["Rome"])


def test_errors_are_its_own_classes() -> None:
    with pytest.raises(ModelAuthenticationError):
        Agent(model(key="wrong"), model_settings=SHORT).run_sync(server.QUESTION)
    with pytest.raises(ModelContextWindowExceededError):
        Agent(model(), model_settings=SHORT).run_sync(server.TOO_LONG)
    with pytest.raises(ModelHTTPError, match="temperature") as refused:
        Agent(model(), model_settings=SHORT | {"temperature": -1}).run_sync(server.QUESTION)
    assert refused.value.status_code == 400
