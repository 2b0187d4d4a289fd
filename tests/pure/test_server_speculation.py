"""What clients see of speculation: counts of drafts, and counts of thinking that do not depend on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glint.engine.request import ActiveRequest, OutputText
from glint.native import abi
from glint.native.library import ItemOutcome
from glint.sampling import SamplingParams
from glint.server.generation.generation import Generation, Usage
from glint.server.openai.output import openai_usage
from glint.text.output import OutputEvent, OutputParser, OutputStart, merge_texts
from glint.text.tokenizer import Tokenizer
from glint.text.tools import Tool
from tests.pure.scripted_model import MODEL, Scripted, serving
from tests.pure.text_folder import GLM_TEMPLATE, write_tokenizer

WORDS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "two words",
    " the",
    "now",
    "STOP",
    "\n",
    "ü",
    "<|user|>",
)
TOOLS = (Tool("now", "", {}),)
PROMPT = (1, 2, 3)
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), GLM_TEMPLATE))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[str], list[int], int]:
    """Words of an answer, where steps end among their tokens, and how the answer ends."""
    words = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=16))
    return (
        words,
        draw(st.lists(st.integers(0, 40), max_size=8)),
        draw(st.sampled_from((abi.FINISH_STOP, abi.FINISH_LENGTH))),
    )


def read_answer(
    tokenizer: Tokenizer, tokens: list[int], ends: list[int], finish_reason: int, start: OutputStart
) -> tuple[Usage, list[OutputEvent]]:
    """What a client is told of an answer whose steps end at these tokens."""
    params = SamplingParams(stop=["STOP"])
    request = ActiveRequest(0, PROMPT, params, 1, 0, 0, (tokens[-1],), 100, OutputText(tokenizer, params))
    parser = SimpleNamespace(make=lambda: OutputParser(start, TOOLS))
    prepared: Any = SimpleNamespace(
        engine_request=SimpleNamespace(params=params, prompt_tokens=PROMPT, grammar=None),
        parser=parser,
        deadline_seconds=1.0,
    )
    metrics = SimpleNamespace(observe_first_token=lambda seconds: None, observe_prompt=lambda count, cached: None)
    state: Any = SimpleNamespace(metrics=metrics, tokenizer=tokenizer)
    generation = Generation(state, [prepared])
    events: list[OutputEvent] = []
    for begin, end in pairwise(sorted({0, len(tokens), *(end for end in ends if end < len(tokens))})):
        reason = finish_reason if end == len(tokens) else abi.FINISH_NONE
        request.verified_tokens = end - begin - 1
        output = request.take_in(ItemOutcome(0, tuple(tokens[begin:end]), reason, 0, 0, 0, {}))
        assert output is not None
        events += generation._read(0, output).events
        if output.finish_reason is not None:
            break
    return generation.usage, merge_texts(events)


@pytest.mark.parametrize("start", [OutputStart.REASONING, OutputStart.UNDECIDED, OutputStart.CONTENT])
@given(answer=answers())
def test_thinking_counts_the_same_however_many_tokens_a_step_has(
    tokenizer: Tokenizer, start: OutputStart, answer: tuple[list[str], list[int], int]
) -> None:
    words, ends, finish_reason = answer
    tokens = [token for word in words for token in tokenizer.encode(word, add_special_tokens=False)]
    one_each, expected = read_answer(tokenizer, tokens, [*range(len(tokens))], finish_reason, start)
    usage, events = read_answer(tokenizer, tokens, ends, finish_reason, start)
    assert events == expected
    assert usage.completion_tokens == one_each.completion_tokens
    assert usage.reasoning_tokens == one_each.reasoning_tokens


@pytest.mark.parametrize(
    ("start", "words", "expected"),
    [
        (OutputStart.REASONING, ("two words", "</think>", "two words", "two words"), 2),
        (OutputStart.REASONING, ("</think>", "<think>", "two words"), 2),
        (OutputStart.UNDECIDED, ("<think>", "two words", "</think>", "two words"), 2),
        (OutputStart.REASONING, ("two words", "<tool_call>", "two words", "</tool_call>"), 2),
        (OutputStart.CONTENT, ("two words", "two words"), 0),
        (OutputStart.REASONING, ("two words", "two words"), 2),
    ],
)
def test_a_step_counts_the_tokens_up_to_the_one_that_ends_the_thinking(
    tokenizer: Tokenizer, start: OutputStart, words: tuple[str, ...], expected: int
) -> None:
    tokens = [token for word in words for token in tokenizer.encode(word, add_special_tokens=False)]
    assert len(tokens) == len(words)
    usage, _ = read_answer(tokenizer, tokens, [], abi.FINISH_LENGTH, start)
    assert usage.reasoning_tokens == expected


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60},
    "/v1/responses": {"input": "hello", "max_output_tokens": 60},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2000, "thinking": THINKING},
}


def find_usage(route: str, answer: httpx.Response, is_stream: bool) -> tuple[int, int]:
    """Tokens of an answer and of its thinking."""
    found: Any = answer.raise_for_status()
    if is_stream:
        lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        if route == "/v1/responses":
            events = [events[-1]["response"]]
        usage = [event["usage"] for event in events if event.get("usage")][-1]
    else:
        usage = found.json()["usage"]
    if route == "/v1/chat/completions":
        return usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]
    details = usage["output_tokens_details"]
    return usage["output_tokens"], details["thinking_tokens" if route == "/v1/messages" else "reasoning_tokens"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "text", ["I think, therefore</think>I am.", "one two</think><think>three</think>four", "never"]
)
def test_every_api_counts_thinking_the_same_with_and_without_drafts(
    scripted: Scripted, route: str, is_stream: bool, text: str
) -> None:
    found = set()
    for step_tokens in (1, 2, 3, 4, 9):
        scripted.service.step_tokens = step_tokens
        scripted.say(text)
        body = ROUTES[route] | {"model": MODEL, "stream": is_stream}
        if is_stream and route == "/v1/chat/completions":
            body |= {"stream_options": {"include_usage": True}}
        found.add(find_usage(route, httpx.post(scripted.url + route, json=body), is_stream))
    ((tokens, thinking),) = found
    assert tokens == -(-len(text) // 5) and 0 < thinking <= tokens
    assert (thinking < tokens) == ("</think>" in text)


def test_usage_names_drafts_only_where_there_were_some() -> None:
    assert openai_usage(Usage(3))["completion_tokens_details"] == {"reasoning_tokens": 0}
    usage = Usage(prompt_tokens=3, completion_tokens=9, draft_tokens=10, accepted_draft_tokens=6)
    found = openai_usage(usage)
    assert found["completion_tokens"] == 9
    assert found["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 4,
    }
