"""Log-probabilities of the prompt in vLLM's form, through the official client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.served import Served

PROMPTS = ["Once upon a time there was", "The capital of France is Paris. The capital of"]


def entries_of(answer: Any) -> list[Any]:
    """The entries of an answer of a chat or of a choice of a completion."""
    return list(answer.model_extra["prompt_logprobs"])


def check_entries(entries: list[Any], tokens: list[int], count: int) -> None:
    """Every entry has its own token first, then the likeliest by rank; the rank of an unlikelier token is null."""
    assert entries[0] is None and len(entries) == len(tokens)
    for token, entry in zip(tokens[1:], entries[1:], strict=True):
        assert next(iter(entry)) == str(token)
        known = sorted(entry.values(), key=lambda one: -one["logprob"])
        ranked = [one for one in known if one["rank"] is not None]
        assert [one["rank"] for one in ranked] == [*range(1, count + 1)]
        own = entry[str(token)]
        assert len(entry) == count + (own["rank"] is None) and (own["rank"] is not None or known[-1] is own)


@pytest.fixture(scope="module")
def asked(server: Served) -> dict[str, Any]:
    """A greedy completion of one token."""
    return {"model": server.model, "max_tokens": 1, "temperature": 0}


def tokens_of(server: Served, **body: Any) -> list[int]:
    """The tokens of a prompt or of messages."""
    return list(httpx.post(f"{server.url}/tokenize", json=body, timeout=30).json()["tokens"])


@pytest.mark.parametrize("count", [0, 1, 20])
def test_every_choice_of_every_prompt_has_those_of_its_prompt(
    client: openai.OpenAI, server: Served, asked: dict[str, Any], count: int
) -> None:
    answer = client.completions.create(prompt=PROMPTS, n=2, extra_body={"prompt_logprobs": count}, **asked)
    assert len(answer.choices) == 4
    for choice in answer.choices:
        tokens = tokens_of(server, prompt=PROMPTS[choice.index // 2])
        entries = entries_of(choice)
        check_entries(entries, tokens, count)
        shown = [entry[str(token)]["decoded_token"] for token, entry in zip(tokens[1:], entries[1:], strict=True)]
        assert PROMPTS[choice.index // 2].endswith("".join(shown))


def test_they_are_those_of_echo_also_where_the_prompt_is_cached(
    client: openai.OpenAI, server: Served, asked: dict[str, Any]
) -> None:
    prompt = "larch rowan elm " * 40
    client.completions.create(prompt=prompt, **asked)
    fields = {"prompt_logprobs": 2}
    answers = [
        client.completions.create(prompt=prompt, extra_body=fields, **asked),
        client.completions.create(prompt=prompt, echo=True, logprobs=4, extra_body=fields, **asked),
        client.completions.create(prompt=prompt, echo=True, logprobs=0, extra_body=fields, **asked),
    ]
    tokens = tokens_of(server, prompt=prompt)
    alone, *echoed = (entries_of(answer.choices[0]) for answer in answers)
    check_entries(alone, tokens, 2)
    for answer, entries in zip(answers[1:], echoed, strict=True):
        assert answer.choices[0].logprobs is not None
        by_echo = (answer.choices[0].logprobs.token_logprobs or [])[1 : len(tokens)]
        own = [entry[str(token)] for token, entry in zip(tokens[1:], entries[1:], strict=True)]
        assert [one["logprob"] for one in own] == by_echo
        assert [[*entry] for entry in entries[1:]] == [[*entry] for entry in alone[1:]]
    assert answers[1].choices[0].logprobs is not None
    assert len((answers[1].choices[0].logprobs.top_logprobs or [])[1]) == 4
    plain = client.completions.create(prompt=prompt, **asked)
    assert plain.choices[0].text == answers[0].choices[0].text and "prompt_logprobs" not in plain.choices[0].model_extra


def test_a_chat_has_them_beside_its_choices(client: openai.OpenAI, server: Served, asked: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name three colours."}]
    answer = client.chat.completions.create(messages=messages, n=2, extra_body={"prompt_logprobs": 3}, **asked)
    check_entries(entries_of(answer), tokens_of(server, messages=messages), 3)
    plain = client.chat.completions.create(messages=messages, n=2, **asked)
    assert [choice.message for choice in plain.choices] == [choice.message for choice in answer.choices]
    assert "prompt_logprobs" not in plain.model_extra


@pytest.mark.parametrize("value", [-1, 21, 1.5, "5", True])
def test_other_numbers_are_refused(client: openai.OpenAI, asked: dict[str, Any], value: Any) -> None:
    fields = {"prompt_logprobs": value}
    for make in (
        lambda: client.completions.create(prompt="a b", extra_body=fields, **asked),
        lambda: client.completions.create(prompt="a b", echo=True, logprobs=5, extra_body=fields, **asked),
        lambda: client.chat.completions.create(messages=[{"role": "user", "content": "a"}], extra_body=fields, **asked),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            make()
        assert refused.value.param == "prompt_logprobs" and "prompt_logprobs" in refused.value.message


def test_a_stream_has_none(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    fields = {"prompt_logprobs": 0}
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not supported in a stream"):
        client.completions.create(prompt="a b", stream=True, extra_body=fields, **asked)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not supported in a stream"):
        client.chat.completions.create(
            messages=[{"role": "user", "content": "a"}], stream=True, extra_body=fields, **asked
        )


def test_more_than_the_server_writes_is_refused(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt=[[7] * 4000] * 6, extra_body={"prompt_logprobs": 20}, **asked)
    assert refused.value.param == "prompt_logprobs" and "entries for the prompts" in refused.value.message
