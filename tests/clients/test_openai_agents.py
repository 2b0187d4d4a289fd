"""openai-agents: runs, streams, tools, handoffs of a format, sessions, by both of OpenAI's routes."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)

from tests.clients import server
from tests.clients.questions import TOWN_QUESTION, Town

MODELS = pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
SHORT = ModelSettings(temperature=0, max_tokens=60)
QUESTION = "Thank you."
set_tracing_disabled(True)


@function_tool
def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"Sunny in {city} for {days} days."


def agent(kind: Any = OpenAIChatCompletionsModel, key: str = server.KEY, **settings: Any) -> Agent[Any]:
    """An agent on the running server."""
    client = openai.AsyncOpenAI(base_url=server.URL, api_key=key, max_retries=0)
    model = kind(model=server.MODEL, openai_client=client)
    chosen = {"model_settings": SHORT, "instructions": "You are brief."} | settings
    return Agent(name="Assistant", model=model, **chosen)


def direct() -> dict[str, Any]:
    """The server's own answer to what the agent asks."""
    system = {"role": "system", "content": "You are brief."}
    return server.chat(system, {"role": "user", "content": QUESTION}, max_tokens=60)


@MODELS
def test_a_run(kind: Any) -> None:
    result = asyncio.run(Runner.run(agent(kind), QUESTION))
    expected = direct()
    assert result.final_output == expected["choices"][0]["message"]["content"]
    usage = result.context_wrapper.usage
    assert usage.input_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == expected["usage"]["completion_tokens"]


@MODELS
def test_a_stream_is_the_answer_in_pieces(kind: Any) -> None:
    async def pieces() -> tuple[list[str], str]:
        result = Runner.run_streamed(agent(kind), QUESTION)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        return deltas, result.final_output

    deltas, whole = asyncio.run(pieces())
    assert "".join(deltas) == whole == direct()["choices"][0]["message"]["content"] and len(deltas) > 4


@pytest.mark.parametrize(
    ("kind", "choice"), [(OpenAIChatCompletionsModel, "required"), (OpenAIResponsesModel, "get_weather")]
)
def test_a_forced_tool(kind: Any, choice: str) -> None:
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice=choice, parallel_tool_calls=False)
    made = agent(kind, tools=[get_weather], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    result = asyncio.run(Runner.run(made, server.WEATHER_QUESTION))
    assert result.final_output.startswith("Sunny in ") and len(result.raw_responses) == 1


def test_a_tool_loop() -> None:
    settings = ModelSettings(temperature=0, max_tokens=120, tool_choice="get_weather")
    result = asyncio.run(Runner.run(agent(tools=[get_weather], model_settings=settings), server.WEATHER_QUESTION))
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item"
    assert isinstance(result.final_output, str) and len(result.raw_responses) >= 2


@MODELS
def test_an_object(kind: Any) -> None:
    made = agent(kind, output_type=Town, model_settings=ModelSettings(temperature=0, max_tokens=120))
    assert isinstance(asyncio.run(Runner.run(made, TOWN_QUESTION)).final_output, Town)


def test_an_object_beside_a_tool() -> None:
    settings = ModelSettings(temperature=0, max_tokens=120, parallel_tool_calls=False)
    made = agent(output_type=Town, tools=[get_weather], model_settings=settings)
    made.tool_use_behavior = "stop_on_first_tool"
    result = asyncio.run(Runner.run(made, TOWN_QUESTION))
    assert isinstance(result.final_output, Town) or result.final_output.startswith("Sunny in ")


def test_a_session_remembers() -> None:
    async def talk() -> tuple[str, str]:
        session = SQLiteSession("one")
        first = await Runner.run(agent(), QUESTION, session=session)
        second = await Runner.run(agent(), "And two more?", session=session)
        return first.final_output, second.final_output

    first, second = asyncio.run(talk())
    history = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And two more?"},
    ]
    assert second == server.chat_text(*history, max_tokens=60)


@MODELS
def test_errors_are_those_of_openai(kind: Any) -> None:
    with pytest.raises(openai.AuthenticationError):
        asyncio.run(Runner.run(agent(kind, key="wrong"), QUESTION))
    with pytest.raises(openai.BadRequestError) as refused:
        asyncio.run(Runner.run(agent(kind), server.TOO_LONG))
    assert refused.value.code == "context_length_exceeded"
