"""The memory plan and the report of `glint check`, on small model folders."""

from pathlib import Path

import pytest

from glint.checkpoint.placement import ExpertLayout
from glint.checkpoint.rank_memory import RankMemory, measure_rank
from glint.checkpoint.report import format_bytes, run_check
from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.errors import CheckpointError
from tests.pure.checkpoint_files import SMALL, make_specs, small_folder, spec_bytes, write_folder
from tests.reference.checkpoints import Weights, make_checkpoint

LAYOUTS: tuple[ExpertLayout, ...] = ("tp", "ep")


def plan_of(checkpoint: Checkpoint, ranks: int, layout: ExpertLayout = "tp") -> RankMemory:
    """The plan of a folder that was read."""
    return measure_rank(checkpoint.config, checkpoint.tensors, ranks, layout)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_holds_everything_and_tied_embeddings_once(
    is_tied: bool, layout: ExpertLayout, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path, tie_word_embeddings=is_tied))
    plan = plan_of(checkpoint, 1, layout)
    specs = make_specs(SMALL | {"tie_word_embeddings": is_tied})
    assert plan.weight_bytes == sum(map(spec_bytes, specs.values()))
    assert sum(kind.count for kind in plan.kinds) == len(specs) + is_tied


def test_a_tied_lm_head_is_a_slice_of_the_embedding_that_takes_no_bytes(tmp_path: Path) -> None:
    tied = {
        kind.name: kind for kind in plan_of(open_checkpoint(small_folder(tmp_path, tie_word_embeddings=True)), 2).kinds
    }
    assert tied["lm_head"].is_view and not tied["embedding"].is_view
    assert tied["lm_head"].share == (0, 48, 0, 192)
    assert (tied["lm_head"].rank_bytes, tied["embedding"].rank_bytes) == (0, 96 * 192 * 2)


def test_whole_experts_take_the_same_room_as_slices_without_scales(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path))
    sliced, whole = (plan_of(checkpoint, 2, layout) for layout in LAYOUTS)
    assert [kind.rank_bytes for kind in sliced.kinds] == [kind.rank_bytes for kind in whole.kinds]


def test_kv_heads_are_split_and_then_duplicated(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path))
    plans = {ranks: plan_of(checkpoint, ranks) for ranks in (1, 2, 4)}
    assert {ranks: (plan.kv_heads, plan.kv_copies) for ranks, plan in plans.items()} == {
        1: (2, 1),
        2: (1, 1),
        4: (1, 2),
    }
    assert {ranks: plan.kv_bytes_per_token for ranks, plan in plans.items()} == {1: 384, 2: 192, 4: 192}


def test_a_model_that_does_not_split_has_no_plan_and_all_reasons(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        plan_of(checkpoint, 7)
    assert len(caught.value.problems) == 6


def test_no_ranks_are_refused(tmp_path: Path) -> None:
    text, is_usable = run_check(small_folder(tmp_path), 0, "tp")
    assert not is_usable and "  1. a model cannot be split over 0 ranks; choose --tp 1 or more\n" in text


def test_the_report_shows_what_goes_where(tmp_path: Path) -> None:
    text, is_usable = run_check(small_folder(tmp_path, "channel", tie_word_embeddings=True), 2, "ep")
    assert is_usable and text.endswith("No problems.\n")
    table = text[text.index("Memory plan for each of 2 ranks, experts by ep\n") :].splitlines()[1:]
    rows = {cells[0]: cells[1:] for cells in (line.strip().split("  ") for line in map(squeeze, table)) if cells[1:]}
    assert rows["tensors"] == ["type", "in the model", "split by", "on a rank", "bytes on a rank"]
    assert rows["embedding"] == ["BF16", "1 of 96 x 192", "whole", "1 of 96 x 192", "36,864 bytes"]
    assert rows["query"] == ["F8_E4M3", "3 of 128 x 192", "rows", "3 of 64 x 192", "36,864 bytes"]
    assert rows["query bias"] == ["BF16", "3 of 128 x 1", "rows", "3 of 64 x 1", "384 bytes"]
    assert rows["output"] == ["F8_E4M3", "3 of 192 x 128", "columns", "3 of 192 x 64", "36,864 bytes"]
    assert rows["output scale"] == ["F32", "3 of 192 x 1", "whole", "3 of 192 x 1", "2,304 bytes"]
    assert rows["expert down"] == ["F8_E4M3", "8 of 192 x 160", "experts", "4 of 192 x 160", "122,880 bytes"]
    assert rows["lm_head"] == ["BF16", "1 of 96 x 192", "rows", "1 of 48 x 192", "in the embedding"]
    assert rows["KV cache"] == ["192 bytes per token in BF16 (1 of 2 key/value heads)"]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("bf16", "not quantised"),
        ("fp8_block", "FP8 E4M3, one scale per token"),
        ("fp8_group", "FP8 E4M3, one scale per token and group of 128; on the CPU only"),
        ("fp8_method", "FP8 E4M3, one scale per token and group of 128; on the CPU only"),
    ],
)
def test_the_report_shows_how_activations_are_quantised(tmp_path: Path, weights: Weights, expected: str) -> None:
    text, is_usable = run_check(make_checkpoint(tmp_path, "tied", weights), 1, "tp")
    assert is_usable and f"  activations       {expected}\n" in text


