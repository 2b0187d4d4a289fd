"""langchain-openai: invoke, stream, batch, chains, tools, structured answers, the responses route, completions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError, ModelAuthenticationError, ModelInvalidRequestError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients import server
from tests.clients.questions import TOWN_QUESTION, Town, Weather

ASKED: dict[str, Any] = {
    "model": server.MODEL,
    "base_url": server.URL,
    "api_key": server.KEY,
    "temperature": 0,
    "max_tokens": 16,
    "max_retries": 0,
}


@tool(args_schema=Weather)
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"Sunny in {city} for {days} days."


@pytest.mark.parametrize("uses_responses", [False, True])
def test_invoke_and_stream(uses_responses: bool) -> None:
    model = ChatOpenAI(use_responses_api=uses_responses, **ASKED)
    direct = server.chat()
    answer = model.invoke(server.QUESTION)
    assert answer.text == direct["choices"][0]["message"]["content"]
    usage = answer.usage_metadata
    assert usage is not None and usage["input_tokens"] == direct["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == direct["usage"]["completion_tokens"] == 16
    chunks = list(model.stream(server.QUESTION))
    assert "".join(chunk.text for chunk in chunks) == answer.text and len(chunks) > 4


def test_a_stream_counts_its_tokens() -> None:
    whole = None
    for chunk in ChatOpenAI(stream_usage=True, **ASKED).stream(server.QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == 16
    assert whole.response_metadata["finish_reason"] == "length"


def test_asynchronous_calls() -> None:
    model = ChatOpenAI(**ASKED)

    async def both() -> tuple[str, str]:
        answer = await model.ainvoke(server.QUESTION)
        return answer.text, "".join([chunk.text async for chunk in model.astream(server.QUESTION)])

    assert asyncio.run(both()) == (server.chat_text(), server.chat_text())


def test_a_chain_and_a_batch() -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "You are brief."), ("user", "Name three {things}.")])
    chain = prompt | ChatOpenAI(**ASKED) | StrOutputParser()
    system = {"role": "system", "content": "You are brief."}
    expected = [server.chat_text(system, {"role": "user", "content": f"Name three {of}."}) for of in ("fruits", "cats")]
    assert chain.batch([{"things": "fruits"}, {"things": "cats"}]) == expected
    messages = [SystemMessage("You are brief."), HumanMessage("Name three fruits.")]
    assert ChatOpenAI(**ASKED).invoke(messages).text == expected[0]


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_a_tool_loop(choice: str) -> None:
    model = ChatOpenAI(**ASKED | {"max_tokens": 120})
    bound = model.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    question = HumanMessage(server.WEATHER_QUESTION)
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    weather = Weather.model_validate(call["args"])
    assert call["name"] == "get_weather" and not answer.invalid_tool_calls
    whole = None
    for chunk in bound.stream([question]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and [made["args"] for made in whole.tool_calls] == [call["args"]]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.content == f"Sunny in {weather.city} for {weather.days} days."
    after = ChatOpenAI(**ASKED).bind_tools([get_weather]).invoke([question, answer, result])
    assert after.text and after.usage_metadata is not None and answer.usage_metadata is not None
    assert after.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(method: Any) -> None:
    model = ChatOpenAI(**ASKED | {"max_tokens": 120})
    town = model.with_structured_output(Town, method=method).invoke(TOWN_QUESTION)
    assert isinstance(town, Town)
    full = model.with_structured_output(Town, method=method, include_raw=True).invoke(TOWN_QUESTION)
    assert isinstance(full, dict) and full["parsed"] == town and full["parsing_error"] is None


def test_json_mode() -> None:
    model = ChatOpenAI(**ASKED | {"max_tokens": 200}).with_structured_output(method="json_mode")
    assert isinstance(model.invoke("Give a JSON object with the key name."), dict)


def test_log_probabilities() -> None:
    answer = ChatOpenAI(**ASKED).bind(logprobs=True, top_logprobs=2).invoke(server.QUESTION)
    direct = server.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    known = answer.response_metadata["logprobs"]["content"]
    assert [entry["logprob"] for entry in known] == [entry["logprob"] for entry in direct]


def test_a_completion() -> None:
    model = OpenAI(**ASKED | {"max_tokens": 8})
    expected = server.complete()["choices"][0]["text"]
    assert model.invoke(server.PROMPT) == expected
    assert "".join(model.stream(server.PROMPT)) == expected
    assert model.batch([server.PROMPT, "One, two,"]) == [expected, server.complete("One, two,")["choices"][0]["text"]]


def test_errors_are_its_own_classes() -> None:
    with pytest.raises(ModelAuthenticationError) as refused:
        ChatOpenAI(**ASKED | {"api_key": "wrong"}).invoke(server.QUESTION)
    assert isinstance(refused.value, openai.AuthenticationError)
    with pytest.raises(ContextOverflowError):
        ChatOpenAI(**ASKED).invoke(server.TOO_LONG)
    with pytest.raises(ModelInvalidRequestError, match="temperature"):
        ChatOpenAI(**ASKED | {"temperature": -1}).invoke(server.QUESTION)
