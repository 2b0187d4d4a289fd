"""Ranks that a model or the options do not allow: refused with the value and the way out, by the plan too.

The steps of an engine of two ranks are abused as those of one rank are.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from glint.native import abi
from glint.native.library import EngineError, InvalidArgument, choose_library, load_library, plan_engine
from tests.cpu.rank_engine import LAYOUTS, answers_of, open_testing_engine, rank_model
from tests.cpu.raw_engine import CONTROL, NARROW_OPTIONS, RawEngine
from tests.cpu.small_engine import engine_options, open_engine
from tests.cpu.test_abi_abuse_steps import (
    test_draft_tokens_are_refused,
    test_item_count_out_of_range_is_refused,
    test_items_that_do_not_advance_are_refused,
    test_more_masks_than_items_are_refused,
    test_request_in_flight_keeps_its_pages_until_collected,
    test_request_twice_in_a_step_is_refused,
    test_steps_are_collected_in_order,
    test_third_step_in_flight_is_refused,
    test_too_many_tokens_are_refused_and_huge_advances_are_cut,
    test_two_masks_of_one_item_are_refused,
    test_wrong_tickets_are_refused,
)

__all__ = [
    "test_draft_tokens_are_refused",
    "test_item_count_out_of_range_is_refused",
    "test_items_that_do_not_advance_are_refused",
    "test_more_masks_than_items_are_refused",
    "test_request_in_flight_keeps_its_pages_until_collected",
    "test_request_twice_in_a_step_is_refused",
    "test_steps_are_collected_in_order",
    "test_third_step_in_flight_is_refused",
    "test_too_many_tokens_are_refused_and_huge_advances_are_cut",
    "test_two_masks_of_one_item_are_refused",
    "test_wrong_tickets_are_refused",
]

pytestmark = pytest.mark.sanitize

RANKS = {"num_ranks": 2, "row_slices": 2}
ANOTHER_TP = "choose another"
ODD_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 12, "n_shared_experts": 2}


class RankedRawEngine(RawEngine):
    """An engine of two ranks by its handle."""

    def __init__(self) -> None:
        super().__init__(rank_model(), **RANKS, **NARROW_OPTIONS)

    def is_unharmed(self) -> bool:
        """Whether the engine holds nothing, its books add up and it still gives the right answer."""
        left = self.stats()
        self.succeeds("glint_check")
        is_empty = (left.num_requests, left.steps_in_flight, left.pages_held) == (0, 0, 0)
        return is_empty and [self.answer(CONTROL)] == answers_of(rank_model(), [CONTROL], row_slices=2)


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    """An engine of two ranks; after the test it holds nothing and still gives the right answer."""
    opened = RankedRawEngine()
    yield opened
    assert opened.is_unharmed()
    opened.close()


OPTION_FAULTS: list[tuple[str, dict[str, int]]] = [
    *((f"num_ranks is {count}, expected 1 to 64", {"num_ranks": count}) for count in (0, -1, 65, 1024, 2**31 - 1)),
    *((f"row_slices is {count}, expected 1 to 64", {"row_slices": count}) for count in (0, -3, 65, 2**31 - 1)),
    ("expert_layout is 2, expected 0 or 1", {"expert_layout": 2}),
    ("expert_layout is -1, expected 0 or 1", {"expert_layout": -1}),
    ("sequence_parallel is 3, expected 0 to 2", {"sequence_parallel": 3}),
    ("sequence_parallel is -1, expected 0 to 2", {"sequence_parallel": -1}),
    ("all_reduce is 3, expected 0 to 2", {"all_reduce": 3}),
    ("all_reduce is -1, expected 0 to 2", {"all_reduce": -1}),
    ("options.num_ranks is 2 and options.row_slices is 1: every rank needs", {"row_slices": 1}),
    ("options.num_ranks is 2 and options.row_slices is 3: every rank needs", {"row_slices": 3}),
    ("options.num_ranks is 2 and options.row_slices is 6: every rank needs", {"row_slices": 6}),
    ("power of two of the slices; choose row_slices 4 or 8", {"num_ranks": 4, "row_slices": 12}),
    ("dense width 96 cannot be cut into 64 equal slices; choose another", {"row_slices": 64}),
]
MODEL_FAULTS: list[tuple[str, str, int, dict[str, Any]]] = [
    (f"num_attention_heads 8 cannot be split over 3 ranks; {ANOTHER_TP}", "tp", 3, {}),
    (f"num_attention_heads 8 cannot be split over 16 ranks; {ANOTHER_TP}", "ep", 16, {}),
    (
        f"num_key_value_heads 4 can neither be split over 3 ranks nor be duplicated evenly; {ANOTHER_TP}",
        "tp",
        3,
        {"num_attention_heads": 12, "num_key_value_heads": 4},
    ),
    (f"vocabulary of 263 cannot be cut into 2 equal slices; {ANOTHER_TP}", "tp", 2, {"vocab_size": 263}),
    (f"dense width 92 cannot be cut into 8 equal slices; {ANOTHER_TP}", "tp", 8, {"intermediate_size": 92}),
    (f"expert width 12 cannot be cut into 8 equal slices; {ANOTHER_TP}", "tp", 8, ODD_EXPERTS),
    (
        f"shared expert width 12 cannot be cut into 8 equal slices; {ANOTHER_TP}",
        "ep",
        8,
        {"moe_intermediate_size": 12},
    ),
    (f"number of experts 12 cannot be cut into 8 equal slices; {ANOTHER_TP}", "ep", 8, {"n_routed_experts": 12}),
]


@pytest.mark.parametrize(("words", "changes"), OPTION_FAULTS, ids=[words for words, _ in OPTION_FAULTS])
def test_options_that_cannot_be_are_refused(words: str, changes: dict[str, int]) -> None:
    options = RANKS | changes
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        plan_engine(load_library(choose_library("cpu")), engine_options(rank_model(), **options))
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        open_engine(rank_model(), **options)


@pytest.mark.parametrize(
    ("words", "layout", "num_ranks", "shape"), MODEL_FAULTS, ids=[words for words, *_ in MODEL_FAULTS]
)
def test_models_that_do_not_split_are_refused(words: str, layout: str, num_ranks: int, shape: dict[str, Any]) -> None:
    options = {"num_ranks": num_ranks, "row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        open_engine(rank_model(**shape), **options)


def test_the_other_layout_runs_where_one_is_refused() -> None:
    with open_testing_engine(rank_model(n_routed_experts=12), num_ranks=8, row_slices=8) as engine:
        assert engine.stats().num_pages > 0
    shape = {"moe_intermediate_size": 12, "n_shared_experts": 2}
    ep = {"num_ranks": 8, "row_slices": 8, "expert_layout": abi.EXPERT_LAYOUT_EP}
    with open_testing_engine(rank_model(**shape), **ep) as engine:
        assert engine.stats().num_pages > 0


def test_memory_that_is_not_there_is_refused_with_the_rank() -> None:
    with pytest.raises(EngineError, match=r"num_pages|out of memory|rank \d of 2"):
        open_engine(rank_model(), num_pages=2**31 - 1, page_tokens=1024, **RANKS)
