"""Fields of the OpenAI routes through the official client: what each does, streamed and whole, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

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


def refused_text(client: openai.OpenAI, asked: dict[str, Any], **fields: Any) -> openai.BadRequestError:
    """The refusal of a completion, which is the same streamed and whole."""
    errors = []
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(extra_body=fields, stream=stream, **asked)
        errors.append(refused.value)
    assert errors[0].body == errors[1].body
    return errors[0]


WITHOUT_EFFECT: dict[str, Any] = {
    "metadata": {"team": "a", "run": "7"},
    "user": "someone",
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "hash-of-someone",
    "prompt_cache_key": "key",
}
NEVER: dict[str, Any] = {
    "metadata": {str(number): "x" for number in range(17)},
    "user": 5,
    "store": True,
    "service_tier": "flex",
    "safety_identifier": ["x"],
    "prompt_cache_key": 7,
}


def test_what_clients_send_by_themselves_changes_no_answer(
    client: openai.OpenAI, asked: dict[str, Any], text_asked: dict[str, Any], server: Served
) -> None:
    assert both_chats(client, asked, **WITHOUT_EFFECT, verbosity="medium") == both_chats(client, asked)
    assert both_texts(client, text_asked, **WITHOUT_EFFECT | {"service_tier": "default"}) == both_texts(
        client, text_asked
    )
    answer = client.chat.completions.create(safety_identifier="hash-7", **asked)
    assert outcome_of(server, answer.id)["user"] == "hash-7"


@pytest.mark.parametrize("field", NEVER)
def test_other_values_of_such_fields_are_refused(
    client: openai.OpenAI, asked: dict[str, Any], text_asked: dict[str, Any], field: str
) -> None:
    for refused in (
        refused_chat(client, asked, **{field: NEVER[field]}),
        refused_text(client, text_asked, **{field: NEVER[field]}),
    ):
        assert refused.param == field and field in refused.message


def test_the_model_has_one_verbosity(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    assert refused_chat(client, asked, verbosity="low").param == "verbosity"


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


@pytest.mark.parametrize("salt", ["", 5, "x" * 1025])
def test_a_cache_salt_that_is_none(
    client: openai.OpenAI, asked: dict[str, Any], text_asked: dict[str, Any], salt: Any
) -> None:
    assert refused_chat(client, asked, cache_salt=salt).param == "cache_salt"
    assert refused_text(client, text_asked, cache_salt=salt).param == "cache_salt"
