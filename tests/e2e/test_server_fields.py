"""Fields of the OpenAI routes through the official client: what each does, streamed and whole, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

import glint
from tests.e2e.raw_http import outcome_of
from tests.e2e.served import Served

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def asked(server: Served) -> dict[str, Any]:
    """A short greedy chat."""
    return {"model": server.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def text_asked(server: Served) -> dict[str, Any]:
    """A short greedy completion."""
    return {"model": server.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def both_chats(client: openai.OpenAI, asked: dict[str, Any], **fields: Any) -> str:
    """The content of a chat, which is the same streamed and whole."""
    whole = client.chat.completions.create(extra_body=fields, **asked).choices[0].message.content or ""
    chunks = client.chat.completions.create(extra_body=fields, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    return whole


def both_texts(client: openai.OpenAI, asked: dict[str, Any], **fields: Any) -> str:
    """The text of a completion, which is the same streamed and whole."""
    whole = client.completions.create(extra_body=fields, **asked).choices[0].text
    chunks = client.completions.create(extra_body=fields, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    return whole


def refused_chat(client: openai.OpenAI, asked: dict[str, Any], **fields: Any) -> openai.BadRequestError:
    """The refusal of a chat, which is the same streamed and whole."""
    errors = []
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(extra_body=fields, stream=stream, **asked)
        errors.append(refused.value)
    assert errors[0].body == errors[1].body
    return errors[0]


@pytest.mark.parametrize("field", ["user", "safety_identifier", "user_id"])
def test_the_log_names_the_user(client: openai.OpenAI, asked: dict[str, Any], server: Served, field: str) -> None:
    answer = client.chat.completions.create(extra_body={field: f"someone-by-{field}"}, **asked | {"max_tokens": 1})
    assert outcome_of(server, answer.id)["user"] == f"someone-by-{field}"


def test_another_cache_salt_shares_no_pages(client: openai.OpenAI, asked: dict[str, Any], server: Served) -> None:
    question: list[Any] = [{"role": "user", "content": "Sort these words: " + "larch rowan elm " * 40}]
    fields = asked | {"messages": question, "max_tokens": 2}

    def cached(**salt: str) -> int:
        usage = client.chat.completions.create(extra_body=salt, **fields).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    plain = both_chats(client, fields)
    assert [cached(cache_salt=salt) > 0 for salt in ("a", "b", "a", "ab", "b")] == [False, False, True, False, True]
    assert cached() > 0 and both_chats(client, fields, cache_salt="c") == plain
    text = {"prompt": "larch rowan elm " * 40, "max_tokens": 1, "temperature": 0}
    asking = [("a", 0), ("b", 0), ("a", 1)]
    for salt, is_cached in asking:
        body = {**text, "cache_salt": salt}
        usage = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == bool(is_cached)
    for salt, is_cached in asking:
        response = client.responses.create(
            model=server.model,
            input="Sort: " + "larch rowan elm " * 40,
            max_output_tokens=16,
            extra_body={"cache_salt": f"of a response {salt}"},
        )
        assert response.usage is not None
        assert (response.usage.input_tokens_details.cached_tokens > 0) == bool(is_cached)


def test_no_stop_ends_an_answer_before_min_tokens(
    client: openai.OpenAI, asked: dict[str, Any], text_asked: dict[str, Any], server: Served
) -> None:
    whole = both_chats(client, asked)
    body = {"prompt": whole, "add_special_tokens": False}
    tokens = httpx.post(f"{server.url}/tokenize", json=body, timeout=30).json()["tokens"]
    stop = {"stop_token_ids": [tokens[1]]}
    least = stop | {"min_tokens": 5}
    for fields, count in ((stop, 2), (least, 6)):
        usage = client.chat.completions.create(extra_body=fields, **asked).usage
        assert usage is not None
        assert usage.completion_tokens == 2 if count == 2 else usage.completion_tokens >= count
    assert both_chats(client, asked, **least) != whole
    text = both_texts(client, text_asked)
    assert both_texts(client, text_asked, stop=[text[4:7]]) == text[: text.index(text[4:7])]
    assert both_texts(client, text_asked, stop=[text[4:7]], min_tokens=8) == text
    ended = client.completions.create(
        extra_body={"min_tokens": 7, "stop_token_sequences": [[1, 2]]}, **text_asked | {"max_tokens": 7}
    )
    assert ended.usage is not None and ended.usage.completion_tokens == 7


def test_a_stop_token_sequence_ends_the_answer_behind_it(
    client: openai.OpenAI, text_asked: dict[str, Any], server: Served
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    known = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["choices"][0]["token_ids"]
    fields = {"stop_token_sequences": [[5, 6, 7], known[2:5]]}
    answer = client.completions.create(extra_body=fields, **text_asked)
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "stop"
    whole = both_texts(client, text_asked)
    assert whole.startswith(both_texts(client, text_asked, **fields)) and answer.choices[0].text != whole


def test_every_chunk_has_the_usage_so_far(
    client: openai.OpenAI, asked: dict[str, Any], text_asked: dict[str, Any], server: Served
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chat = list(client.chat.completions.create(stream=True, extra_body={"stream_options": options}, **asked))
    text = list(client.completions.create(stream=True, extra_body={"stream_options": options}, n=2, **text_asked))
    for chunks in (chat, text):
        usages = [chunk.usage for chunk in chunks]
        counts = [usage.completion_tokens for usage in usages if usage is not None]
        assert len(counts) == len(chunks) and counts == sorted(counts) and counts[-1] == counts[-2] > counts[0]
        assert all(usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
        assert not chunks[-1].choices and all(chunk.choices for chunk in chunks[:-1])
    assert chat[0].usage is not None and chat[0].usage.completion_tokens == 0
    alone = list(
        client.completions.create(
            stream=True, extra_body={"stream_options": {"continuous_usage_stats": True}}, **text_asked
        )
    )
    assert all(chunk.choices and chunk.usage is not None for chunk in alone)
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stream": True, "stream_options": options}
    lines = httpx.post(f"{server.url}/generate", json=body, timeout=60).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


def test_usage_of_chunks_is_a_boolean_of_a_stream(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    options = {"continuous_usage_stats": "yes"}
    assert "continuous_usage_stats" in refused_chat(client, asked, stream_options=options).message
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        client.chat.completions.create(extra_body={"stream_options": {"continuous_usage_stats": True}}, **asked)


def test_the_last_message_is_continued(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    whole = both_chats(client, asked)
    cut = whole.index(" ", 4)
    begun = asked | {"messages": [*QUESTION, {"role": "assistant", "content": whole[:cut]}]}
    rest = both_chats(client, begun, continue_final_message=True, add_generation_prompt=False)
    assert rest.startswith(whole[cut:][:8])
    assert both_chats(client, begun, continue_final_message=True) == rest != both_chats(client, begun)


def test_a_message_with_calls_cannot_be_continued(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    begun = asked | {"messages": [*QUESTION, {"role": "assistant", "content": "Red", "tool_calls": [call]}]}
    assert "messages[1]" in refused_chat(client, begun, continue_final_message=True).message


def test_without_sampling_the_answer_is_greedy(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    hot = asked | {"temperature": 5.0, "seed": 3}
    assert both_chats(client, hot) != both_chats(client, hot, do_sample=False) == both_chats(client, asked)


def test_the_tokenizer_is_described_as_transformers_has_it(client: openai.OpenAI, server: Served) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info", timeout=30).json()
    assert info["tokenizer_class"] and info["chat_template"].startswith("{%")
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert len(httpx.post(f"{server.url}/tokenize", json=body, timeout=30).json()["tokens"]) == 1


def test_the_version_is_that_of_the_package(server: Served) -> None:
    assert httpx.get(f"{server.url}/version", timeout=30).json() == {"version": glint.__version__}
