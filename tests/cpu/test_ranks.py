"""Several ranks on the CPU give bitwise the answers of one with the same `row_slices`: tokens and log-probabilities.

Every layout, sharding, kind of weights and family of models; more ranks than KV heads among them.
"""

from functools import cache
from itertools import product
from typing import Any

import pytest

from glint.native import abi
from glint.native.library import InvalidArgument
from tests.cpu.kernel_sets import KERNELS, require_kernels
from tests.cpu.random_asks import random_prompt
from tests.cpu.rank_engine import (
    LAYOUTS,
    ROW_SLICES,
    SHARDING,
    answers_of,
    glm47_model,
    rank_asks,
    rank_model,
)
from tests.cpu.small_engine import Answer, answer_all, make_ask, open_engine
from tests.cpu.sweeps import slow
from tests.reference.checkpoints import FAMILIES, Family, Weights

pytestmark = pytest.mark.sanitize

ASKS = rank_asks(5, seed=8)
TILE_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_shared_experts": 2,
}
RANK_WEIGHTS = [pytest.param("fp8_channel", marks=pytest.mark.threads), *slow("fp8_tensor", "bf16")]
SLICED_RANKS = [(3, 6), (7, 7), (16, 16), *slow((3, 3), (3, 12), (6, 6), (5, 5), (64, 64))]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@cache
def answers_of_one(weights: Weights, layout: str) -> list[Answer]:
    """What one rank answers on the model with 160 experts."""
    return answers_of(glm47_model(weights), ASKS, row_slices=ROW_SLICES, expert_layout=LAYOUTS[layout])


@pytest.mark.parametrize("weights", RANK_WEIGHTS)
@every_layout
@pytest.mark.parametrize("num_ranks", [8, *slow(1, 2, 4)])
@pytest.mark.parametrize("sharding", SHARDING)
def test_the_number_of_ranks_changes_nothing(weights: Weights, layout: str, num_ranks: int, sharding: str) -> None:
    with open_engine(
        glm47_model(weights),
        num_ranks=num_ranks,
        row_slices=ROW_SLICES,
        expert_layout=LAYOUTS[layout],
        sequence_parallel=SHARDING[sharding],
    ) as engine:
        assert answer_all(engine, ASKS, chunk=7) == answers_of_one(weights, layout)
        assert answer_all(engine, ASKS) == answers_of_one(weights, layout)
        assert engine.stats().pages_held == 0
        engine.check()


def test_the_answers_are_not_trivial() -> None:
    """What is compared above differs between requests, kinds of weights and layouts."""
    tp, ep, bf16 = (answers_of_one(*key) for key in (("fp8_channel", "tp"), ("fp8_channel", "ep"), ("bf16", "tp")))
    assert tp != ep and tp != bf16
    assert len({tuple(answer.tokens) for answer in tp}) == len(ASKS)
    assert len(tp[-1].logprobs) == len(ASKS[-1].prompt) - 1 + ASKS[-1].max_new_tokens


@pytest.mark.parametrize("family", FAMILIES)
@every_layout
@pytest.mark.parametrize("num_ranks", [4, *slow(2, 8)])
def test_every_family_of_models(family: Family, layout: str, num_ranks: int) -> None:
    """Biases, no norm of query and key, tied embeddings; 4 and 8 ranks duplicate the KV heads."""
    checkpoint = rank_model("fp8_channel", family, n_routed_experts=16, num_experts_per_tok=4)
    changes = {"row_slices": ROW_SLICES, "expert_layout": LAYOUTS[layout]}
    expected = answers_of(checkpoint, ASKS, **changes)
    assert checkpoint.config.num_kv_heads == 2
    assert answers_of(checkpoint, ASKS, chunk=13, num_ranks=num_ranks, **changes) == expected


