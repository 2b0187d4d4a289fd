"""Grammars of a whole engine: masks in time, ends where the grammar ends, failures that stay alone."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from glint import RequestError
from glint.engine.engine import Engine
from glint.engine.request import StepOutput
from tests.cpu.small_engine import VOCAB_SIZE
from tests.cpu.whole_engine import alone, assert_idle, gather, greedy, make_engine, prompt_of

pytestmark = pytest.mark.sanitize

MASK_WORDS = -(-VOCAB_SIZE // 32)
ANSWER = (3, 250, 3, 256, 0, 31, 32)


def mask_of(tokens: Sequence[int], num_words: int = MASK_WORDS) -> "ctypes.Array[ctypes.c_uint32]":
    words = (ctypes.c_uint32 * num_words)()
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return words


class Follower:
    """Allows exactly the given tokens, one after the other, once `begins_after` has come."""

    def __init__(self, answer: Sequence[int], begins_after: int | None) -> None:
        self.answer = answer
        self.begins_after = begins_after
        self.seen: list[int] = []
        self.masked_at: list[int] = []

    @property
    def num_followed(self) -> int:
        if self.begins_after is None:
            return len(self.seen)
        return len(self.seen) - self.seen.index(self.begins_after) - 1 if self.begins_after in self.seen else 0

    @property
    def has_begun(self) -> bool:
        return self.begins_after is None or self.begins_after in self.seen

    @property
    def is_finished(self) -> bool:
        return self.num_followed == len(self.answer)

    def mask(self) -> "ctypes.Array[ctypes.c_uint32] | None":
        self.masked_at.append(len(self.seen))
        return mask_of([self.answer[self.num_followed]]) if self.has_begun else None

    def accept(self, token_id: int) -> None:
        if self.has_begun:
            assert token_id == self.answer[self.num_followed]
        self.seen.append(token_id)


@dataclass
class FollowerGrammar:
    """Starts a follower of the answer for every choice and remembers it."""

    answer: Sequence[int] = ANSWER
    make: Callable[[Sequence[int], int | None], Any] = Follower
    started: list[Any] = field(default_factory=list)

    def start(self, begins_after: int | None) -> Any:
        self.started.append(self.make(self.answer, begins_after))
        return self.started[-1]


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def run_one(engine: Engine, grammar: Any, count: int = 30, **options: Any) -> list[StepOutput]:
    """The outputs of one request with the grammar, in a batch with two without."""
    free = [(prompt_of(seed, 10 + seed), 12) for seed in range(2)]
    free_ids = [engine.submit(prompt, greedy(length))[0] for prompt, length in free]
    (request_id,) = engine.submit(prompt_of(9, 21), greedy(count, **options), grammar=grammar)
    outputs = gather(engine, {})
    assert [tokens_of(outputs[free_id]) for free_id in free_ids] == [alone(*ask) for ask in free]
    assert_idle(engine)
    return outputs[request_id]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_step_tokens": 6}, {"max_step_tokens": 1}, {"max_num_seqs": 1}, {"num_pages": 6, "max_model_len": 48}],
)
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_the_answer_is_the_only_one_allowed(options: dict[str, int], temperature: float) -> None:
    grammar = FollowerGrammar()
    with make_engine(**options) as engine:
        outputs = run_one(engine, grammar, temperature=temperature)
    assert (tokens_of(outputs), outputs[-1].finish_reason) == (list(ANSWER), "stop")
    (matcher,) = grammar.started
    assert matcher.masked_at == list(range(len(ANSWER))), "one mask for each token, after the token before it"


def test_the_grammar_waits_for_its_beginning() -> None:
    prompt = prompt_of(9, 21)
    free_run = alone(prompt, 12)
    begin = free_run[4]
    before = free_run[: free_run.index(begin) + 1]
    with make_engine() as engine:
        (request_id,) = engine.submit(prompt, greedy(30), grammar=FollowerGrammar(), begins_after=begin)
        outputs = gather(engine, {})[request_id]
    assert (tokens_of(outputs), outputs[-1].finish_reason) == ([*before, *ANSWER], "stop")


def test_every_choice_follows_the_grammar_by_itself() -> None:
    grammar = FollowerGrammar()
    with make_engine() as engine:
        ids = engine.submit(prompt_of(9, 21), greedy(30, n=3, temperature=2.0), grammar=grammar)
        outputs = gather(engine, {})
    assert [tokens_of(outputs[request_id]) for request_id in ids] == [list(ANSWER)] * 3
    assert [matcher.masked_at for matcher in grammar.started] == [list(range(len(ANSWER)))] * 3


def test_a_stop_token_of_the_answer_ends_it() -> None:
    with make_engine() as engine:
        outputs = run_one(engine, FollowerGrammar(), stop_token_ids=[256])
    assert (tokens_of(outputs), outputs[-1].finish_reason) == (list(ANSWER[:4]), "stop")


@pytest.mark.parametrize(("count", "reason"), [(len(ANSWER) - 1, "length"), (len(ANSWER), "stop")])
def test_the_end_of_the_room_is_told_from_the_end_of_the_grammar(count: int, reason: str) -> None:
    with make_engine() as engine:
        outputs = run_one(engine, FollowerGrammar(), count)
    assert (tokens_of(outputs), outputs[-1].finish_reason) == (list(ANSWER[:count]), reason)


def test_grammar_and_preemption() -> None:
    answer = [token % VOCAB_SIZE for token in range(0, 7 * 38, 7)]
    with make_engine(num_pages=9, max_model_len=60) as engine:
        grammars = [FollowerGrammar(answer) for _ in range(3)]
        ids = [
            engine.submit(prompt_of(seed, 16), greedy(40), grammar=grammar)[0] for seed, grammar in enumerate(grammars)
        ]
        outputs = gather(engine, {})
        assert engine.num_preemptions > 0
    assert [tokens_of(outputs[request_id]) for request_id in ids] == [answer] * 3
    assert [grammar.started[0].masked_at for grammar in grammars] == [list(range(len(answer)))] * 3


class BadMask(Follower):
    """Raises instead of the mask of the third token."""

    def mask(self) -> "ctypes.Array[ctypes.c_uint32] | None":
        if len(self.seen) == 2:
            raise ValueError("the mask is lost")
        return super().mask()


class BadFirstMask(Follower):
    """Raises instead of the first mask."""

    def mask(self) -> "ctypes.Array[ctypes.c_uint32] | None":
        raise KeyError


class BadAccept(Follower):
    """Raises at the third token."""

    def accept(self, token_id: int) -> None:
        super().accept(token_id)
        if len(self.seen) == 3:
            raise ValueError("the token is not welcome")


class ShortMask(Follower):
    """Gives masks that are a word short."""

    def mask(self) -> "ctypes.Array[ctypes.c_uint32] | None":
        return mask_of([], MASK_WORDS - 1)


class EmptyMask(Follower):
    """Allows two tokens, then nothing."""

    def mask(self) -> "ctypes.Array[ctypes.c_uint32] | None":
        return super().mask() if len(self.seen) < 2 else mask_of([])


@pytest.mark.parametrize(
    ("make", "failure", "num_tokens"),
    [
        (BadMask, "gave no mask: the mask is lost", 1),
        (BadFirstMask, "gave no mask: KeyError", 0),
        (BadAccept, "does not take token 3: the token is not welcome", 2),
        (ShortMask, f"has {MASK_WORDS - 1} words, the vocabulary needs {MASK_WORDS}", 0),
        (EmptyMask, "no token was allowed", 2),
    ],
)
def test_a_grammar_that_fails_harms_no_other(make: type[Follower], failure: str, num_tokens: int) -> None:
    with make_engine() as engine:
        outputs = run_one(engine, FollowerGrammar(make=make))
    assert tokens_of(outputs) == list(ANSWER[:num_tokens])
    assert outputs[-1].finish_reason == "failed"
    assert failure in outputs[-1].failure


def test_a_grammar_that_cannot_start_refuses_the_request() -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no beginning")

    with make_engine() as engine:
        with pytest.raises(RequestError, match="cannot start: no beginning"):
            engine.submit(prompt_of(9, 21), greedy(30), grammar=FollowerGrammar(make=refuse))
        assert_idle(engine)


@pytest.mark.parametrize("is_aborted", [True, False])
def test_matchers_are_let_go(is_aborted: bool) -> None:
    grammar = FollowerGrammar()
    with make_engine() as engine:
        engine.submit(prompt_of(1, 5), greedy(20))
        (request_id,) = engine.submit(prompt_of(9, 21), greedy(30), grammar=grammar)
        matcher = weakref.ref(grammar.started.pop())
        for _ in range(3 if is_aborted else len(ANSWER) + 1):
            engine.step()
        if is_aborted:
            assert matcher() is not None
            engine.abort(request_id)
            engine.step()
        gc.collect()
        assert engine.has_work
        assert matcher() is None
