"""A folder of the real GLM-4.7-FP8 layout: 93 files, true headers, data areas of true length as holes."""

import re
import time
from pathlib import Path

import pytest

from glint.checkpoint.report import run_check
from glint.checkpoint.table import open_checkpoint
from tests.pure.checkpoint_files import GLM_47, make_specs, quantization, spec_bytes, write_folder

MAIN_BYTES = 354.90e9
FILE_BYTES = 362.06e9
DOCUMENT = GLM_47 | {"quantization_config": quantization("channel")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder, written once."""
    specs = make_specs(DOCUMENT, has_mtp=True)
    return write_folder(tmp_path_factory.mktemp("glm") / "GLM-4.7-FP8", DOCUMENT, specs, num_shards=93)


def test_the_check_takes_seconds_and_finds_the_published_sizes(folder: Path) -> None:
    start = time.monotonic()
    text, is_usable = run_check(folder, 8, "tp")
    assert time.monotonic() - start < 20
    assert is_usable, text
    files = re.search(r"weight files +(\d+), ([\d.]+) GB", text)
    assert files is not None and files[1] == "93"
    assert float(files[2]) == pytest.approx(FILE_BYTES / 1e9, rel=1e-3)
    assert "88,542, 362.05 GB" in text
    assert "KV cache          47,104 bytes per token" in text


def test_the_main_model_has_the_published_bytes_and_the_mtp_layer_is_skipped(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    used = sum(entry.byte_count for entry in checkpoint.tensors)
    assert used == pytest.approx(MAIN_BYTES, rel=1e-3)
    specs = make_specs(DOCUMENT, has_mtp=True)
    assert len(checkpoint.tensors) + len(checkpoint.skipped) == len(specs)
    assert {tensor.name for tensor in checkpoint.skipped} == {name for name in specs if ".layers.92." in name}
    assert used + sum(tensor.byte_count for tensor in checkpoint.skipped) == sum(map(spec_bytes, specs.values()))
    assert checkpoint.tensor_array().nbytes == 64 * len(checkpoint.tensors)
