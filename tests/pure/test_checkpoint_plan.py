"""The memory plan: arithmetic checked against NumPy slices of the same tensors and the published totals."""

from pathlib import Path

import numpy as np
import pytest

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.layout import Part, Role
from glint.checkpoint.plan import ExpertLayout, plan_memory
from glint.checkpoint.report import run_check
from glint.checkpoint.table import Checkpoint, TableEntry, open_checkpoint
from glint.errors import CheckpointError
from tests.pure.checkpoint_files import small_folder

ROW_ROLES = {Role.QUERY, Role.KEY, Role.VALUE, Role.GATE, Role.UP, Role.SHARED_GATE, Role.SHARED_UP}
VOCABULARY = {Role.EMBEDDING, Role.LM_HEAD}
COL_ROLES = {Role.OUTPUT, Role.DOWN, Role.SHARED_DOWN}


def slice_bytes(entry: TableEntry, weight: TableEntry, rank: int, ranks: int) -> int:
    """Count the bytes of one rank's slice by slicing an array of scale coordinates per weight element."""
    rows, cols = np.indices((weight.rows, weight.cols))
    split_rows = entry.role in ROW_ROLES | VOCABULARY
    size = weight.rows if split_rows else weight.cols
    piece = slice(rank * size // ranks, (rank + 1) * size // ranks)
    selection = (piece, slice(None)) if split_rows else (slice(None), piece)
    is_tiled = entry.part is Part.SCALE and (entry.cols > 1 or entry.rows not in (1, weight.rows))
    row_step = 128 if is_tiled else weight.rows // entry.rows
    col_step = 128 if is_tiled else weight.cols // entry.cols
    touched = set(zip((rows[selection] // row_step).flat, (cols[selection] // col_step).flat, strict=True))
    return len(touched) * entry.byte_count // (entry.rows * entry.cols)


def expected_bytes(checkpoint: Checkpoint, ranks: int) -> int:
    """Give the largest rank's weight bytes with sliced experts."""
    weights = {
        (entry.role, entry.layer, entry.expert): entry for entry in checkpoint.tensors if entry.part is Part.WEIGHT
    }
    cache: dict[tuple[int, ...], int] = {}
    total = 0
    for entry in checkpoint.tensors:
        if entry.role not in ROW_ROLES | COL_ROLES | VOCABULARY:
            total += entry.byte_count
            continue
        weight = weights[(entry.role, entry.layer, entry.expert)]
        if entry.part is Part.BIAS:
            total += entry.byte_count // ranks
            continue
        key = (entry.role, entry.part, entry.rows, entry.cols, weight.rows, weight.cols)
        if key not in cache:
            cache[key] = max(slice_bytes(entry, weight, rank, ranks) for rank in range(ranks))
        total += cache[key]
    return total


@pytest.mark.parametrize("strategy", [None, "channel", "tensor", "block"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_bytes_are_those_of_the_slices(strategy: str | None, ranks: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path, strategy))
    plan = plan_memory(checkpoint.config, checkpoint.tensors, ranks, "tp")
    assert not plan.problems
    assert plan.weight_bytes == expected_bytes(checkpoint, ranks) == sum(count for _, count in plan.parts)


def test_one_rank_holds_everything_and_tied_embeddings_once(tmp_path: Path) -> None:
    for is_tied in (False, True):
        checkpoint = open_checkpoint(small_folder(tmp_path / str(is_tied), tie_word_embeddings=is_tied))
        layouts: tuple[ExpertLayout, ...] = ("tp", "ep")
        for layout in layouts:
            plan = plan_memory(checkpoint.config, checkpoint.tensors, 1, layout)
            stored = {(entry.file_offset, entry.byte_count) for entry in checkpoint.tensors}
            assert plan.weight_bytes == sum(byte_count for _, byte_count in stored)


def test_whole_experts_take_the_same_room_as_slices_without_scales(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path))
    sliced = dict(plan_memory(checkpoint.config, checkpoint.tensors, 2, "tp").parts)
    whole = dict(plan_memory(checkpoint.config, checkpoint.tensors, 2, "ep").parts)
    assert sliced == whole


def test_kv_heads_are_split_and_then_duplicated(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path))
    plans = {ranks: plan_memory(checkpoint.config, checkpoint.tensors, ranks, "tp") for ranks in (1, 2, 4)}
    assert {ranks: plan.kv_heads for ranks, plan in plans.items()} == {1: 2, 2: 1, 4: 1}
    assert {ranks: plan.kv_bytes_per_token for ranks, plan in plans.items()} == {1: 384, 2: 192, 4: 192}
    assert not plans[4].problems


def problems_at(config: ModelConfig, ranks: int, layout: ExpertLayout) -> str:
    return "\n".join(plan_memory(config, (), ranks, layout).problems)


def test_sizes_that_do_not_divide_are_named(tmp_path: Path) -> None:
    config = open_checkpoint(small_folder(tmp_path)).config
    for name in ("num_attention_heads 8", "intermediate_size 320", "moe_intermediate_size 160", "vocab_size 96"):
        assert f"{name} cannot be split over 7 ranks" in problems_at(config, 7, "tp")
    assert "num_key_value_heads 2 can neither" in problems_at(config, 3, "tp")
    assert "n_routed_experts 4 cannot be split over 8 ranks" in problems_at(config, 8, "ep")
    assert "n_routed_experts" not in problems_at(config, 8, "tp")
    assert "moe_intermediate_size" not in problems_at(config, 7, "ep")


def test_no_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--tp 1 or more"):
        run_check(small_folder(tmp_path), 0, "tp")


def test_the_report_shows_plan_notes_and_numbered_problems(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model", "channel")
    text, is_usable = run_check(folder, 2, "ep")
    assert is_usable and text.endswith("No problems.\n")
    assert "Memory plan for each of 2 ranks, experts by ep" in text
    (folder / "other.safetensors").write_bytes(b"")
    text, is_usable = run_check(folder, 3, "tp")
    assert not is_usable
    assert "Notes (1)\n  1. other.safetensors is ignored" in text
    assert "  1. num_attention_heads 8 cannot be split over 3 ranks" in text
    text, is_usable = run_check(tmp_path / "absent", 1, "tp")
    assert not is_usable and "Problems (1)" in text
