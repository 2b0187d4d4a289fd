"""The requests of a soak: every API, streamed and whole, every way of sampling and of ending, and bad ones."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

_TEXT = (
    "the a river house light under green quickly small stone answers where seven morning paper between "
    "letters walk cold tells garden because three wind old over story water bridge never road"
)
WORDS = tuple(_TEXT.split())
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "is_warm": {"type": "boolean"}},
    "required": ["colour", "is_warm"],
    "additionalProperties": False,
}
STOPS = (["e"], ["\n", ". "], [" the"], ["zzzz"])
LENGTHS = (2, 8, 24, 64)
LONG_LENGTHS = (8, 64, 256, 512)
NUM_PREFIXES = 4
BAD_SHARE = 0.05
LEAVING_SHARE = 0.12
BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b'{"messages": 7}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "unknown_field": 1}',
    b'{"messages": [{"role": "nobody", "content": "a"}]}',
    b'{"input": "a", "max_output_tokens": 0}',
    b"\xff\xfe",
    b'{"prompt": "' + b"a" * 100_000,
)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
WEIGHTS = (40, 25, 18, 17)


@dataclass(frozen=True)
class Ask:
    """One request. A client that leaves does so after a time or at a number of bytes of the answer's body."""

    path: str
    body: bytes
    is_bad: bool = False
    is_remembered: bool = False
    has_schema: bool = False
    leaves_after: float | None = None
    leaves_at: int | None = None

    @property
    def leaves(self) -> bool:
        """Whether the client goes before the answer is whole."""
        return self.leaves_after is not None or self.leaves_at is not None


class Mix:
    """Draws requests. Lengths in words are such that prompts stay below `max_prompt_words`."""

    def __init__(
        self, source: random.Random, model: str, max_prompt_words: int, lengths: tuple[int, ...] = LENGTHS
    ) -> None:
        self._source = source
        self._model = model
        self._lengths = lengths
        self._longest = max(8, max_prompt_words)
        shared = random.Random("prefixes")
        self._prefixes = [self._words(shared, self._longest // 2) for _ in range(NUM_PREFIXES)]

    def draw(self) -> Ask:
        """The next request."""
        source = self._source
        (path,) = source.choices(PATHS, WEIGHTS)
        if source.random() < BAD_SHARE:
            return Ask(path, source.choice(BAD_BODIES), is_bad=True)
        fields, is_deterministic, has_schema = self._fields(path)
        body = json.dumps(fields).encode()
        leaves_after = leaves_at = None
        if source.random() < LEAVING_SHARE:
            if source.random() < 0.5:
                leaves_after = source.expovariate(1 / 0.2)
            else:
                leaves_at = source.randint(1, 4000)
        is_remembered = is_deterministic and leaves_after is None and leaves_at is None
        return Ask(path, body, False, is_remembered, has_schema, leaves_after, leaves_at)

    def _fields(self, path: str) -> tuple[dict[str, Any], bool, bool]:
        source = self._source
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        fields: dict[str, Any] = {"model": self._model, limit: source.choice(self._lengths)} | self._prompt(path)
        if source.random() < 0.5:
            fields["stream"] = True
            if path in PATHS[:2]:
                fields["stream_options"] = {"include_usage": True}
        is_greedy = source.random() < 0.4
        fields["temperature"] = 0 if is_greedy else source.choice((0.7, 1.0))
        is_seeded = source.random() < 0.6
        if is_seeded:
            fields["seed"] = source.randrange(2**62)
        if source.random() < 0.3:
            fields["top_p"] = source.choice((0.5, 0.9))
        if path in PATHS[:2]:
            self._add_openai_fields(path, fields)
        has_schema = source.random() < 0.15
        if has_schema:
            fields |= self._schema(path, limit)
        elif path != "/v1/responses" and source.random() < 0.25:
            fields["stop_sequences" if path == "/v1/messages" else "stop"] = source.choice(STOPS)
        return fields, is_greedy or is_seeded, has_schema

    def _add_openai_fields(self, path: str, fields: dict[str, Any]) -> None:
        source = self._source
        if source.random() < 0.3:
            fields |= {"frequency_penalty": 0.5, "presence_penalty": -0.3, "repetition_penalty": 1.1}
        if source.random() < 0.3:
            fields |= {"logprobs": True, "top_logprobs": 5} if path == PATHS[0] else {"logprobs": 5}
        if source.random() < 0.1:
            fields["n"] = 2
        if source.random() < 0.5:
            fields["ignore_eos"] = True

    def _schema(self, path: str, limit: str) -> dict[str, Any]:
        named = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
        if path == "/v1/messages":
            asked: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
            return asked | {limit: 128, "thinking": {"type": "disabled"}}
        if path == "/v1/responses":
            return {"text": {"format": named}, limit: 128, "reasoning": {"effort": "none"}}
        if path == "/v1/completions":
            return {"structured_outputs": {"json": SCHEMA}, limit: 128, "ignore_eos": False}
        wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        return {"response_format": wrapped, limit: 128, "enable_thinking": False, "ignore_eos": False}

    def _prompt(self, path: str) -> dict[str, Any]:
        source = self._source
        length = source.choice((2, 6, self._longest // 4, self._longest // 2))
        text = self._words(source, max(1, length))
        if source.random() < 0.3:
            text = f"{source.choice(self._prefixes)} {text}"
        if path == "/v1/completions":
            return {"prompt": text}
        if path == "/v1/responses":
            return {"input": text}
        return {"messages": [{"role": "user", "content": text}]}

    @staticmethod
    def _words(source: random.Random, count: int) -> str:
        return " ".join(source.choices(WORDS, k=count))


def content_of(documents: list[Any]) -> Any:
    """What an answer says, without what differs from one sending to the next and without how it was cut into events.

    Texts are joined and log-probabilities listed by choice or block and by field. Of a stream of /v1/responses the last
    event has it all.
    """
    last = documents[-1]
    if isinstance(last, dict) and isinstance(last.get("response"), dict):
        documents = [last["response"]]
    found: dict[str, Any] = {}
    for document in documents:
        _fold(document, "", found)
    return found


KEPT_TEXTS = ("text", "content", "reasoning_content", "thinking", "arguments", "partial_json")
KEPT_VALUES = ("finish_reason", "stop_reason", "stop_sequence", "status", "completion_tokens", "output_tokens")
KEPT_LISTS = ("logprob", "token", "token_logprobs", "tokens")
INDEX = "index"


def _fold(value: Any, place: str, found: dict[str, Any]) -> None:
    if isinstance(value, list):
        for part in value:
            _fold(part, place, found)
        return
    if not isinstance(value, dict):
        return
    if isinstance(value.get(INDEX), int):
        place = f"{place}/{value[INDEX]}"
    for key, part in value.items():
        name = f"{place}.{key}"
        if key in KEPT_TEXTS and isinstance(part, str):
            found[name] = found.get(name, "") + part
        elif key in KEPT_VALUES and isinstance(part, str | int):
            found[name] = part
        elif key in KEPT_LISTS and not isinstance(part, dict):
            found.setdefault(name, []).extend(part if isinstance(part, list) else [part])
        else:
            _fold(part, place, found)


def error_of(documents: list[Any]) -> str | None:
    """The error that an answer carries, None where it has none."""
    for document in documents:
        if isinstance(document, dict):
            error = document.get("error") or (document.get("response") or {}).get("error")
            if error:
                return str(error)[:200]
    return None
