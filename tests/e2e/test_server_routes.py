"""Paths and methods that the server does not have: the refusal names the ones that were meant."""

from __future__ import annotations

import re

import anthropic
import httpx
import openai
import pytest

from tests.e2e.served import Served


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/model", "/v1/models"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/messages/count-tokens", "/v1/messages/count_tokens"),
        ("/responses", "/v1/responses"),
        ("/v1/generate", "/generate"),
        ("/v1/tokenize", "/tokenize"),
        ("/healthz", "/health"),
        ("/readyz", "/ready"),
        ("/metric", "/metrics"),
        ("/v1/embeddings", None),
        ("/docs", None),
        ("/favicon.ico", None),
        ("/" + "x" * 30_000, None),
        ("/%00%0a%ff", None),
    ],
)
def test_an_unknown_path_names_the_nearest(server: Served, path: str, meant: str | None) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{server.url}{path}", timeout=30)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("not_found_error", "not_found")
        near = re.search(r"did you mean (\S+)\?", error["message"])
        assert (None if near is None else near[1]) == meant
        assert error["message"].endswith("GET / lists all routes") and len(error["message"]) < 300


def test_the_routes_are_listed_where_the_hint_says(server: Served) -> None:
    about = httpx.get(f"{server.url}/", timeout=30).json()
    assert (about["name"], about["models"]) == ("glint", [server.model])
    assert "/v1/chat/completions" in about["routes"]["POST"] and "/health" in about["routes"]["GET"]
    for method, paths in about["routes"].items():
        assert len(set(paths)) == len(paths)
        for path in paths:
            answer = httpx.request(method, server.url + path.replace("{name}", server.model), timeout=30)
            of_nothing = 404 if "{response_id}" in path else 200
            assert answer.status_code == {"GET": of_nothing, "POST": 415, "DELETE": 404}[method], path


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/generate", "POST"),
        ("OPTIONS", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/any", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_a_wrong_method_names_the_right_one(server: Served, method: str, path: str, allowed: str) -> None:
    answer = httpx.request(method, f"{server.url}{path}", timeout=30)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    error = answer.json()["error"]
    assert error["code"] == "method_not_allowed"
    assert error["message"] == f"{method} is not allowed on {path}; use {allowed}"


def test_a_wrong_method_takes_the_form_of_the_route(server: Served) -> None:
    answer = httpx.get(f"{server.url}/v1/messages", timeout=30).json()
    assert answer["type"] == "error" and "use POST" in answer["error"]["message"]


def test_official_clients_with_a_wrong_address_see_the_hint(server: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with (
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="did you mean /v1/chat/completions"),
    ):
        client.chat.completions.create(model=server.model, messages=messages)
    with (
        anthropic.Anthropic(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.NotFoundError, match="did you mean /v1/messages"),
    ):
        client.messages.create(model=server.model, messages=messages, max_tokens=1)


def test_an_unknown_model_names_those_that_are_served(server: Served) -> None:
    body = {"model": "gpt-4o", "prompt": "x", "max_tokens": 1}
    for answer in (
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30),
        httpx.get(f"{server.url}/v1/models/gpt-4o", timeout=30),
    ):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "model_not_found"
        assert "'gpt-4o'" in error["message"] and server.model in error["message"]
