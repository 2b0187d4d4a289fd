"""llama-index: complete, chat, streams, tools and structured answers of its OpenAI-like model."""

import asyncio
from typing import Any, Literal

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients import server
from tests.clients.questions import TOWN_QUESTION, Town

MESSAGES = [ChatMessage(role="user", content=server.QUESTION)]


def model(**settings: Any) -> OpenAILike:
    """The running server as a chat model."""
    chosen: dict[str, Any] = {
        "model": server.MODEL,
        "api_base": server.URL,
        "api_key": server.KEY,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 8192,
        "temperature": 0,
        "max_tokens": 16,
        "max_retries": 0,
    }
    return OpenAILike(**chosen | settings)


def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"Sunny in {city} for {days} days."


def test_chat_and_complete() -> None:
    direct = server.chat()
    answer = model().chat(MESSAGES)
    assert (
        answer.message.content == direct["choices"][0]["message"]["content"] == model().complete(server.QUESTION).text
    )
    assert answer.raw.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    assert answer.raw.usage.completion_tokens == direct["usage"]["completion_tokens"] == 16


def test_a_stream_is_the_answer_in_pieces() -> None:
    chunks = list(model().stream_chat(MESSAGES))
    assert "".join(chunk.delta or "" for chunk in chunks) == chunks[-1].message.content == server.chat_text()
    assert list(model().stream_complete(server.QUESTION))[-1].text == server.chat_text() and len(chunks) > 4


def test_asynchronous_calls() -> None:
    async def both() -> tuple[str | None, str]:
        answer = await model().achat(MESSAGES)
        stream = await model().astream_chat(MESSAGES)
        return answer.message.content, "".join([chunk.delta or "" async for chunk in stream])

    assert asyncio.run(both()) == (server.chat_text(), server.chat_text())


def test_a_text_completion() -> None:
    plain = model(is_chat_model=False, is_function_calling_model=False, max_tokens=8)
    expected = server.complete()["choices"][0]["text"]
    assert plain.complete(server.PROMPT).text == expected
    assert list(plain.stream_complete(server.PROMPT))[-1].text == expected


@pytest.mark.parametrize("settings", [{"tool_required": True}, {"tool_choice": "get_weather"}])
def test_a_forced_tool(settings: dict[str, Any]) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    asking = model(max_tokens=200)
    answer = asking.chat_with_tools([tool], user_msg=server.WEATHER_QUESTION, **settings)
    (call,) = asking.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather" and set(call.tool_kwargs) == {"city", "days"}
    assert str(tool(**call.tool_kwargs)).startswith("Sunny in ")


@pytest.mark.parametrize("uses_format", [False, True])
def test_a_structured_answer(uses_format: bool) -> None:
    asking = model(max_tokens=200, should_use_structured_outputs=uses_format)
    assert isinstance(asking.structured_predict(Town, PromptTemplate(TOWN_QUESTION)), Town)
    assert isinstance(asking.as_structured_llm(Town).complete(TOWN_QUESTION).raw, Town)


def test_errors_are_those_of_openai() -> None:
    with pytest.raises(openai.AuthenticationError):
        model(api_key="wrong").chat(MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        model().complete(server.TOO_LONG)
    assert refused.value.code == "context_length_exceeded"
