"""Log-probabilities, token counts and errors as the OpenAI API writes them."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from glint.engine.request import StepOutput
from glint.server.generation.generation import Delta, Generation, Usage
from glint.server.http.problems import Problem
from glint.server.state import ServerState
from glint.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def chat_logprobs(output: StepOutput, tokenizer: Tokenizer, count: int | None) -> list[dict[str, Any]] | None:
    """One entry per token of a step, each with the `count` likeliest tokens; None where the request has no logprobs."""
    if output.logprobs is None or count is None:
        return None
    entries = []
    for token, known in zip(output.token_ids, output.logprobs, strict=True):
        best = sorted(known.items(), key=lambda pair: -pair[1])[:count]
        entry = _entry(tokenizer, token, known[token])
        entry["top_logprobs"] = [_entry(tokenizer, other, logprob) for other, logprob in best]
        entries.append(entry)
    return entries


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def text_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, float] | None],
    tokenizer: Tokenizer,
    count: int,
    text_offset: int,
) -> dict[str, Any]:
    """The log-probabilities of a text completion: parallel lists, one entry per token; the first of a prompt is null.

    `text_offset` is where the text of the first token begins.
    """
    tokens = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in token_ids]
    offsets = []
    for text in tokens:
        offsets.append(text_offset)
        text_offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if known is None else finite(known[token]) for token, known in zip(token_ids, logprobs, strict=True)
        ],
        "top_logprobs": [None if known is None else _best(known, tokenizer, count) for known in logprobs],
        "text_offset": offsets,
    }


async def prompt_logprobs(
    state: ServerState, generation: Generation, prompt: int, known: Sequence[Mapping[int, float] | None], count: int
) -> list[msgspec.Raw | None]:
    """One entry per token of a prompt as vLLM writes it, each with the `count` likeliest tokens; the first is null.

    A long prompt has many entries, so a worker thread writes them.
    """
    tokens = generation.prompts[prompt].engine_request.prompt_tokens
    num_ranked = generation.params.prompt_logprobs or 0

    def write() -> list[msgspec.Raw | None]:
        return [
            None if entry is None else prompt_entry(token, entry, state.tokenizer, count, num_ranked)
            for token, entry in zip(tokens, known, strict=True)
        ]

    return await asyncio.get_running_loop().run_in_executor(state.workers, write)


def prompt_entry(
    token: int, known: Mapping[int, float], tokenizer: Tokenizer, count: int, num_ranked: int
) -> msgspec.Raw:
    """The token and the `count` likeliest at its place, by id.

    The engine ranks the `num_ranked` likeliest tokens. Where the token is not one of them, its rank is null.
    """
    is_ranked = len(known) <= num_ranked
    ranked = sorted(known if is_ranked else known.keys() - {token}, key=lambda other: -known[other])
    ranks = {other: place for place, other in enumerate(ranked, 1)}
    entry = {
        other: {
            "logprob": finite(known[other]),
            "rank": ranks.get(other),
            "decoded_token": tokenizer.token_bytes(other).decode("utf-8", "replace"),
        }
        for other in dict.fromkeys((token, *ranked[:count]))
    }
    return msgspec.Raw(msgspec.json.encode(entry))


def _best(known: Mapping[int, float], tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The likeliest tokens by their text; of two tokens with the same text the likelier counts."""
    best: dict[str, float] = {}
    for token, logprob in sorted(known.items(), key=lambda pair: -pair[1])[:count]:
        best.setdefault(tokenizer.token_bytes(token).decode("utf-8", "replace"), finite(logprob))
    return best


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it: that of an impossible token is very small instead of infinite."""
    return max(logprob, -9999.0)


def openai_usage(usage: Usage) -> dict[str, Any]:
    """The usage of a chat or text completion.

    Drafts are those that the server made for itself; the rejected ones are not among the completion's tokens.
    """
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.draft_tokens:
        details["accepted_prediction_tokens"] = usage.accepted_draft_tokens
        details["rejected_prediction_tokens"] = usage.draft_tokens - usage.accepted_draft_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }


class StreamUsage:
    """The end of every event of a stream: nothing, or with `continuous_usage_stats` the usage up to that event."""

    def __init__(self, generation: Generation, is_continuous: bool) -> None:
        self._prompt_tokens = generation.usage.prompt_tokens
        self._completion_tokens = 0
        self._is_continuous = is_continuous

    def count(self, delta: Delta) -> None:
        """Count the tokens of a step; the events of the step end with them counted."""
        self._completion_tokens += len(delta.output.token_ids)

    def end(self) -> bytes:
        """The usage as the last field of an event, and the end of the event."""
        if not self._is_continuous:
            return b"}\n\n"
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }
        return b',"usage":' + msgspec.json.encode(usage) + b"}\n\n"


def stream_error(problem: Problem, request_id: str) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + problem.openai_body + b"\n\n"
