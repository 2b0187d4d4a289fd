"""Bad steps to the C functions: wrong items, tickets, masks and order of calls are refused and change nothing."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from glint.native import abi
from tests.cpu.raw_engine import (
    CONTROL,
    MAX_STEP_ITEMS,
    MAX_STEP_TOKENS,
    NARROW_OPTIONS,
    RawEngine,
    step_items,
)
from tests.cpu.small_engine import VOCAB_SIZE, answer_alone, make_ask

pytestmark = pytest.mark.sanitize

INVALID = abi.STATUS_INVALID_ARGUMENT
UNKNOWN = abi.STATUS_UNKNOWN_REQUEST
BUSY = abi.STATUS_BUSY
UNSUPPORTED = abi.STATUS_UNSUPPORTED
INT_MAX = 2**31 - 1
WORD_COUNT = (VOCAB_SIZE + 31) // 32
LONG = make_ask(range(50), 20)


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    """An engine; after the test it holds nothing and still gives the right answer."""
    opened = RawEngine(**NARROW_OPTIONS)
    yield opened
    assert opened.is_unharmed()
    opened.close()


def refuse_step(engine: RawEngine, status: int, words: str, items: Any, count: int | None = None) -> None:
    """Submit items that must be refused; neither they nor the ticket may change."""
    ticket = abi.sized(abi.Ticket, step=5)
    before = bytes(items), bytes(ticket)
    given = len(items) if count is None else count
    engine.refuses(status, words, "glint_submit_step", items, given, ticket)
    assert (bytes(items), bytes(ticket)) == before


def free_all(engine: RawEngine, *ids: int) -> None:
    for request_id in ids:
        engine.succeeds("glint_free_request", request_id)


def make_masks(*masks: abi.Mask, count: int | None = None) -> abi.Masks:
    """Masks of a step."""
    array = (abi.Mask * len(masks))(*masks)
    return abi.sized(abi.Masks, count=len(masks) if count is None else count, masks=array)


def make_mask(item: int, word: int = 2**32 - 1, word_count: int = WORD_COUNT) -> abi.Mask:
    """A mask whose words are all the same."""
    words = (ctypes.c_uint32 * WORD_COUNT)(*([word] * WORD_COUNT))
    return abi.Mask(item=item, word_count=word_count, words=words)


@pytest.mark.parametrize("count", [0, -1, -(2**31), MAX_STEP_ITEMS + 1, INT_MAX])
def test_item_count_out_of_range_is_refused(engine: RawEngine, count: int) -> None:
    request_id = engine.add(CONTROL)
    refuse_step(engine, INVALID, str(count), step_items((request_id, 1)), count)
    free_all(engine, request_id)


@pytest.mark.parametrize("advance", [0, -1, -(2**31)])
def test_items_that_do_not_advance_are_refused(engine: RawEngine, advance: int) -> None:
    good, bad = engine.add(CONTROL), engine.add(CONTROL)
    refuse_step(engine, INVALID, f"item 1 advances {advance} tokens", step_items((good, 1), (bad, advance)))
    free_all(engine, good, bad)


@pytest.mark.parametrize("drafts", [1, -1, INT_MAX, -(2**31)])
def test_draft_tokens_are_refused(engine: RawEngine, drafts: int) -> None:
    request_id = engine.add(CONTROL)
    items = step_items((request_id, 1))
    items[0].draft_tokens = drafts
    refuse_step(engine, INVALID, f"{drafts} draft tokens, expected 0 to 0", items)
    free_all(engine, request_id)


def test_request_twice_in_a_step_is_refused(engine: RawEngine) -> None:
    first, second = engine.add(CONTROL), engine.add(LONG)
    refuse_step(engine, INVALID, "twice", step_items((first, 1), (second, 1), (first, 1)))
    refuse_step(engine, INVALID, "twice", step_items((second, 1), (second, 1)))
    engine.finish(engine.submit((second, 1), (first, 1)))
    free_all(engine, first, second)


def test_too_many_tokens_are_refused_and_huge_advances_are_cut(engine: RawEngine) -> None:
    ids = [engine.add(LONG), engine.add(LONG)]
    refuse_step(engine, INVALID, "100 tokens", step_items((ids[0], INT_MAX), (ids[1], INT_MAX)))
    refuse_step(engine, INVALID, f"at most {MAX_STEP_TOKENS}", step_items((ids[0], 50), (ids[1], 15)))
    results = engine.finish(engine.submit((ids[0], INT_MAX), (ids[1], 14)))
    assert [results.items[index].computed_tokens for index in range(2)] == [50, 14]
    free_all(engine, *ids)


def test_refused_steps_leave_requests_as_they_were(engine: RawEngine) -> None:
    ids = [engine.add(CONTROL) for _ in range(3)]
    for bad in ((ids[0], 0), (2**40, 1), (ids[0], 1)):
        assert engine.call("glint_submit_step", step_items(*[(i, 9) for i in ids], bad), 4, abi.sized(abi.Ticket)) != 0
    expected = answer_alone(CONTROL).tokens
    found: list[list[int]] = [[], [], []]
    for _ in expected:
        results = engine.finish(engine.submit(*[(request_id, 21) for request_id in ids]))
        for index in range(3):
            found[index] += results.items[index].tokens[:1]
    assert found == [expected] * 3
    refuse_step(engine, INVALID, "finished", step_items((ids[1], 1)))
    for name in ("glint_prefill", "glint_decode_step"):
        engine.refuses(INVALID, "finished", name, ids[1], abi.sized(abi.StepResults))
    free_all(engine, *ids)


def test_wrong_tickets_are_refused(engine: RawEngine) -> None:
    request_id = engine.add(CONTROL)
    ticket = engine.submit((request_id, 4))
    results = abi.sized(abi.StepResults)
    for step in (0, ticket.step - 1, ticket.step + 1, 2**64 - 1):
        wrong = abi.sized(abi.Ticket, step=step)
        engine.refuses(INVALID, f"ticket.step {step}", "glint_sample_step", wrong, None)
        engine.refuses(INVALID, f"ticket.step {step}", "glint_collect_step", wrong, results)
    engine.refuses(INVALID, "was not sampled", "glint_collect_step", ticket, results)
    engine.succeeds("glint_sample_step", ticket, None)
    engine.refuses(INVALID, "sampled already", "glint_sample_step", ticket, None)
    engine.collect(ticket)
    engine.refuses(INVALID, "not in flight", "glint_sample_step", ticket, None)
    engine.refuses(INVALID, "not in flight", "glint_collect_step", ticket, results)
    free_all(engine, request_id)


def test_steps_are_collected_in_order(engine: RawEngine) -> None:
    request_id = engine.add(CONTROL)
    first, second = engine.submit((request_id, 4)), engine.submit((request_id, 4))
    for ticket in (second, first):
        engine.succeeds("glint_sample_step", ticket, None)
    engine.refuses(INVALID, "in order", "glint_collect_step", second, abi.sized(abi.StepResults))
    engine.collect(first)
    engine.collect(second)
    free_all(engine, request_id)


def test_third_step_in_flight_is_refused(engine: RawEngine) -> None:
    ids = [engine.add(CONTROL) for _ in range(3)]
    tickets = [engine.submit((ids[0], 4)), engine.submit((ids[1], 4))]
    refuse_step(engine, BUSY, "2 steps are in flight", step_items((ids[2], 4)))
    for name in ("glint_prefill", "glint_decode_step"):
        engine.refuses(BUSY, "in flight", name, ids[2], abi.sized(abi.StepResults))
    for ticket in tickets:
        engine.finish(ticket)
    engine.finish(engine.submit((ids[2], 4)))
    free_all(engine, *ids)


def test_request_in_flight_keeps_its_pages_until_collected(engine: RawEngine) -> None:
    request_id = engine.add(CONTROL)
    first, second = engine.submit((request_id, 30)), engine.submit((request_id, 1))
    engine.refuses(BUSY, str(request_id), "glint_release_pages", request_id)
    held = engine.stats().pages_held
    engine.succeeds("glint_free_request", request_id)
    engine.refuses(UNKNOWN, str(request_id), "glint_free_request", request_id)
    engine.refuses(UNKNOWN, str(request_id), "glint_release_pages", request_id)
    engine.finish(first)
    assert engine.stats().pages_held == held > 0
    refuse_step(engine, UNKNOWN, str(request_id), step_items((request_id, 1)))
    engine.finish(second)
    assert engine.stats().pages_held == 0
    engine.refuses(UNKNOWN, str(request_id), "glint_free_request", request_id)


def test_calls_for_one_request_in_the_wrong_order_are_refused(engine: RawEngine) -> None:
    results = abi.sized(abi.StepResults)
    request_id = engine.add(CONTROL)
    engine.refuses(INVALID, "21 tokens to compute", "glint_decode_step", request_id, results)
    engine.succeeds("glint_prefill", request_id, results)
    engine.succeeds("glint_release_pages", request_id)
    engine.refuses(INVALID, "22 tokens to compute", "glint_decode_step", request_id, results)
    free_all(engine, request_id)
    wide = engine.add(make_ask(range(MAX_STEP_TOKENS + 1), 1, has_prompt_logprobs=1))
    engine.refuses(INVALID, "prompt logprobs", "glint_prefill", wide, results)
    free_all(engine, wide)


MASK_FAULTS: list[tuple[str, abi.Masks]] = [
    ("count is -1", abi.sized(abi.Masks, count=-1)),
    ("count is 1", abi.sized(abi.Masks, count=1)),
    ("item -1", make_masks(make_mask(-1))),
    ("item 2", make_masks(make_mask(0), make_mask(2))),
    (f"item {INT_MAX}", make_masks(make_mask(INT_MAX))),
    ("item 1", make_masks(abi.Mask(item=1, word_count=WORD_COUNT, words=None))),
    ("0 words", make_masks(make_mask(1, word_count=0))),
    ("-1 words", make_masks(make_mask(1, word_count=-1))),
    (f"{WORD_COUNT - 1} words", make_masks(make_mask(1, word_count=WORD_COUNT - 1))),
    (f"{WORD_COUNT + 1} words", make_masks(make_mask(0), make_mask(1, word_count=WORD_COUNT + 1))),
]


@pytest.mark.parametrize(("words", "masks"), MASK_FAULTS, ids=[words for words, _ in MASK_FAULTS])
def test_bad_masks_are_refused(engine: RawEngine, words: str, masks: abi.Masks) -> None:
    ids = [engine.add(CONTROL), engine.add(CONTROL)]
    ticket = engine.submit((ids[0], 21), (ids[1], 21))
    engine.refuses(INVALID, words, "glint_sample_step", ticket, masks)
    results = engine.finish(ticket)
    assert [results.items[index].tokens[0] for index in range(2)] == answer_alone(CONTROL).tokens[:1] * 2
    free_all(engine, *ids)


@pytest.mark.parametrize(("count", "words"), [(3, "3"), (INT_MAX, str(INT_MAX))])
def test_more_masks_than_items_are_refused(engine: RawEngine, count: int, words: str) -> None:
    ids = [engine.add(CONTROL), engine.add(CONTROL)]
    ticket = engine.submit((ids[0], 21), (ids[1], 21))
    masks = make_masks(make_mask(0), make_mask(1), make_mask(0), count=count)
    engine.refuses(INVALID, words, "glint_sample_step", ticket, masks)
    engine.finish(ticket)
    free_all(engine, *ids)


def test_two_masks_of_one_item_are_refused(engine: RawEngine) -> None:
    ids = [engine.add(CONTROL), engine.add(CONTROL)]
    ticket = engine.submit((ids[0], 21), (ids[1], 21))
    engine.refuses(INVALID, "item 1", "glint_sample_step", ticket, make_masks(make_mask(1), make_mask(1)))
    engine.finish(ticket)
    free_all(engine, *ids)


def test_mask_that_allows_nothing_fails_its_request_alone(engine: RawEngine) -> None:
    ids = [engine.add(CONTROL), engine.add(CONTROL)]
    ticket = engine.submit((ids[0], 21), (ids[1], 21))
    masks = make_masks(make_mask(0, word=0))
    engine.succeeds("glint_sample_step", ticket, masks)
    results = engine.collect(ticket)
    failed, good = results.items[0], results.items[1]
    assert (failed.finish_reason, failed.failure) == (abi.FINISH_FAILED, abi.FAILURE_NOTHING_ALLOWED)
    assert failed.token_count == 0
    assert good.tokens[0] == answer_alone(CONTROL).tokens[0]
    refuse_step(engine, INVALID, "finished", step_items((ids[0], 1)))
    free_all(engine, *ids)


def test_masks_are_copied_by_the_call(engine: RawEngine) -> None:
    ids = [engine.add(CONTROL), engine.add(CONTROL)]
    first, second = engine.submit((ids[0], 21)), engine.submit((ids[1], 21))
    words = (ctypes.c_uint32 * WORD_COUNT)(*([2**32 - 1] * WORD_COUNT))
    masks = make_masks(abi.Mask(item=0, word_count=WORD_COUNT, words=words))
    engine.succeeds("glint_sample_step", second, masks)
    ctypes.memset(words, 0, ctypes.sizeof(words))
    engine.finish(first)
    result = engine.collect(second).items[0]
    assert (result.failure, result.tokens[: result.token_count]) == (
        abi.FAILURE_NONE,
        answer_alone(CONTROL).tokens[:1],
    )
    free_all(engine, *ids)


def test_engine_can_be_freed_with_steps_in_flight() -> None:
    for round_index in range(12):
        engine = RawEngine(**NARROW_OPTIONS)
        ids = [engine.add(LONG) for _ in range(2)]
        tickets = [engine.submit((request_id, 50)) for request_id in ids[: 1 + round_index % 2]]
        if round_index % 3:
            engine.succeeds("glint_sample_step", tickets[0], None)
        engine.close()
        assert engine.call("glint_free_engine") == INVALID


def test_prefill_short_of_pages_changes_nothing() -> None:
    options = NARROW_OPTIONS | {"num_pages": 7, "max_step_tokens": 16}
    engine = RawEngine(**options)
    request_id = engine.add(make_ask(range(64), 4))
    engine.refuses(abi.STATUS_OUT_OF_PAGES, "1 more pages", "glint_prefill", request_id, abi.sized(abi.StepResults))
    free_all(engine, request_id)
    assert engine.is_unharmed()
    engine.close()
