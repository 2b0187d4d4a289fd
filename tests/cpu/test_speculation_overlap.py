"""Drafting requests in two steps in flight: the second begins where the first ends, with the drafts made there."""

import ctypes
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from glint.native.library import EngineBusy, InvalidArgument, NativeEngine, OutOfPages, UnknownRequest
from tests.cpu.rank_engine import deferring_engine
from tests.cpu.small_engine import SMALL_SHAPE, Answer, Ask, Session, answer_all, make_ask, open_engine
from tests.cpu.speculation import MAX_DRAFTS, PAGE_TOKENS, VOCAB_SIZE, Counts, assert_same, draft_asks
from tests.reference.checkpoints import make_checkpoint

pytestmark = [pytest.mark.sanitize, pytest.mark.threads]

ASK = make_ask([1, 2, 3], 40, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model of four tokens, whose random MTP layer is often right."""
    folder = tmp_path_factory.mktemp("overlap") / "model"
    shape = SMALL_SHAPE | {"vocab_size": VOCAB_SIZE}
    return open_checkpoint(make_checkpoint(folder, "glm47", "fp8_channel", mtp="with copies", **shape))


@pytest.fixture(params=[False, True], ids=["read at once", "read late"])
def engine(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[NativeEngine]:
    """An engine of few rows that reads results at once, or where nothing is decided only behind the next launch."""
    opened: AbstractContextManager[NativeEngine]
    sizes = {"max_draft_tokens": MAX_DRAFTS, "max_step_items": 2 * (1 + MAX_DRAFTS)}
    opened = deferring_engine(checkpoint, **sizes) if request.param else open_engine(checkpoint, **sizes)
    with opened as found:
        yield found
        stats = found.stats()
        assert (stats.pages_held, stats.num_requests, stats.steps_in_flight) == (0, 0, 0)
        found.check()


def answer_without(checkpoint: Checkpoint, ask: Ask) -> Answer:
    """What an engine without the MTP layer answers."""
    with open_engine(checkpoint) as plain:
        (answer,) = answer_all(plain, [ask])
    return answer


def run_two_deep(session: Session, advance: int = 1 + MAX_DRAFTS, num_drafts: int = MAX_DRAFTS) -> int:
    """Run all requests with two steps in flight; gives the tokens of the largest item."""
    most = 0
    while session.running:
        session.submit([(key, advance) for key in session.running], [num_drafts] * len(session.running))
        if len(session.tickets) == abi.MAX_STEPS_IN_FLIGHT:
            most = max(most, *(len(item.tokens) for item in session.collect().items))
    while session.tickets:
        session.collect()
    return most


def test_the_step_behind_a_drafting_step_is_submitted_before_its_collect(
    engine: NativeEngine, checkpoint: Checkpoint
) -> None:
    session = Session(engine)
    request_id = session.add(ASK)
    session.submit([(request_id, 3)], [3])
    session.submit([(request_id, 1 + MAX_DRAFTS)], [2])
    assert engine.submitted_item(0).first_position == -1
    with pytest.raises(EngineBusy, match="2 steps are in flight"):
        session.submit([(request_id, 1)])
    (first,) = session.collect().items
    assert (len(first.tokens), len(first.drafts), first.first_position, first.num_verified) == (1, 3, 0, 0)
    (second,) = session.collect().items
    assert (second.first_position, second.num_verified) == (3, 3)
    assert second.computed_tokens == 3 + len(second.tokens)
    assert tuple(second.tokens[:-1]) == first.drafts[: len(second.tokens) - 1]
    session.step([(request_id, 64)], [2])
    assert run_two_deep(session) > 1
    assert session.free(request_id) == answer_without(checkpoint, ASK)


@pytest.mark.parametrize("advance", [1, 2, 1 + MAX_DRAFTS])
@pytest.mark.parametrize("num_drafts", [0, 1, MAX_DRAFTS])
def test_each_number_of_drafts_gives_the_same_answers(
    engine: NativeEngine, checkpoint: Checkpoint, advance: int, num_drafts: int
) -> None:
    asks = [ASK, make_ask([0, 2], 23, repetition_penalty=1.4, frequency_penalty=0.5)]
    session = Session(engine)
    ids = [session.add(ask) for ask in asks]
    session.step([(key, 3) for key in ids], [MAX_DRAFTS] * 2)
    assert run_two_deep(session, advance, num_drafts) > (num_drafts > 0 and advance > 1)
    assert [session.free(key) for key in ids] == [answer_without(checkpoint, ask) for ask in asks]


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_two_deep_leave_nothing(checkpoint: Checkpoint, seed: int) -> None:
    asks = draft_asks(14, 70 + seed)
    with open_engine(checkpoint) as plain:
        expected = answer_all(plain, asks)
    counts = Counts()
    with deferring_engine(checkpoint, max_draft_tokens=MAX_DRAFTS) as engine:
        assert_same(engine, asks, expected, seed, counts)
    assert counts.ahead > 10


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_short_of_pages_change_nothing(checkpoint: Checkpoint, seed: int) -> None:
    asks = draft_asks(12, 90 + seed, longest=30)
    with open_engine(checkpoint) as plain:
        expected = answer_all(plain, asks)
    counts = Counts()
    with open_engine(checkpoint, max_draft_tokens=MAX_DRAFTS, num_pages=20) as engine:
        assert_same(engine, asks, expected, seed, counts)
    assert counts.shortages > 5 and counts.ahead > 0


def test_pages_of_the_worst_case_are_reserved_and_given_back(checkpoint: Checkpoint) -> None:
    """Behind three tokens, steps that verify and make eight drafts need pages for 11, 20 and 29 tokens at most."""
    with open_engine(checkpoint, max_draft_tokens=8, num_pages=3, max_step_items=10) as engine:
        session = Session(engine)
        request_id = session.add(make_ask([1, 2, 3], 60))
        session.submit([(request_id, 3)], [8])
        assert engine.stats().pages_held == -(-11 // PAGE_TOKENS)
        session.submit([(request_id, 9)], [8])
        assert engine.stats().pages_held == -(-20 // PAGE_TOKENS) == 3
        session.collect()
        assert engine.stats().pages_held == 3
        with pytest.raises(OutOfPages) as shortage:
            session.submit([(request_id, 9)], [8])
        assert shortage.value.missing_pages == -(-29 // PAGE_TOKENS) - 3
        session.collect()
        num_known = 3 + len(session.answers[request_id].tokens)
        assert num_known < 3 + 8
        assert engine.stats().pages_held == -(-num_known // PAGE_TOKENS)
        session.step([(request_id, 9)], [20 - num_known - 8])
        session.free(request_id)
        assert engine.stats().pages_held == 0


def test_an_end_in_the_first_step_skips_the_second(engine: NativeEngine, checkpoint: Checkpoint) -> None:
    free_run = answer_without(checkpoint, make_ask([1, 2, 3], 40)).tokens
    for length in range(1, 12):
        ask = make_ask([1, 2, 3], length)
        stopped = Ask((1, 2, 3), 40, stop_sequences=(tuple(free_run[:length]),))
        session = Session(engine)
        ids = [session.add(ask), session.add(stopped)]
        session.step([(key, 3) for key in ids], [MAX_DRAFTS] * 2)
        last: dict[int, Any] = {}
        while session.running or session.tickets:
            if session.running and len(session.tickets) < abi.MAX_STEPS_IN_FLIGHT:
                session.submit([(key, 64) for key in session.running], [MAX_DRAFTS] * len(session.running))
                continue
            last |= {item.request_id: item for item in session.collect().items}
        for item in last.values():
            assert not item.tokens and item.first_position == item.computed_tokens and not item.num_verified
        assert [session.free(key) for key in ids] == [answer_without(checkpoint, one) for one in (ask, stopped)]


def test_a_request_freed_with_two_steps_in_flight_keeps_its_pages_until_both_end(engine: NativeEngine) -> None:
    session = Session(engine)
    request_id = session.add(ASK)
    session.submit([(request_id, 3)], [MAX_DRAFTS])
    session.submit([(request_id, 64)], [MAX_DRAFTS])
    with pytest.raises(EngineBusy, match="part of a step in flight"):
        engine.release_pages(request_id)
    engine.free_request(request_id)
    session.collect()
    assert engine.stats().pages_held > 0
    with pytest.raises(UnknownRequest, match="was freed"):
        session.submit([(request_id, 1)])
    session.collect()
    assert engine.stats().num_requests == 0


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_step_tokens": 6}, "advances 7 tokens, at most 6 fit"),
        ({"max_step_items": 6}, "has 7 items and drafts, at most 6 fit"),
    ],
)
def test_rows_and_tokens_are_counted_for_drafts_that_are_still_to_come(
    checkpoint: Checkpoint, sizes: dict[str, int], words: str
) -> None:
    with open_engine(checkpoint, max_draft_tokens=3, **sizes) as engine:
        session = Session(engine)
        first, second = session.add(make_ask([1, 2, 3], 30)), session.add(make_ask([3, 0], 30))
        session.submit([(first, 3), (second, 2)], [3, 2])
        with pytest.raises(InvalidArgument, match=words):
            session.submit([(first, 64), (second, 64)])
        session.submit([(first, 64), (second, 2)], [1, 0])
        session.collect()
        for count in (4, -1):
            with pytest.raises(InvalidArgument, match=f"{count} draft tokens, expected 0 to 3"):
                session.submit([(first, 1)], [count])
        session.collect()
        assert session.step([(first, 64), (second, 64)]).items[0].num_verified == 1
        engine.free_request(first)
        engine.free_request(second)


def test_masks_of_rows_are_those_of_drafts_that_are_still_to_come(engine: NativeEngine) -> None:
    """A row has its mask even where only the step before decides whether there is one."""
    session = Session(engine)
    request_id = session.add(make_ask([1, 2, 3], 60, temperature=1.0))
    session.submit([(request_id, 3)], [MAX_DRAFTS])
    for step in range(12):
        ticket = engine.submit_step([(request_id, 3)], [step % 3])
        words = (ctypes.c_uint32 * 1)(1 << (step + 1) % VOCAB_SIZE)
        wrong = abi.sized(abi.Masks, count=1, masks=(abi.Mask * 1)(abi.Mask(0, 3, 1, 0, words)))
        num_coming = 2 if step == 0 else (step - 1) % 3
        with pytest.raises(InvalidArgument, match=f"row 3 of item 0, which verifies {num_coming} drafts"):
            engine.sample_step(ticket, wrong)
        masks = [abi.Mask(0, row, 1, 0, words) for row in range(1 + num_coming)]
        engine.sample_step(ticket, abi.sized(abi.Masks, count=len(masks), masks=(abi.Mask * len(masks))(*masks)))
        session.tickets.append(ticket)
        (item,) = session.collect().items
        assert step == 0 or set(item.tokens) == {step % VOCAB_SIZE}
    session.collect()
    engine.free_request(request_id)


@pytest.mark.parametrize("row", [1, 2, 3, 4])
def test_a_mask_without_words_drops_drafts(engine: NativeEngine, checkpoint: Checkpoint, row: int) -> None:
    """From the draft before its row on; what is left of the step is as ever."""
    session = Session(engine)
    request_id = session.add(ASK)
    session.submit([(request_id, 3)], [MAX_DRAFTS])
    num_verified = []
    while session.running:
        ticket = engine.submit_step([(request_id, 1 + MAX_DRAFTS)], [MAX_DRAFTS])
        engine.sample_step(ticket, abi.sized(abi.Masks, count=1, masks=(abi.Mask * 1)(abi.Mask(0, row, 0, 0, None))))
        session.tickets.append(ticket)
        num_verified.append(session.collect().items[0].num_verified)
    session.collect()
    assert max(num_verified) == row - 1
    assert session.free(request_id) == answer_without(checkpoint, ASK)


def test_a_mask_of_the_first_row_has_words(engine: NativeEngine) -> None:
    session = Session(engine)
    request_id = session.add(ASK)
    session.submit([(request_id, 3)], [1])
    ticket = engine.submit_step([(request_id, 2)])
    for row, words in ((0, "has 0 words, expected 1"), (2, "row 2 of item 0, which verifies 1 drafts")):
        masks = abi.sized(abi.Masks, count=1, masks=(abi.Mask * 1)(abi.Mask(0, row, 0, 0, None)))
        with pytest.raises(InvalidArgument, match=words):
            engine.sample_step(ticket, masks)
    engine.sample_step(ticket)
    session.collect()
    engine.collect_step(ticket)
    engine.free_request(request_id)


def test_engines_end_with_drafting_steps_in_flight(checkpoint: Checkpoint) -> None:
    for seed in range(8):
        source = random.Random(seed)
        engine = open_engine(checkpoint, max_draft_tokens=MAX_DRAFTS)
        session = Session(engine)
        ids = [session.add(ASK) for _ in range(3)]
        session.submit([(key, 3) for key in ids], [MAX_DRAFTS] * 3)
        ticket = engine.submit_step([(key, 5) for key in ids], [MAX_DRAFTS] * 3)
        if source.random() < 0.5:
            engine.sample_step(ticket)
        engine.close()
