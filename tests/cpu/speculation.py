"""Requests for tests of speculation, and random steps in which drafts are made and verified.

The models have four tokens, so that a random MTP layer is often right.
"""

import random
from typing import Any

import numpy as np

from glint.native.library import ItemOutcome, NativeEngine
from tests.cpu.small_engine import Answer, Ask, Session
from tests.reference.numpy_model import NumpyModel

VOCAB_SIZE = 4
MAX_DRAFTS = 4
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "has_logprobs": 0},
    {"temperature": 1.2, "min_p": 0.1, "top_k": 4},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.4},
    {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"has_prompt_logprobs": 1, "num_prompt_logprobs": 3},
)


def draft_asks(count: int, seed: int, longest: int = 40) -> list[Ask]:
    """Requests of many lengths and settings, some with stop tokens and stop sequences."""
    source = random.Random(seed)
    asks = []
    for index in range(count):
        prompt = tuple(source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, longest)))
        sampling = SETTINGS[index % len(SETTINGS)] | {"seed": index}
        stops = (source.randrange(VOCAB_SIZE),) if source.random() < 0.2 else ()
        sequences = ((1, 2, 1), (3, 3, 0)) if source.random() < 0.3 else ()
        asks.append(Ask(prompt, source.randint(1, 30), tuple(sorted(sampling.items())), stops, sequences))
    return asks


class Counts:
    """Drafts made, verified and accepted over all steps, and how many tokens single items brought."""

    def __init__(self) -> None:
        self.made = self.verified = self.accepted = 0
        self.token_counts: set[int] = set()


def speculate(session: Session, waiting: list[Ask], source: random.Random, counts: Counts) -> dict[int, Ask]:
    """Run requests to their end in random steps; how many drafts are made and verified is drawn too."""
    owners: dict[int, Ask] = {}
    drafts: dict[int, int] = {}
    verified: list[dict[int, int]] = []
    busy: list[set[int]] = []
    while waiting or session.running or session.tickets:
        while waiting and (not session.running or source.random() < 0.5):
            ask = waiting.pop()
            owners[session.add(ask)] = ask
        free = [request_id for request_id in session.running if not any(request_id in ids for ids in busy)]
        if session.tickets and (len(session.tickets) == 2 or source.random() < 0.6 or not free):
            expected = verified.pop(0)
            busy.pop(0)
            for item in session.collect().items:
                drafts[item.request_id] = len(item.drafts)
                count_item(item, expected.get(item.request_id, 0), counts)
            session.engine.check()
            continue
        if not session.tickets and source.random() < 0.1:
            session.engine.release_pages(source.choice(free))
        chosen = source.sample(free, source.randint(1, min(len(free), 8)))
        asked = [source.choice((0, 1, 2, MAX_DRAFTS)) for _ in chosen]
        items = [(request_id, source.choice((1, 3, 8, 17, 64))) for request_id in chosen]
        session.submit(items, asked)
        verified.append({request_id: min(advance - 1, drafts.get(request_id, 0)) for request_id, advance in items})
        busy.append(set(chosen))
    return owners


def count_item(item: ItemOutcome, verified: int, counts: Counts) -> None:
    """Count what one item brought."""
    counts.made += len(item.drafts)
    if item.tokens:
        counts.accepted += len(item.tokens) - 1
        counts.verified += verified
        counts.token_counts.add(len(item.tokens))


def assert_same(engine: NativeEngine, asks: list[Ask], expected: list[Answer], seed: int, counts: Counts) -> None:
    """Random steps with drafts give the expected answers and leave no page held."""
    session = Session(engine)
    by_ask = dict(zip(asks, expected, strict=True))
    for request_id, ask in speculate(session, list(asks), random.Random(seed), counts).items():
        assert session.free(request_id) == by_ask[ask], ask
    stats = engine.stats()
    assert (stats.pages_held, stats.num_requests) == (0, 0)
    assert stats.tokens_sampled == sum(len(answer.tokens) for answer in expected)


def expected_drafts(model: NumpyModel, history: list[int], first: int, count: int) -> list[int]:
    """Greedy drafts behind a history by NumPy, where the MTP layer has the tokens from a position on."""
    normed = model.norm(model.hidden_states(history[:-1])[-1], "model.norm")[first - 1 :]
    drafts: list[int] = []
    for _ in range(count):
        logits = model.draft_logits(history[first:] + drafts, normed, first)[-1]
        best = np.sort(logits)[-2:]
        assert best[1] - best[0] > 1e-4, "two drafts are as good as equal; choose another seed"
        drafts.append(int(logits.argmax()))
    return drafts
