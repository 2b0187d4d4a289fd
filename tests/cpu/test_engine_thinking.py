"""Thinking budgets of a whole engine: the budget holds to the token, whatever runs beside the request.

What a budget must give is put together from runs of the native engine without one: the first tokens of thinking, then
the closing tokens as part of the prompt of a second run.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int32
from pathlib import Path
from typing import Any

import pytest

from glint import LLM, RequestError
from glint.checkpoint.table import open_checkpoint
from glint.engine.engine import Engine
from glint.native.library import NativeEngine
from glint.sampling import SamplingParams
from glint.text.grammar import Choice, GrammarCompiler
from tests.cpu.small_engine import Session, make_ask, open_engine
from tests.cpu.test_engine_masks import tokens_of
from tests.cpu.whole_engine import assert_idle, gather
from tests.e2e.small_glm import write_small_glm

OPTIONS: dict[str, Any] = {"threads": 1, "page_tokens": 8, "num_pages": 128, "max_model_len": 128}
WAYS: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 6},
    {"max_step_tokens": 1},
    {"max_num_seqs": 1},
    {"num_pages": 16},
]
BUDGETS = (0, 1, 17)
COUNT = 40
CLOSING = "\nthe quick fox jumps"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model with GLM's tokens."""
    return write_small_glm(tmp_path_factory.mktemp("thinking") / "model")


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **(OPTIONS | options))


class Tokens:
    """The tokens of the model that the tests speak of, and prompts that end inside thinking."""

    def __init__(self, llm: LLM) -> None:
        self.tokenizer = llm.need_tokenizer()
        self.open, self.close = (self.tokenizer.token_to_id(tag) for tag in ("<think>", "</think>"))
        tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        self.bias = {self.tokenizer.token_to_id(tag): -100.0 for tag in tags}

    def prompt(self, seed: int = 0) -> list[int]:
        return [*self.tokenizer.encode("hello the lazy dog " * (seed + 2) + "<think>")]

    def params(self, budget: int | None, count: int = COUNT, **changes: Any) -> SamplingParams:
        """Greedy sampling in which the model itself never writes a tag."""
        fixed = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "logit_bias": self.bias}
        return SamplingParams(**(fixed | {"thinking_budget": budget} | changes))

    def closing(self, text: str = "") -> list[int]:
        return [*self.tokenizer.encode(text), self.close]


@pytest.fixture(scope="module")
def tokens(folder: Path) -> Iterator[Tokens]:
    """The tokens of the model."""
    with open_llm(folder) as llm:
        yield Tokens(llm)


@pytest.fixture(scope="module")
def native(folder: Path) -> Iterator[NativeEngine]:
    """The native engine on the same model."""
    with open_engine(open_checkpoint(folder)) as engine:
        yield engine


def free_run(native: NativeEngine, prompt: list[int], count: int, tokens: Tokens) -> list[int]:
    """What the native engine alone writes, one step after the other."""
    if not count:
        return []
    bias = tokens.bias
    session = Session(native)
    ask = make_ask(
        prompt,
        count,
        bias_count=len(bias),
        bias_tokens=(c_int32 * len(bias))(*bias),
        bias_values=(c_float * len(bias))(*bias.values()),
    )
    request_id = session.add(ask)
    session.run()
    return session.free(request_id).tokens


def expected(
    native: NativeEngine, prompt: list[int], budget: int, tokens: Tokens, text: str = "", count: int = COUNT
) -> list[int]:
    """The answer with a budget, from two runs without one."""
    thought = free_run(native, prompt, min(budget, count), tokens)
    begun = [*thought, *tokens.closing(text)] if budget < count else thought
    return (begun + free_run(native, [*prompt, *begun], max(0, count - len(begun)), tokens))[:count]


@pytest.mark.parametrize("options", WAYS)
def test_alone_and_in_a_batch_the_budget_holds_to_the_token(
    folder: Path, native: NativeEngine, tokens: Tokens, options: dict[str, Any]
) -> None:
    asked = [(tokens.prompt(seed), budget, text) for seed, text in enumerate(("", CLOSING)) for budget in BUDGETS]
    with open_llm(folder, **options) as llm:
        params = [tokens.params(budget, thinking_closing_text=text) for _, budget, text in asked]
        free = llm.generate(prompt_token_ids=[tokens.prompt(3)], sampling_params=tokens.params(None))[0]
        together = llm.generate(
            prompt_token_ids=[*(prompt for prompt, *_ in asked), tokens.prompt(3)],
            sampling_params=[*params, tokens.params(COUNT + 5)],
        )
        assert_idle(llm.engine)
        assert "num_pages" not in options or llm.engine.num_preemptions > 0
        alone = [
            llm.generate(prompt_token_ids=[prompt], sampling_params=one)[0]
            for (prompt, *_), one in zip(asked, params, strict=True)
        ]
    wanted = [expected(native, prompt, budget, tokens, text) for prompt, budget, text in asked]
    assert [one.token_ids for one in together] == [*wanted, free.token_ids]
    assert [one.token_ids for one in alone] == wanted
    assert "num_pages" in options or all(one.cached_tokens > 0 for one in alone)