@pytest.mark.parametrize(("layout", "num_ranks"), [("tp", 2), ("ep", 2), ("ep", 4)])
@pytest.mark.parametrize(("weights", "sharding"), [*product(["fp8_block", "fp8_group"], ["replicated", "sharded"])])
def test_tiles_that_share_a_scale(layout: str, num_ranks: int, weights: Weights, sharding: str) -> None:
    checkpoint = rank_model(weights, **TILE_SHAPE)
    changes = {"row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    expected = answers_of(checkpoint, ASKS, **changes)
    assert (
        answers_of(checkpoint, ASKS, num_ranks=num_ranks, sequence_parallel=SHARDING[sharding], **changes) == expected
    )


def test_tiles_cut_by_a_slice_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"share of the expert width is 64.*tiles of 128.*expert.layout"):
        open_engine(rank_model("fp8_block", **TILE_SHAPE), num_ranks=4, row_slices=4)


def test_groups_cut_by_a_slice_are_refused() -> None:
    """Also where one rank holds all slices, on which weights per tile alone may be cut anywhere."""
    with pytest.raises(InvalidArgument, match=r"slices of the expert width are 64 wide, and 128 inputs.*row.slices"):
        open_engine(rank_model("fp8_group", **TILE_SHAPE), row_slices=4)
    open_engine(rank_model("fp8_block", **TILE_SHAPE), row_slices=4).close()
    open_engine(rank_model("fp8_group", **TILE_SHAPE), row_slices=4, expert_layout=LAYOUTS["ep"]).close()


def test_one_kv_head_is_whole_on_every_rank_however_its_tiles_lie() -> None:
    shape = TILE_SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}
    checkpoint = rank_model("fp8_block", **shape)
    expected = answers_of(checkpoint, ASKS, row_slices=2)
    assert answers_of(checkpoint, ASKS, num_ranks=2, row_slices=2) == expected


@pytest.mark.parametrize("kernels", KERNELS)
@every_layout
@pytest.mark.parametrize("weights", ["fp8_channel", "bf16"])
def test_every_kernel_set(kernels: str, layout: str, weights: Weights) -> None:
    require_kernels(kernels)
    changes = {
        "kernels": getattr(abi, f"KERNELS_{kernels.upper()}"),
        "row_slices": 2,
        "expert_layout": LAYOUTS[layout],
    }
    expected = answers_of(rank_model(weights), ASKS, **changes)
    assert answers_of(rank_model(weights), ASKS, chunk=9, num_ranks=2, **changes) == expected


@pytest.mark.threads
@pytest.mark.parametrize(("num_ranks", "row_slices"), SLICED_RANKS)
@pytest.mark.parametrize("sharding", ["replicated", "sharded"])
def test_numbers_of_ranks_that_are_odd_or_large(num_ranks: int, row_slices: int, sharding: str) -> None:
    """One rank with the same slices reduces them by the same tree, also where that is not full."""
    shape = {
        "num_attention_heads": 2 * num_ranks,
        "num_key_value_heads": num_ranks,
        "vocab_size": 90 * num_ranks,
        "intermediate_size": 4 * row_slices,
        "moe_intermediate_size": 2 * row_slices,
    }
    checkpoint = rank_model("fp8_channel", **shape)
    expected = answers_of(checkpoint, ASKS, row_slices=row_slices)
    ranks = {
        "num_ranks": num_ranks,
        "row_slices": row_slices,
        "sequence_parallel": SHARDING[sharding],
    }
    assert answers_of(checkpoint, ASKS, **ranks) == expected


def test_a_long_context_crosses_attention_splits() -> None:
    ask = make_ask(random_prompt(19, 1060), 3)
    (expected,) = answers_of(rank_model(), [ask], row_slices=ROW_SLICES)
    for sharding in SHARDING.values():
        ranks = {"num_ranks": 4, "row_slices": ROW_SLICES, "sequence_parallel": sharding}
        assert answers_of(rank_model(), [ask], chunk=600, **ranks) == [expected]