def squeeze(line: str) -> str:
    """A line of a table with two spaces between its cells."""
    while "   " in line:
        line = line.replace("   ", "  ")
    return line


def test_the_report_shows_the_mtp_layer_and_what_it_takes(tmp_path: Path) -> None:
    specs = make_specs(SMALL, has_mtp=True)
    mtp = {name: spec for name, spec in specs.items() if ".layers.3." in name}
    text, is_usable = run_check(write_folder(tmp_path / "copies", SMALL, specs), 1, "tp")
    assert is_usable and f"MTP layer         {len(mtp)}, {format_bytes(sum(map(spec_bytes, mtp.values())))}" in text
    assert "and 128 bytes of KV cache per token more" in text and "less where its embedding and head equal" in text
    bare = {name: spec for name, spec in specs.items() if "shared_head.head" not in name and "3.embed" not in name}
    text, _ = run_check(write_folder(tmp_path / "bare", SMALL, bare), 2, "tp")
    assert "and 64 bytes of KV cache per token more" in text and "less where" not in text
    assert "drafts among" not in text
    few = SMALL | {"mtp_vocab_size": 7}
    text, _ = run_check(write_folder(tmp_path / "few", few, bare), 1, "tp")
    assert "drafts among the first 7 tokens on the CPU, among all on GPUs" in text
    assert "MTP" not in run_check(write_folder(tmp_path / "without", SMALL, make_specs(SMALL)), 1, "tp")[0]


def test_the_report_shows_notes_and_numbered_problems(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model", "channel")
    (folder / "other.safetensors").write_bytes(b"")
    text, is_usable = run_check(folder, 3, "tp")
    assert not is_usable and "Memory plan" not in text
    assert "Notes (1)\n  1. other.safetensors is ignored" in text
    assert "  1. num_attention_heads 8 cannot be split over 3 ranks" in text
    text, is_usable = run_check(tmp_path / "absent", 1, "tp")
    assert not is_usable and "Problems (1)" in text


def test_problems_of_the_folder_and_of_the_split_are_listed_together(tmp_path: Path) -> None:
    document = SMALL | {"quantization_config": None}
    specs = make_specs(document)
    del specs["model.layers.2.mlp.experts.1.up_proj.weight"]
    folder = write_folder(tmp_path, document, specs)
    text, is_usable = run_check(folder, 8, "ep")
    assert not is_usable and "Problems (2)" in text
    assert "experts.1.up_proj.weight is missing" in text and "n_routed_experts 4 cannot be split over 8" in text
    text, is_usable = run_check(folder, 2, "ep")
    assert not is_usable and "Problems (1)" in text and "Memory plan for each of 2 ranks" in text


def test_ranks_without_any_tensor_of_a_kind_are_shown_so(tmp_path: Path) -> None:
    document = SMALL | {"quantization_config": None}
    lost = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight" for layer in (1, 2) for expert in (0, 1)]
    specs = {name: spec for name, spec in make_specs(document).items() if name not in lost}
    text, is_usable = run_check(write_folder(tmp_path, document, specs), 2, "ep")
    assert not is_usable and "Problems (4)" in text
    assert "  expert down BF16 4 of 192 x 160 experts none 0 bytes" in "\n".join(
        "  " + " ".join(line.split()) for line in text.splitlines()
    )
