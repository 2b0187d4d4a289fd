"""A folder of the real GLM-4.7-FP8 layout: 93 files, true headers, data areas of true length as holes."""

import re
from pathlib import Path

import pytest

from glint.checkpoint.layout import Part
from glint.checkpoint.placement import ExpertLayout
from glint.checkpoint.rank_memory import RankMemory, measure_rank
from glint.checkpoint.report import format_bytes, run_check
from glint.checkpoint.table import Checkpoint, open_checkpoint
from tests.pure.checkpoint_files import GLM_47, make_specs, quantization, spec_bytes, write_folder

MAIN_BYTES = 354.90e9
MAIN_PARAMETERS = 352_797_829_024
FILE_BYTES = 362.06e9
DOCUMENT = GLM_47 | {"quantization_config": quantization("channel")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder, written once."""
    specs = make_specs(DOCUMENT, has_mtp=True)
    return write_folder(tmp_path_factory.mktemp("glm") / "GLM-4.7-FP8", DOCUMENT, specs, num_shards=93)


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    """The model folder, read once."""
    return open_checkpoint(folder)


def bytes_of_swiglu(width: int, ranks: int) -> int:
    """FP8 gate, up and down with an F32 scale per output channel, `width` cut into `ranks` parts."""
    return 3 * width * 5120 // ranks + 4 * (2 * width // ranks + 5120)


def bytes_of_rank(ranks: int, layout: ExpertLayout) -> int:
    """One rank's weight bytes of GLM-4.7-FP8, counted from the shapes of its published config alone."""
    query, kv, hidden = 96 * 128, 8 * 128, 5120
    inputs = (query + 2 * kv) // ranks
    attention = inputs * (hidden + 4 + 2) + hidden * query // ranks + 4 * hidden
    norms = 2 * (2 * hidden + 2 * 128)
    routed = 160 * bytes_of_swiglu(1536, ranks) if layout == "tp" else 160 // ranks * bytes_of_swiglu(1536, 1)
    experts = routed + bytes_of_swiglu(1536, ranks) + 160 * (2 * hidden + 4)
    vocabulary = 2 * 151552 * hidden + 2 * 151552 // ranks * hidden
    return 92 * (attention + norms) + 3 * bytes_of_swiglu(12288, ranks) + 89 * experts + 2 * hidden + vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "ep"])
def test_the_check_finds_the_published_sizes(folder: Path, layout: ExpertLayout) -> None:
    text, is_usable = run_check(folder, 8, layout)
    assert is_usable, text
    files = re.search(r"weight files +(\d+), ([\d.]+) GB", text)
    assert files is not None and files[1] == "93"
    assert float(files[2]) == pytest.approx(FILE_BYTES / 1e9, rel=1e-3)
    assert "88,542, 362.05 GB" in text
    assert "KV cache          47,104 bytes per token in BF16 (1 of 8 key/value heads)" in text
    cells = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert cells["weights"].endswith(" " + format_bytes(bytes_of_rank(8, layout)))
    placed = "rows  28,480 of 192 x 5120" if layout == "tp" else "experts  3,560 of 1536 x 5120"
    expected = f"expert gate, up  F8_E4M3  28,480 of 1536 x 5120  {placed}  28.00 GB (26.07 GiB)"
    assert re.sub("  +", "  ", cells["expert gate, up"]).strip() == expected


@pytest.mark.parametrize("layout", ["tp", "ep"])
@pytest.mark.parametrize("ranks", [8, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2, 4))])
def test_a_rank_of_the_real_model_has_the_bytes_of_the_published_shapes(
    checkpoint: Checkpoint, ranks: int, layout: ExpertLayout
) -> None:
    plan = measure_rank(checkpoint.config, checkpoint.tensors, ranks, layout)
    assert plan.weight_bytes == bytes_of_rank(ranks, layout)
    assert plan.kv_bytes_per_token == 2 * 92 * (8 // ranks) * 128 * 2


def shares(plan: RankMemory) -> dict[str, tuple[int, int, int]]:
    """Tensors on a rank and their rows and columns, by kind."""
    placed = {kind.name: (kind.rank_count, kind.share) for kind in plan.kinds}
    return {name: (count, share.row_count, share.col_count) for name, (count, share) in placed.items() if share}


def test_a_rank_of_eight_has_the_published_shapes(checkpoint: Checkpoint) -> None:
    sliced = shares(measure_rank(checkpoint.config, checkpoint.tensors, 8, "tp"))
    whole = shares(measure_rank(checkpoint.config, checkpoint.tensors, 8, "ep"))
    assert sliced["query"] == (92, 12 * 128, 5120)
    assert sliced["output"] == (92, 5120, 12 * 128)
    assert sliced["key, value"] == (2 * 92, 1 * 128, 5120)
    assert sliced["dense down"] == (3, 5120, 1536)
    assert sliced["shared down"] == (89, 5120, 192)
    assert sliced["lm_head"] == (1, 18944, 5120)
    assert sliced["embedding"] == (1, 151552, 5120)
    assert sliced["expert down"] == (89 * 160, 5120, 192)
    assert whole["expert down"] == (89 * 20, 5120, 1536)
    assert sliced.keys() == whole.keys()
    assert {name for name in sliced if sliced[name] != whole[name]} == {
        "expert gate, up",
        "expert gate, up scale",
        "expert down",
        "expert down scale",
    }


@pytest.mark.slow
def test_sixteen_ranks_duplicate_the_key_and_value_heads(folder: Path) -> None:
    text, is_usable = run_check(folder, 16, "ep")
    assert is_usable, text
    assert "47,104 bytes per token in BF16 (1 of 8 key/value heads, each on 2 ranks)" in text


def test_the_main_model_has_the_published_bytes_and_the_mtp_layer_is_apart(checkpoint: Checkpoint) -> None:
    parameters = sum(entry.rows * entry.cols for entry in checkpoint.tensors if entry.part is not Part.SCALE)
    assert parameters == MAIN_PARAMETERS
    used = sum(entry.byte_count for entry in checkpoint.tensors)
    assert used == pytest.approx(MAIN_BYTES, rel=1e-3)
    specs = make_specs(DOCUMENT, has_mtp=True)
    assert not checkpoint.skipped
    assert len(checkpoint.mtp_tensors) == sum(".layers.92." in name for name in specs)
    assert len(checkpoint.tensors) + len(checkpoint.mtp_tensors) == len(specs)
    assert used + sum(entry.byte_count for entry in checkpoint.mtp_tensors) == sum(map(spec_bytes, specs.values()))
    assert checkpoint.tensor_array().nbytes == 64 * len(checkpoint.tensors)
