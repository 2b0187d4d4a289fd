"""Three ranks on the sample model, whose 9 heads, 3 KV heads and widths split by 3: bitwise the answers of one rank."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from glint.native.library import InvalidArgument, NativeEngine
from tests.cpu.random_asks import random_prompt, seeded
from tests.cpu.rank_engine import SHARDING
from tests.cpu.small_engine import Answer, Ask, Session, answer_all, make_ask, open_engine
from tests.cpu.sweeps import slow

NUM_RANKS = 3
NUM_ALLOWED = 11
OPTIONS = {
    "row_slices": NUM_RANKS,
    "num_threads": NUM_RANKS,
    "page_tokens": 16,
    "num_pages": 32,
    "max_step_tokens": 128,
    "max_step_items": 8,
    "max_context_tokens": 256,
}
PLAIN = make_ask(random_prompt(1, 33), 6)
SEEDED_ASKS = [make_ask(random_prompt(seed, 9), 5, **seeded(seed)) for seed in (2, 3)]
WITH_PROMPT = make_ask(random_prompt(4, 20), 3, has_prompt_logprobs=1, num_prompt_logprobs=20)
ASKS = [PLAIN, *SEEDED_ASKS, WITH_PROMPT]


@dataclass(frozen=True)
class SampleCase:
    """The sample model and what one rank answers on it."""

    checkpoint: Checkpoint
    answers: list[Answer]
    masked: Answer


@pytest.fixture(scope="module")
def case(sample_model: Path) -> SampleCase:
    """The model is made on first use; one engine of one rank gives all answers."""
    checkpoint = open_checkpoint(sample_model)
    with open_engine(checkpoint, **OPTIONS) as engine:
        return SampleCase(checkpoint, answer_all(engine, ASKS), answer_masked(engine, SEEDED_ASKS[0]))


@pytest.fixture(scope="module", params=["sharded", *slow("replicated")])
def engine(request: pytest.FixtureRequest, case: SampleCase) -> Iterator[NativeEngine]:
    """An engine of three ranks."""
    with open_engine(
        case.checkpoint, num_ranks=NUM_RANKS, sequence_parallel=SHARDING[request.param], **OPTIONS
    ) as opened:
        yield opened


def allowed_tokens(step: int) -> list[int]:
    """The few tokens that a mask allows in a step: others in every step, from all parts of the vocabulary."""
    return [(step * 977 + index * 4463) % 49152 for index in range(NUM_ALLOWED)]


def answer_masked(engine: NativeEngine, ask: Ask) -> Answer:
    """The answer to a request whose every token has a mask."""
    num_words = 49152 // 32
    session = Session(engine)
    request_id = session.add(ask)
    step = 0
    while session.running:
        words = (ctypes.c_uint32 * num_words)()
        for token in allowed_tokens(step):
            words[token // 32] |= 1 << token % 32
        masks = abi.sized(abi.Masks, count=1, masks=(abi.Mask * 1)(abi.Mask(0, 0, num_words, 0, words)))
        ticket = engine.submit_step([(request_id, 128)])
        engine.sample_step(ticket, masks)
        session.tickets.append(ticket)
        session.collect()
        step += 1
    return session.free(request_id)


def test_three_ranks_answer_as_one(engine: NativeEngine, case: SampleCase) -> None:
    """Greedy, sampled by seed, and with the log-probabilities of the prompt."""
    assert answer_all(engine, ASKS) == case.answers
    assert answer_all(engine, ASKS, chunk=5) == case.answers
    assert len(case.answers[-1].logprobs[1]) >= 20


def test_masks_hold_at_three_ranks(engine: NativeEngine, case: SampleCase) -> None:
    assert answer_masked(engine, SEEDED_ASKS[0]) == case.masked
    for step, token in enumerate(case.masked.tokens):
        assert token in allowed_tokens(step)
    assert case.masked.tokens != case.answers[1].tokens


def test_two_ranks_do_not_fit_nine_heads(case: SampleCase) -> None:
    with pytest.raises(InvalidArgument, match=r"num_attention_heads 9 cannot be split over 2 ranks; choose another"):
        open_engine(case.checkpoint, **(OPTIONS | {"num_ranks": 2, "row_slices": 2}))
