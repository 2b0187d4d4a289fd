"""Thinking that the next turn leaves out: its pages are evicted first, and an answer never depends on it."""

from __future__ import annotations

import pytest

from glint.engine.engine import Engine
from glint.engine.request import StepOutput
from glint.engine.reuse import Reuse
from tests.cpu.whole_engine import alone, assert_idle, gather, greedy, make_engine, prompt_of, run

PAGE_TOKENS = 8
NUM_CHATS = 6
QUESTION_TOKENS = 4 * PAGE_TOKENS
THINKING_TOKENS = 9 * PAGE_TOKENS
PAGES_OF_QUESTIONS = NUM_CHATS * QUESTION_TOKENS // PAGE_TOKENS
PAGES_OF_THINKING = THINKING_TOKENS // PAGE_TOKENS + 1


def answer(engine: Engine, prompt: list[int], count: int, reuse: Reuse | None) -> list[StepOutput]:
    """The outputs of one request that runs to its end."""
    (request_id,) = engine.submit(prompt, greedy(count), reuse=reuse)
    return gather(engine, {})[request_id]


def second_turn_hits(thinking_tokens: int, reuse: Reuse | None) -> list[int]:
    """What the second turn of each chat finds in the cache; all chats have their first turn before."""
    chats = [prompt_of(seed, QUESTION_TOKENS) for seed in range(NUM_CHATS)]
    hits = []
    with make_engine(num_pages=PAGES_OF_QUESTIONS + PAGES_OF_THINKING, max_model_len=256) as engine:
        for question in chats:
            answer(engine, question, thinking_tokens, reuse)
            engine.check()
        for seed, question in enumerate(chats):
            outputs = answer(engine, question + prompt_of(100 + seed, 5), 2, reuse)
            hits.append(outputs[-1].cached_tokens)
            engine.check()
        assert_idle(engine)
    return hits


def test_thinking_takes_no_hits_from_second_turns() -> None:
    """A cache too small for the thinking of all chats holds as many prompts as if nobody had thought."""
    without_thinking = second_turn_hits(1, None)
    assert without_thinking == [QUESTION_TOKENS] * NUM_CHATS
    assert second_turn_hits(THINKING_TOKENS, Reuse(QUESTION_TOKENS)) == without_thinking
    assert sum(second_turn_hits(THINKING_TOKENS, None)) < sum(without_thinking) / 2


@pytest.mark.parametrize(
    ("unless", "ends", "expected"),
    [
        ("absent", "stop", 2),
        ("written", "stop", 6),
        ("absent", "length", 4),
        ("absent", "abort", 4),
    ],
)
def test_what_is_reusable_depends_on_the_end(unless: str, ends: str, expected: int) -> None:
    """After its own end the limit holds, after another end the whole prompt stays, with the token everything.

    A later request takes the four pages that are evicted first, out of four older ones and those of the request.
    """
    prompt = prompt_of(1, 4 * PAGE_TOKENS)
    tokens = alone(prompt, 2 * PAGE_TOKENS + 4)
    absent = next(token for token in range(257) if token not in tokens)
    reuse = Reuse(2 * PAGE_TOKENS + 3, tokens[5] if unless == "written" else absent)
    last = {"stop_token_ids": [tokens[-1]]} if ends == "stop" else {}
    assert tokens.index(tokens[-1]) == len(tokens) - 1
    with make_engine(num_pages=11, max_model_len=80) as engine:
        answer(engine, prompt_of(5, 4 * PAGE_TOKENS), 1, None)
        (request_id,) = engine.submit(prompt, greedy(len(tokens) + (ends != "length"), **last), reuse=reuse)
        if ends == "abort":
            for _ in range(2 * PAGE_TOKENS + 3):
                engine.step()
            engine.abort(request_id)
        else:
            assert run(engine, request_id) == [tokens]
        assert_idle(engine)
        answer(engine, prompt_of(6, 4 * PAGE_TOKENS + 1), 1, None)
        assert answer(engine, prompt + tokens, 1, None)[-1].cached_tokens == expected * PAGE_TOKENS
        engine.check()


def test_choices_that_still_run_keep_their_pages() -> None:
    """The first choice to end gives up the prompt that the others hold; their answers are those of requests alone."""
    prompt = prompt_of(2, 3 * PAGE_TOKENS)
    with make_engine(num_pages=16, max_model_len=128) as engine:
        ids = engine.submit(prompt, greedy(20, n=3), reuse=Reuse(0))
        engine.step()
        engine.abort(ids[0])
        others = engine.submit(prompt_of(3, 40), greedy(9))
        answers = run(engine, *ids[1:], *others)
        assert answers == [alone(prompt, 20)] * 2 + [alone(prompt_of(3, 40), 9)]
        assert_idle(engine)


def test_continued_thinking_is_found_and_gives_the_same_tokens() -> None:
    """A client that sends prompt and thinking back goes on where the answer was cut."""
    prompt = prompt_of(4, 2 * PAGE_TOKENS)
    whole = alone(prompt, 40)
    with make_engine(num_pages=16, max_model_len=128) as engine:
        answer(engine, prompt, 24, Reuse(len(prompt)))
        outputs = answer(engine, prompt + whole[:24], 16, Reuse(len(prompt)))
        assert outputs[-1].cached_tokens == 4 * PAGE_TOKENS
        assert [token for output in outputs for token in output.token_ids] == whole[24:]
        assert_idle(engine)
