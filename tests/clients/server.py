"""The server of scripts/clients.sh, asked by the standard library alone: clients are compared with these answers."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

ORIGIN = os.environ["GLINT_CLIENTS_URL"]
URL = f"{ORIGIN}/v1"
KEY = os.environ["GLINT_CLIENTS_KEY"]
MODEL_FOLDER = os.environ["GLINT_CLIENTS_MODEL"]
QUESTION = "Name three colours."
PROMPT = "The capital of France is"
TOO_LONG = "word " * 9000
WEATHER_QUESTION = "What is the weather in Paris for 3 days?"


def ask(route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON answer of a route; a body makes it a POST."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(ORIGIN + route, data, headers), timeout=180) as answer:
        return dict(json.load(answer))


MODEL = str(ask("/v1/models")["data"][0]["id"])


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The greedy answer to a conversation, by default to the question alone."""
    asked = list(messages) or [{"role": "user", "content": QUESTION}]
    return ask("/v1/chat/completions", {"messages": asked, "temperature": 0, "max_tokens": 16} | fields)


def chat_text(*messages: dict[str, Any], **fields: Any) -> str:
    """The text of that answer."""
    return str(chat(*messages, **fields)["choices"][0]["message"]["content"])


def complete(prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    """The greedy continuation of a prompt."""
    return ask("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8} | fields)


def token_ids(text: str) -> list[int]:
    """The tokens of a text, as the server makes them."""
    return list(ask("/tokenize", {"prompt": text})["tokens"])