def test_a_closed_or_absent_thinking_is_not_changed(folder: Path, native: NativeEngine, tokens: Tokens) -> None:
    closed = [*tokens.prompt(), *tokens.tokenizer.encode(" fox"), tokens.close]
    absent = tokens.tokenizer.encode("hello the lazy dog")
    with open_llm(folder) as llm:
        answers = llm.generate(prompt_token_ids=[closed, absent], sampling_params=tokens.params(0))
    assert [one.token_ids for one in answers] == [free_run(native, one, COUNT, tokens) for one in (closed, absent)]


@pytest.mark.parametrize("budget", BUDGETS)
def test_thinking_that_the_model_opens_is_counted_from_there(folder: Path, tokens: Tokens, budget: int) -> None:
    """A bias makes the model open thinking again and again; what it opens with nothing left is closed at once."""
    params = tokens.params(budget, 24, logit_bias={tokens.open: 100.0})
    prompt = tokens.tokenizer.encode("hello the lazy dog")
    with open_llm(folder) as llm:
        (answer,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params)
    wanted = [tokens.open] * (budget + 1) + [tokens.close, tokens.open] * 12 + [tokens.close]
    assert answer.token_ids == wanted[:24]


@pytest.mark.parametrize("is_thinking", [True, False])
def test_the_caller_may_say_whether_the_prompt_ends_inside_thinking(
    folder: Path, tokens: Tokens, is_thinking: bool
) -> None:
    prompt = [*tokens.prompt(), *tokens.tokenizer.encode("hello")] if not is_thinking else [5, 6, 7]
    with open_llm(folder) as llm:
        llm.engine.submit(prompt, tokens.params(2, 9), is_thinking=is_thinking)
        (outputs,) = gather(llm.engine, {}).values()
    assert [index for index, token in enumerate(tokens_of(outputs)) if token == tokens.close] == [2] * is_thinking


