"""The official OpenAI client against a real server process on the sample model: chats, streams and their figures."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.raw_http import check_all_free, outcome_of
from tests.e2e.served import Served

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]


@pytest.fixture(scope="module")
def asked(server: Served) -> dict[str, Any]:
    """A short greedy chat."""
    return {"model": server.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def prompt_tokens(server: Served) -> list[int]:
    """The tokens of the question as the model sees them."""
    answer = httpx.post(f"{server.url}/tokenize", json={"messages": QUESTION}, timeout=30)
    return list(answer.json()["tokens"])


def content_of(stream: openai.Stream[Any], choice: int = 0) -> tuple[str, list[Any]]:
    """The joined content of one choice of a stream, and all its chunks."""
    chunks = list(stream)
    pieces = [part.delta.content or "" for chunk in chunks for part in chunk.choices if part.index == choice]
    return "".join(pieces), chunks


def test_models(client: openai.OpenAI, server: Served) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI, asked: dict[str, Any], prompt_tokens: list[int]) -> None:
    answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", asked["model"], "assistant")
    assert choice.message.content and choice.message.content.strip()
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens == len(prompt_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (choice.finish_reason == "length") == (usage.completion_tokens == 12)
    assert answer._request_id == answer.id


def test_a_stream_is_the_chat_in_pieces(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    sampled = asked | {"temperature": 1.0, "seed": 11}
    whole = client.chat.completions.create(**sampled)
    text, chunks = content_of(client.chat.completions.create(stream=True, **sampled))
    assert text == whole.choices[0].message.content and len(chunks) > 3
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_of_a_stream(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_several_choices(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    several = asked | {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 6}
    first = client.chat.completions.create(**several)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert [choice.message.content for choice in client.chat.completions.create(**several).choices] == texts
    chunks = list(client.chat.completions.create(stream=True, **several))
    for index, text in enumerate(texts):
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(parts) == text
    assert first.usage is not None and first.usage.completion_tokens <= 18


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    def ask(seed: int | None) -> str | None:
        hot = asked | {"temperature": 1.5, "seed": seed, "max_tokens": 8}
        return client.chat.completions.create(**hot).choices[0].message.content

    assert ask(7) == ask(7) != ask(8)
    assert ask(-7) == ask(-7)
    assert ask(None) != ask(None)


def test_stop_strings_and_tokens(client: openai.OpenAI, asked: dict[str, Any], server: Served) -> None:
    whole = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = whole[8:12]
    answer = client.chat.completions.create(stop=["\0never", stop], **asked)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert outcome_of(server, answer.id)["outcome"] == "stopped"
    text, _ = content_of(client.chat.completions.create(stop=stop, stream=True, **asked))
    assert text == whole[: whole.index(stop)]
    kept = client.chat.completions.create(stop=stop, extra_body={"include_stop_str_in_output": True}, **asked)
    assert kept.choices[0].message.content == whole[: whole.index(stop) + len(stop)]
    body = {"prompt": whole, "add_special_tokens": False}
    third = httpx.post(f"{server.url}/tokenize", json=body, timeout=30).json()["tokens"][2]
    by_token = client.chat.completions.create(extra_body={"stop_token_ids": [third]}, **asked)
    assert by_token.choices[0].finish_reason == "stop"
    assert by_token.usage is not None and by_token.usage.completion_tokens <= 3


def test_penalties_and_bias_change_the_answer(client: openai.OpenAI, asked: dict[str, Any], server: Served) -> None:
    def ask(**changes: Any) -> str | None:
        return client.chat.completions.create(**asked | changes).choices[0].message.content

    plain = ask(max_tokens=24)
    word = httpx.post(f"{server.url}/tokenize", json={"prompt": " blue"}, timeout=30).json()["tokens"][-1]
    assert ask(logit_bias={str(word): 100}, max_tokens=5) == " blue" * 5
    assert ask(frequency_penalty=2.0, presence_penalty=2.0, max_tokens=24) != plain
    hot = {"temperature": 2.0, "seed": 1, "max_tokens": 6}
    assert ask(**hot, top_p=0.01) == ask(**hot, extra_body={"top_k": 1}) == ask(**hot, extra_body={"min_p": 1.0})


def test_logprobs_are_those_of_the_plain_route(
    client: openai.OpenAI, asked: dict[str, Any], server: Served, prompt_tokens: list[int]
) -> None:
    body = {"prompt": prompt_tokens, "max_tokens": 6, "temperature": 0, "logprobs": 3}
    plain = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["choices"][0]
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, **asked | {"max_tokens": 6})
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None and len(entries) == len(plain["token_ids"])
    for entry, token, known in zip(entries, plain["token_ids"], plain["logprobs"], strict=True):
        assert entry.logprob == known[str(token)]
        assert [top.logprob for top in entry.top_logprobs] == sorted(known.values(), reverse=True)[:3]
        assert entry.bytes is not None and bytes(entry.bytes).decode() == entry.token
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-5
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    chunks = list(
        client.chat.completions.create(logprobs=True, top_logprobs=3, stream=True, **asked | {"max_tokens": 6})
    )
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == entries
    alone = client.chat.completions.create(logprobs=True, **asked | {"max_tokens": 6}).choices[0].logprobs
    assert alone is not None and [entry.logprob for entry in alone.content or []] == [e.logprob for e in entries]
    assert all(entry.top_logprobs == [] for entry in alone.content or [])


def test_a_prompt_that_came_before_is_cached(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    question: list[Any] = [{"role": "user", "content": "Count these words: " + "cherry melon fig " * 40}]
    fields = asked | {"messages": question, "max_tokens": 2}
    cached = []
    for _ in range(2):
        usage = client.chat.completions.create(**fields).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    first, again = cached
    assert first is not None and again is not None and first < 64 < again < usage.prompt_tokens


def test_a_client_that_leaves_a_stream_cancels(client: openai.OpenAI, asked: dict[str, Any], server: Served) -> None:
    stream = client.chat.completions.create(
        stream=True, extra_body={"ignore_eos": True}, **asked | {"max_tokens": 1500}
    )
    for _, chunk in zip(range(4), stream, strict=False):
        request_id = chunk.id
    assert server.stats()["requests_running"] == 1
    stream.close()
    line = outcome_of(server, request_id)
    assert (line["outcome"], line["reason"]) == ("cancelled", "client_left")
    assert 1 <= int(line["completion_tokens"]) < 1500
    check_all_free(server)


UNSUPPORTED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "web_search_options": {},
    "guided_whitespace_pattern": " ",
    "no_such_field": 1,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_a_field_that_is_not_supported_is_refused(client: openai.OpenAI, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(extra_body={field: UNSUPPORTED[field]}, **asked)
    assert (refused.value.param, refused.value.code) == (field, "unknown_field")
    assert field in refused.value.message and refused.value.request_id is not None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "1"}}]}, "audio"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "enable_thinking"),
        ({"thinking_budget": 3}, "thinking_budget"),
    ],
)
def test_a_value_that_cannot_be_served_is_refused_by_name(
    server: Served, asked: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked | changes, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert field in f"{error['param']} {error['message']}"


def test_another_model_is_not_found(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(**asked | {"model": "other"})
    assert refused.value.param == "model"
