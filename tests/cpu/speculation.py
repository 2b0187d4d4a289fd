"""Requests for tests of speculation, and random steps in which drafts are made and verified.

The models have four tokens, so that a random MTP layer is often right.
"""

import random
from typing import Any

import numpy as np

from glint.native.library import ItemOutcome, NativeEngine, OutOfPages
from tests.cpu.small_engine import Answer, Ask, Session
from tests.reference.numpy_model import NumpyModel

VOCAB_SIZE = 4
PAGE_TOKENS = 8
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
    """Drafts made, verified and accepted over all steps, and how many tokens single items brought.

    `ahead` counts items that verified drafts which were not known when they were submitted, `shortages` steps for which
    pages were missing.
    """

    def __init__(self) -> None:
        self.made = self.verified = self.accepted = self.ahead = self.shortages = 0
        self.token_counts: set[int] = set()


def speculate(session: Session, waiting: list[Ask], source: random.Random, counts: Counts) -> dict[int, Ask]:
    """Run requests to their end in random steps; how many drafts are made and verified is drawn too.

    Where pages are missing the steps in flight are collected, then only the oldest request keeps its pages and goes on.
    """
    owners: dict[int, Ask] = {}
    drafts: dict[int, int] = {}
    in_flight: list[dict[int, tuple[int, bool]]] = []
    lacks_pages = False
    while waiting or session.running or session.tickets:
        while waiting and (not session.running or source.random() < 0.5):
            ask = waiting.pop()
            owners[session.add(ask)] = ask
        must_collect = len(session.tickets) == 2 or lacks_pages or not session.running
        if session.tickets and (must_collect or source.random() < 0.5):
            submitted = in_flight.pop(0)
            for item in session.collect().items:
                advance, is_ahead = submitted[item.request_id]
                if item.tokens:
                    assert item.num_verified == min(advance - 1, drafts.get(item.request_id, 0))
                    assert item.computed_tokens - item.first_position >= len(item.tokens)
                drafts[item.request_id] = len(item.drafts)
                count_item(item, is_ahead, counts)
            session.engine.check()
            if not session.tickets:
                assert_no_surplus(session, owners, drafts)
            continue
        candidates = session.running[:1] if lacks_pages else session.running
        if not session.tickets and (lacks_pages or source.random() < 0.1):
            for released in session.answers.keys() - candidates if lacks_pages else [source.choice(candidates)]:
                session.engine.release_pages(released)
                drafts[released] = 0
        chosen = source.sample(candidates, source.randint(1, min(len(candidates), 8)))
        asked = [source.choice((0, 1, 2, MAX_DRAFTS)) for _ in chosen]
        items = [(request_id, source.choice((1, 3, 8, 17, 64))) for request_id in chosen]
        try:
            session.submit(items, asked)
        except OutOfPages:
            lacks_pages = True
            counts.shortages += 1
            continue
        lacks_pages = False
        places = [session.engine.submitted_item(index).first_position for index in range(len(items))]
        in_flight.append({key: (advance, place < 0) for (key, advance), place in zip(items, places, strict=True)})
    return owners


def assert_no_surplus(session: Session, owners: dict[int, Ask], drafts: dict[int, int]) -> None:
    """While nothing is in flight no request holds pages for more than its tokens, or for drafts behind its prompt."""
    most = 0
    for request_id, answer in session.answers.items():
        num_tokens = len(owners[request_id].prompt) + len(answer.tokens)
        most += -(-(num_tokens + (0 if drafts.get(request_id) else MAX_DRAFTS)) // PAGE_TOKENS)
    assert session.engine.stats().pages_held <= most


def count_item(item: ItemOutcome, is_ahead: bool, counts: Counts) -> None:
    """Count what one item brought."""
    counts.made += len(item.drafts)
    if item.tokens:
        counts.accepted += len(item.tokens) - 1
        counts.verified += item.num_verified
        counts.ahead += is_ahead and item.num_verified > 0
        counts.token_counts.add(len(item.tokens))


def assert_same(engine: NativeEngine, asks: list[Ask], expected: list[Answer], seed: int, counts: Counts) -> None:
    """Random steps with drafts give the expected answers and leave no page held."""
    session = Session(engine)
    by_ask = dict(zip(asks, expected, strict=True))
    for request_id, ask in speculate(session, list(asks), random.Random(seed), counts).items():
        assert session.free(request_id) == by_ask[ask], ask
    assert counts.ahead > 0 or not counts.verified
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