def record_masks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of masks of every step from now on."""
    counts: list[int] = []
    sample = NativeEngine.sample_step

    def recorded(self: NativeEngine, ticket: Any, masks: Any = None) -> None:
        counts.append(0 if masks is None else masks.count)
        sample(self, ticket, masks)

    monkeypatch.setattr(NativeEngine, "sample_step", recorded)
    return counts


def test_only_the_tokens_that_close_thinking_have_a_mask(
    folder: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(folder) as llm:
        counts = record_masks(llm.engine, monkeypatch)
        params = tokens.params(17, thinking_closing_text=CLOSING)
        (answer,) = llm.generate(prompt_token_ids=[tokens.prompt()], sampling_params=params)
    num_forced = len(tokens.closing(CLOSING))
    first = counts.index(1)
    assert first >= 17 and counts[first:] == [1] * num_forced + [0] * (len(counts) - first - num_forced)
    assert answer.token_ids[17 : 17 + num_forced] == tokens.closing(CLOSING)


def test_a_grammar_begins_behind_the_closed_thinking(folder: Path, tokens: Tokens) -> None:
    with open_llm(folder) as llm:
        eos = [tokens.tokenizer.token_to_id("<|user|>")]
        compiler = GrammarCompiler(tokens.tokenizer, open_checkpoint(folder).config.vocab_size, eos)
        grammar = compiler.compile(Choice(("the lazy dog", "hello tokens")))
        ids = [
            llm.engine.submit(tokens.prompt(), tokens.params(budget), grammar=grammar, begins_after=tokens.close)[0]
            for budget in BUDGETS
        ]
        outputs = gather(llm.engine, {})
    for budget, request_id in zip(BUDGETS, ids, strict=True):
        written = tokens_of(outputs[request_id])
        assert written.index(tokens.close) == budget and outputs[request_id][-1].finish_reason == "stop"
        assert tokens.tokenizer.decode(written[budget + 1 :]) in ("the lazy dog", "hello tokens")


@pytest.mark.parametrize("num_drafts", [1, 3, 4, "auto"])
def test_the_budget_and_the_grammar_hold_among_drafts(tmp_path: Path, tokens: Tokens, num_drafts: int | str) -> None:
    """The end of thinking falls anywhere among accepted drafts: at the budget, by the model, or behind a closing text.

    A bias makes the drafts right: those of thinking always, those of the tokens that close it never.
    """
    folder = write_small_glm(tmp_path / "model", "without copies")
    (letter,) = tokens.tokenizer.encode("a")
    found = []
    for count in (0, num_drafts):
        with open_llm(folder, num_speculative_tokens=count) as llm:
            eos = [tokens.tokenizer.token_to_id("<|user|>")]
            compiler = GrammarCompiler(tokens.tokenizer, open_checkpoint(folder).config.vocab_size, eos)
            grammar = compiler.compile(Choice(("the lazy dog", "hello tokens")))
            for budget in range(10):
                for closing in ("", CLOSING):
                    bias = tokens.bias | {letter: 100.0}
                    params = tokens.params(budget, thinking_closing_text=closing, logit_bias=bias, logprobs=1)
                    llm.engine.submit(tokens.prompt(budget), params)
                    llm.engine.submit(tokens.prompt(budget), params, grammar=grammar, begins_after=tokens.close)
            outputs = gather(llm.engine, {})
            assert_idle(llm.engine)
            found.append(
                [
                    (tokens_of(parts), [entry for part in parts for entry in part.logprobs or ()], parts[-1][6:9])
                    for _, parts in sorted(outputs.items())
                ]
            )
            most = max(len(part.token_ids) for parts in outputs.values() for part in parts)
    assert found[0] == found[1] and most > 1
    for number, (written, _, ending) in enumerate(found[1]):
        budget, closing, is_bound = number // 4, ("", CLOSING)[number // 2 % 2], number % 2
        assert written[: budget + len(tokens.closing(closing))] == [letter] * budget + tokens.closing(closing)
        assert ending[0] == ("stop" if is_bound else "length")


def test_a_grammar_from_the_first_token_leaves_no_thinking_to_close(folder: Path, tokens: Tokens) -> None:
    with open_llm(folder) as llm:
        eos = [tokens.tokenizer.token_to_id("<|user|>")]
        compiler = GrammarCompiler(tokens.tokenizer, open_checkpoint(folder).config.vocab_size, eos)
        grammar = compiler.compile(Choice(("the lazy dog",)))
        (request_id,) = llm.engine.submit(tokens.prompt(), tokens.params(1), grammar=grammar)
        outputs = gather(llm.engine, {})[request_id]
    assert tokens.tokenizer.decode(tokens_of(outputs)) == "the lazy dog"


def test_every_choice_has_its_own_budget_and_its_log_probabilities(folder: Path, tokens: Tokens) -> None:
    params = tokens.params(5, 12, n=3, temperature=1.0, seed=7, logprobs=2)
    with open_llm(folder) as llm:
        (answer,) = llm.generate(prompt_token_ids=[tokens.prompt()], sampling_params=params)
        asked = [[*tokens.prompt(), *choice.token_ids] for choice in answer.choices]
        given = llm.generate(prompt_token_ids=asked, sampling_params=tokens.params(None, 1, prompt_logprobs=0))
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    for choice, as_prompt in zip(answer.choices, given, strict=True):
        assert choice.token_ids.index(tokens.close) == 5
        assert choice.logprobs is not None and as_prompt.prompt_logprobs is not None
        assert [token in entry for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)] == [True] * 12
        own = as_prompt.prompt_logprobs[len(tokens.prompt()) + 5]
        assert own is not None and choice.logprobs[5][tokens.close] == own[tokens.close] < 0, "the model's own"


def test_a_stop_at_the_end_of_a_spent_budget_ends_the_answer_before_min_tokens(folder: Path, tokens: Tokens) -> None:
    stop_at_close = tokens.params(4, stop_token_ids=[tokens.close])
    held = tokens.params(4, stop_token_ids=[tokens.close], min_tokens=20)
    stop_in_text = tokens.params(4, stop=["quick"], thinking_closing_text=CLOSING)
    with open_llm(folder) as llm:
        ended, early, cut = llm.generate(
            prompt_token_ids=[tokens.prompt()] * 3, sampling_params=[stop_at_close, held, stop_in_text]
        )
    assert ended.token_ids[4:] == [tokens.close] and early.token_ids == ended.token_ids
    assert cut.finish_reason == "stop" and cut.text is not None and cut.text.endswith("\nthe ")


def test_what_cannot_be_is_refused_by_name(folder: Path, tokens: Tokens) -> None:
    with open_llm(folder, skip_tokenizer=True) as llm, pytest.raises(RequestError, match="no token '</think>'") as bare:
        llm.generate(prompt_token_ids=[tokens.prompt()], sampling_params=tokens.params(3))
    assert "leave thinking_budget out" in str(bare.value)
    with open_llm(folder) as llm:
        for text in ("so </think> ", "<|user|>hello"):
            with pytest.raises(RequestError, match="thinking_closing_text holds the control token"):
                llm.engine.submit(tokens.prompt(), tokens.params(3, thinking_closing_text=text))
        assert_idle(llm.engine)


@pytest.mark.parametrize("value", [-1, 2**31, 1.5, True, "3"])
def test_budgets_that_cannot_be(value: Any) -> None:
    with pytest.raises(RequestError, match="thinking_budget") as refused:
        SamplingParams(thinking_budget=value)
    assert refused.value.field == "thinking_budget"


@pytest.mark.parametrize("value", ["x" * 1025, None, 3])
def test_closing_texts_that_cannot_be(value: Any) -> None:
    with pytest.raises(RequestError, match="thinking_closing_text") as refused:
        SamplingParams(thinking_closing_text=value)
    assert refused.value.field == "thinking_closing_text"
