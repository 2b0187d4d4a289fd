"""Rows cut in slices: the same numbers in another order, in both expert layouts, also where the expert width is odd."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from glint import LLM, SamplingParams
from glint.checkpoint.table import open_checkpoint
from tests.reference.checkpoints import make_checkpoint, make_prompts

Layout = Literal["tp", "ep"]
Answers = list[list[dict[int, float]]]
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 checkpoint whose expert width no slice count divides."""
    changes = {"moe_intermediate_size": 129, "n_shared_experts": 2, "n_routed_experts": 10}
    return make_checkpoint(tmp_path_factory.mktemp("odd") / "model", "air", "bf16", **changes)


@cache
def answers(folder: Path, layout: Layout, row_slices: int, max_step_tokens: int) -> Answers:
    """Log-probabilities of greedy answers to all prompts at once."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    with LLM(
        folder,
        skip_tokenizer=True,
        kernels="exact",
        expert_layout=layout,
        row_slices=row_slices,
        max_step_tokens=max_step_tokens,
    ) as llm:
        prompts = make_prompts(open_checkpoint(folder).config.vocab_size)
        results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    return [result.logprobs or [] for result in results]


@pytest.mark.parametrize(("layout", "row_slices"), [("ep", 1), ("ep", 2)])
def test_slices_change_the_order_only(folder: Path, layout: Layout, row_slices: int) -> None:
    whole = answers(folder, "tp", 1, 128)
    for expected, got in zip(whole, answers(folder, layout, row_slices, 128), strict=True):
        assert [list(position) for position in expected] == [list(position) for position in got]
        for first, second in zip(expected, got, strict=True):
            assert first == pytest.approx(second, abs=TOLERANCE)


def test_a_full_step_of_sliced_rows_equals_small_ones(folder: Path) -> None:
    assert answers(folder, "ep", 2, 128) == answers(folder, "ep", 2, 16)
