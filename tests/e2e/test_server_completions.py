"""Text completions with the official OpenAI client, and a model folder that knows no chat."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.served import Served

PROMPTS = ["The capital of France is", "One, two, three,"]


@pytest.fixture(scope="module")
def asked(server: Served) -> dict[str, Any]:
    """A short greedy completion."""
    return {"model": server.model, "max_tokens": 8, "temperature": 0}


def tokens_of(server: Served, text: str) -> list[int]:
    """The tokens of a text."""
    return list(httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=30).json()["tokens"])


def test_several_prompts_give_what_each_gives_alone(
    client: openai.OpenAI, asked: dict[str, Any], server: Served
) -> None:
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in PROMPTS]
    together = client.completions.create(prompt=PROMPTS, **asked)
    assert [choice.text for choice in together.choices] == alone and "Paris" in alone[0]
    assert [choice.index for choice in together.choices] == [0, 1]
    tokens = [tokens_of(server, prompt) for prompt in PROMPTS]
    by_tokens = client.completions.create(prompt=tokens, **asked)
    assert [choice.text for choice in by_tokens.choices] == alone
    assert client.completions.create(prompt=tokens[0], **asked).choices[0].text == alone[0]
    assert together.usage is not None and together.usage.prompt_tokens == sum(map(len, tokens))


def test_choices_are_numbered_through(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    answer = client.completions.create(prompt=PROMPTS, n=2, seed=3, **asked | {"temperature": 1.2})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    pieces = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(prompt=PROMPTS, n=2, seed=3, stream=True, **asked | {"temperature": 1.2}):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert list(pieces.values()) == [choice.text for choice in answer.choices]


def test_echo_and_logprobs(client: openai.OpenAI, asked: dict[str, Any], server: Served) -> None:
    answer = client.completions.create(prompt=PROMPTS[0], echo=True, logprobs=2, **asked)
    (choice,) = answer.choices
    prompt = tokens_of(server, PROMPTS[0])
    alone = client.completions.create(prompt=prompt, logprobs=2, **asked).choices[0]
    assert choice.text == PROMPTS[0] + alone.text
    known, own = choice.logprobs, alone.logprobs
    assert known is not None and own is not None and known.tokens is not None and known.text_offset is not None
    assert known.token_logprobs is not None and own.token_logprobs is not None and known.top_logprobs is not None
    assert len(known.tokens) == len(prompt) + 8 and "".join(known.tokens) == choice.text
    assert known.token_logprobs[0] is None and known.top_logprobs[0] is None
    assert known.token_logprobs[len(prompt) :] == own.token_logprobs
    assert all(logprob <= 0 for logprob in known.token_logprobs[1:])
    for token, offset in zip(known.tokens, known.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0}
    plain = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["prompt_logprobs"]
    expected = [known[str(token)] for token, known in zip(prompt[1:], plain[1:], strict=True)]
    assert known.token_logprobs[1 : len(prompt)] == expected


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ["Paris"]}])
def test_no_tokens_with_echo_give_the_prompt_alone(
    client: openai.OpenAI, asked: dict[str, Any], fields: dict[str, Any]
) -> None:
    none = asked | {"max_tokens": 0, "echo": True} | fields
    answer = client.completions.create(prompt=PROMPTS, logprobs=1, **none)
    count = fields.get("n", 1)
    assert [choice.text for choice in answer.choices] == [prompt for prompt in PROMPTS for _ in range(count)]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    whole = client.completions.create(prompt=PROMPTS, logprobs=1, echo=True, **asked | fields)
    for choice, longer in zip(answer.choices, whole.choices, strict=True):
        assert choice.logprobs is not None and longer.logprobs is not None
        known, more = choice.logprobs.token_logprobs, longer.logprobs.token_logprobs
        assert known is not None and more is not None and len(known) > 3
        assert known[0] is None and known == more[: len(known)]
    assert client.completions.create(prompt=PROMPTS[0], **none).choices[0].logprobs is None


def test_a_stream_is_the_completion_in_pieces(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    whole = client.completions.create(prompt=PROMPTS[1], logprobs=1, **asked)
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(prompt=PROMPTS[1], logprobs=1, stream=True, stream_options=options, **asked)
    )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    logprobs = [
        value
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for value in choice.logprobs.token_logprobs
    ]
    assert whole.choices[0].logprobs is not None and logprobs == whole.choices[0].logprobs.token_logprobs


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "stream": True}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": "x " * 9000}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"tools": []}, "tools"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    server: Served, asked: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=asked | {"prompt": "x"} | changes, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert field in f"{error['param']} {error['message']}"
