"""litellm: completion, streams, tools, structured answers, text completions, the other OpenAI and Anthropic routes."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

from tests.clients import server
from tests.clients.questions import NAMED_WEATHER, TOWN_QUESTION, WEATHER_TOOL, Town, Weather

MESSAGES = [{"role": "user", "content": server.QUESTION}]
WEATHER_MESSAGES = [{"role": "user", "content": server.WEATHER_QUESTION}]
ASKED: dict[str, Any] = {
    "model": f"openai/{server.MODEL}",
    "api_base": server.URL,
    "api_key": server.KEY,
    "temperature": 0,
    "max_tokens": 16,
}


def joined(chunks: Any) -> str:
    """The text of the pieces of a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_completion() -> None:
    answer = litellm.completion(messages=MESSAGES, **ASKED)
    direct = server.chat()
    assert answer.choices[0].message.content == direct["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == direct["choices"][0]["finish_reason"] == "length"
    assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    assert answer.usage.completion_tokens == direct["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "litellm_proxy"])
def test_a_stream_is_the_answer_in_pieces(provider: str) -> None:
    asked = ASKED | {"model": f"{provider}/{server.MODEL}"}
    options = {"include_usage": True}
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, stream_options=options, **asked))
    assert joined(chunks) == server.chat_text() and len(chunks) > 4
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == server.chat_text() and whole.usage.completion_tokens == 16


def test_asynchronous_calls() -> None:
    async def both() -> tuple[str, str]:
        answer = await litellm.acompletion(messages=MESSAGES, **ASKED)
        stream = await litellm.acompletion(messages=MESSAGES, stream=True, **ASKED)
        return answer.choices[0].message.content, joined([chunk async for chunk in stream])

    assert asyncio.run(both()) == (server.chat_text(), server.chat_text())


@pytest.mark.parametrize("choice", ["required", NAMED_WEATHER])
def test_a_tool_loop(choice: Any) -> None:
    asked = ASKED | {"max_tokens": 120, "tools": [WEATHER_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = litellm.completion(messages=WEATHER_MESSAGES, **asked)
    (call,) = answer.choices[0].message.tool_calls
    weather = Weather.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather"
    chunks = list(litellm.completion(messages=WEATHER_MESSAGES, stream=True, **asked))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert Weather.model_validate_json(streamed.function.arguments) == weather
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "Sunny, 21 degrees."}
    history = [*WEATHER_MESSAGES, answer.choices[0].message, result]
    after = litellm.completion(messages=history, tools=[WEATHER_TOOL], **ASKED)
    assert after.choices[0].message.content and after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_structured_answer() -> None:
    messages = [{"role": "user", "content": TOWN_QUESTION}]
    answer = litellm.completion(messages=messages, response_format=Town, **ASKED | {"max_tokens": 120})
    town = Town.model_validate_json(answer.choices[0].message.content)
    schema = {"name": "town", "schema": Town.model_json_schema(), "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    direct = server.chat_text(*messages, max_tokens=120, response_format=form)
    assert town == Town.model_validate_json(direct)


@pytest.mark.parametrize("is_text", [True, False])
def test_a_text_completion(is_text: bool) -> None:
    prompt = server.PROMPT if is_text else [server.token_ids(server.PROMPT)]
    asked = ASKED | {"model": f"text-completion-openai/{server.MODEL}", "max_tokens": 8}
    answer = litellm.text_completion(prompt=prompt, **asked)
    direct = server.complete(prompt)
    assert answer.choices[0].text == direct["choices"][0]["text"]
    assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    stream = litellm.text_completion(prompt=prompt, stream=True, **asked)
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == answer.choices[0].text


def test_responses() -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"} | {"max_output_tokens": 16}
    answer = litellm.responses(input=server.QUESTION, **asked)
    assert answer.output[0].content[0].text == server.chat_text() and answer.usage.output_tokens == 16
    events = list(litellm.responses(input=server.QUESTION, stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == server.chat_text()


def test_the_messages_route_of_anthropic() -> None:
    asked = ASKED | {"model": f"anthropic/{server.MODEL}", "api_base": server.ORIGIN}
    answer = litellm.completion(messages=MESSAGES, **asked)
    assert answer.choices[0].message.content == server.chat_text()
    assert joined(litellm.completion(messages=MESSAGES, stream=True, **asked)) == server.chat_text()


def test_a_router() -> None:
    parameters = {name: value for name, value in ASKED.items() if name not in ("temperature", "max_tokens")}
    router = litellm.Router(model_list=[{"model_name": "ours", "litellm_params": parameters}])
    answer = router.completion(model="ours", messages=MESSAGES, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content == server.chat_text()


def test_several_choices_and_log_probabilities() -> None:
    answer = litellm.completion(messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, **ASKED)
    direct = server.chat(logprobs=True, top_logprobs=2)["choices"][0]
    assert [choice.message.content for choice in answer.choices] == [direct["message"]["content"]] * 2
    known = [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert known == [entry["logprob"] for entry in direct["logprobs"]["content"]]


def test_errors_are_its_own_classes() -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=MESSAGES, **ASKED | {"api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": server.TOO_LONG}], **ASKED)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **ASKED | {"temperature": -1})
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        litellm.completion(messages=MESSAGES, **ASKED | {"model": "openai/nobody"})
