"""The conversion of the sample model: roundings against NumPy sentences, files against safetensors.

tests/reference/test_sample_convert.py holds both to torch, and the logits to Llama's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize

from glint.checkpoint.config import read_config, read_generation
from glint.checkpoint.table import open_checkpoint
from glint.sample.convert import (
    DATA_ALIGNMENT,
    SampleDtype,
    StoredTensor,
    model_tensors,
    quantise_rows,
    round_to_bf16,
    round_to_e4m3,
    write_safetensors,
)
from glint.sample.gguf import GgufFile
from glint.sample.model import convert_gguf
from tests.pure.sample_source import sample_gguf, silent
from tests.reference.numpy_model import read_tensors
from tests.reference.numpy_ops import bf16_bits, decode_e4m3, encode_e4m3, round_bf16

__all__ = ["sample_gguf"]


def bit_patterns() -> np.ndarray[Any, Any]:
    """Float32 values that cover every exponent, all ties of both formats, and many random mantissas."""
    random = np.random.default_rng(3)
    bits = random.integers(0, 2**32, 400_000, dtype=np.uint32)
    ties = np.arange(0, 2**32, 2**15, dtype=np.uint64).astype(np.uint32)
    around = np.concatenate([bits, ties, ties + 1, ties - 1])
    values = around.view(np.float32)
    small = random.normal(size=200_000).astype(np.float32) * np.float32(0.02)
    return np.concatenate([values, small, -small])


def test_bf16_rounding_is_that_of_numpy() -> None:
    values = bit_patterns()
    is_nan = np.isnan(values)
    is_finite = np.isfinite(values)
    found = round_to_bf16(values)
    np.testing.assert_array_equal(found[is_finite], bf16_bits(values[is_finite]))
    assert ((found[is_nan] & 0x7FFF) > 0x7F80).all() and is_nan.any()
    np.testing.assert_array_equal(round_to_bf16(np.array([np.inf, -np.inf], np.float32)), [0x7F80, 0xFF80])


def test_e4m3_rounding_is_that_of_numpy() -> None:
    values = bit_patterns()
    inside = values[np.abs(values) <= 448]
    np.testing.assert_array_equal(round_to_e4m3(inside), encode_e4m3(inside))


def test_e4m3_saturates_and_keeps_nan() -> None:
    values = np.array([449, 464, 500, 1e30, np.inf, -464.5, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(round_to_e4m3(values), [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F])


def test_rows_are_scaled_to_the_largest_code() -> None:
    weights = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    weights[2] = 0
    codes, scales = quantise_rows(weights)
    assert scales.shape == (5, 1) and scales[2, 0] == 1
    np.testing.assert_array_equal(scales[[0, 1, 3, 4], 0], np.abs(weights[[0, 1, 3, 4]]).max(axis=1) / np.float32(448))
    decoded = decode_e4m3(codes) * scales
    assert np.abs(decoded - weights).max() <= np.abs(weights).max() / 448 * 16
    assert (np.abs(codes[[0, 1, 3, 4]] & 0x7F).max(axis=1) == 0x7E).all()


def test_the_writer_is_read_by_safetensors(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    tensors = {
        "odd": StoredTensor("F32", random.normal(size=7).astype(np.float32)),
        "wide": StoredTensor("F32", random.normal(size=(4, 16)).astype(np.float32)),
        "codes": StoredTensor("F8_E4M3", random.integers(0, 120, (3, 64), dtype=np.uint8)),
        "half": StoredTensor("BF16", random.integers(0, 30000, (2, 32), dtype=np.uint16)),
    }
    reports: list[tuple[int, int]] = []
    write_safetensors(tmp_path / "file", tensors, lambda done, total: reports.append((done, total)))
    loaded = dict(deserialize((tmp_path / "file").read_bytes()))
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name]["dtype"], loaded[name]["shape"]) == (tensor.dtype, list(tensor.data.shape))
        assert bytes(loaded[name]["data"]) == tensor.data.tobytes()
    assert reports[-1] == (604, 604) and len(reports) == len(tensors)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_folder_holds_the_weights_as_numpy_rounds_them(
    sample_gguf: Path, tmp_path: Path, dtype: SampleDtype
) -> None:
    convert_gguf(sample_gguf, tmp_path, dtype, silent)
    loaded = {name: value for name, value in read_tensors(tmp_path).items() if ".layers.30." not in name}
    expected_names = set()
    with GgufFile(sample_gguf) as file:
        for name, values in model_tensors(file):
            expected_names.add(name)
            if name.endswith("e_score_correction_bias"):
                np.testing.assert_array_equal(loaded[name], values)
            elif dtype == "fp8" and name.endswith("_proj.weight"):
                scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
                expected_names.add(f"{name}_scale")
                np.testing.assert_array_equal(loaded[f"{name}_scale"], scale)
                np.testing.assert_array_equal(loaded[name], encode_e4m3(values / scale), err_msg=name)
            else:
                np.testing.assert_array_equal(loaded[name], round_bf16(values), err_msg=name)
    assert set(loaded) == expected_names
    check_documents(tmp_path, dtype)


def check_documents(folder: Path, dtype: SampleDtype) -> None:
    """The folder is a checkpoint that glint accepts, aligned for kernels that read in place."""
    config = read_config(folder)
    assert (config.num_layers, config.num_experts, config.experts_per_token) == (30, 7, 7)
    assert (config.rotary_dim, config.norm_epsilon, config.rope_theta) == (64, 1e-5, 1e5)
    assert config.eos_token_ids == (2, 0)
    generation = read_generation(folder)
    assert generation.temperature and generation.repetition_penalty and generation.repetition_penalty > 1
    assert ("quantization_config" in json.loads((folder / "config.json").read_text())) == (dtype == "fp8")
    assert open_checkpoint(folder).config == config
    raw = (folder / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    for name, entry in header.items():
        if name != "__metadata__" and not name.endswith("e_score_correction_bias"):
            assert (8 + header_bytes + entry["data_offsets"][0]) % DATA_ALIGNMENT == 0, name
