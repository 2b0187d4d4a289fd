"""The MTP layer of the sample model: there or not there, cut into experts, rounded like the other layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from glint.checkpoint.table import open_checkpoint
from glint.errors import CheckpointError
from glint.sample import model as sample
from glint.sample import mtp
from glint.sample.convert import SampleDtype, StoredTensor, write_safetensors
from glint.sample.model import convert_gguf
from tests.pure.sample_source import sample_gguf, silent
from tests.reference.numpy_model import read_tensors
from tests.reference.numpy_ops import bf16_bits, decode_e4m3, encode_e4m3, round_bf16

__all__ = ["sample_gguf"]

LAYER = "model.layers.30"
SHAPES = {
    "enorm.weight": (576,),
    "hnorm.weight": (576,),
    "eh_proj.weight": (576, 1152),
    "shared_head.norm.weight": (576,),
    "input_layernorm.weight": (576,),
    "post_attention_layernorm.weight": (576,),
    "self_attn.q_proj.weight": (576, 576),
    "self_attn.k_proj.weight": (192, 576),
    "self_attn.v_proj.weight": (192, 576),
    "self_attn.o_proj.weight": (576, 576),
    "mlp.gate_proj.weight": (1536, 576),
    "mlp.up_proj.weight": (1536, 576),
    "mlp.down_proj.weight": (576, 1536),
}


def write_layer(path: Path, seed: int = 0, without: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """A random layer in a file as the training writes it, and its values."""
    source = np.random.default_rng(seed)
    values = {
        f"{LAYER}.{name}": round_bf16(source.normal(size=shape).astype(np.float32))
        for name, shape in SHAPES.items()
        if name != without
    }
    stored = {name: StoredTensor("BF16", bf16_bits(value)) for name, value in values.items()}
    write_safetensors(path, stored, lambda done, total: None)
    return values


@pytest.fixture
def layer_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A place for the layer of the package, empty at first."""
    path = tmp_path / "mtp.safetensors"
    monkeypatch.setattr(sample, "mtp_digest", lambda: mtp.mtp_digest(path))
    monkeypatch.setattr(sample, "mtp_tensors", lambda layer, head: mtp.mtp_tensors(layer, head, path))
    return path


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_layer_is_a_layer_of_the_folder(
    sample_gguf: Path, tmp_path: Path, layer_file: Path, dtype: SampleDtype
) -> None:
    values = write_layer(layer_file)
    folder = tmp_path / "made"
    folder.mkdir()
    convert_gguf(sample_gguf, folder, dtype, silent)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.mtp_tensors
    assert checkpoint.config.mtp_vocab_size == mtp.MTP_VOCAB_SIZE < checkpoint.config.vocab_size
    loaded = {name: value for name, value in read_tensors(folder).items() if name.startswith(f"{LAYER}.")}
    np.testing.assert_array_equal(loaded[f"{LAYER}.eh_proj.weight"], values[f"{LAYER}.eh_proj.weight"])
    for part, axis in (("gate", 0), ("up", 0), ("down", 1)):
        experts = [*(f"experts.{expert}" for expert in range(7)), "shared_experts"]
        names = [f"{LAYER}.mlp.{expert}.{part}_proj.weight" for expert in experts]
        whole = values[f"{LAYER}.mlp.{part}_proj.weight"]
        for name, piece in zip(names, np.split(whole, 8, axis), strict=True):
            if dtype == "bf16":
                np.testing.assert_array_equal(loaded[name], piece)
                continue
            scale = np.abs(piece).max(axis=1, keepdims=True) / np.float32(448)
            np.testing.assert_array_equal(loaded[f"{name}_scale"], scale)
            np.testing.assert_array_equal(loaded[name], encode_e4m3(piece / scale))
    query = loaded[f"{LAYER}.self_attn.q_proj.weight"]
    if dtype == "fp8":
        query = decode_e4m3(query) * loaded[f"{LAYER}.self_attn.q_proj.weight_scale"]
    np.testing.assert_allclose(query, values[f"{LAYER}.self_attn.q_proj.weight"], rtol=0, atol=0.2)
    head = f"{LAYER}.shared_head.head.weight"
    assert (head in loaded) == (dtype == "fp8")
    if dtype == "fp8":
        embedding = read_tensors(folder)["model.embed_tokens.weight"]
        largest = np.abs(embedding).max(axis=1, keepdims=True)
        error = np.abs(decode_e4m3(loaded[head]) * loaded[f"{head}_scale"] - embedding)
        assert 0 < error.max() and np.all(error <= largest / 24)


def test_without_the_file_the_model_has_no_layer(sample_gguf: Path, tmp_path: Path, layer_file: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    convert_gguf(sample_gguf, folder, "fp8", silent)
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.mtp_tensors and checkpoint.config.mtp_vocab_size == checkpoint.config.vocab_size
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_folder_of_another_layer_is_made_anew(tmp_path: Path, layer_file: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    records = []
    for seed in (None, 0, 1):
        if seed is not None:
            write_layer(layer_file, seed)
        records.append(sample._record("fp8", {}))
        sample._write_json(folder / sample.RECORD_NAME, records[-1])
        assert sample._is_finished(folder, "fp8")
    assert [sample._record("fp8", {}) == record for record in records] == [False, False, True]


def test_files_that_are_not_the_layer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mtp.safetensors"
    write_layer(path, without="mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"has no model.layers.30.mlp.up_proj.weight; write it anew"):
        list(mtp.mtp_tensors(30, None, path))
    save_file({f"{LAYER}.eh_proj.weight": np.zeros(4, np.float32)}, path)
    with pytest.raises(CheckpointError, match="is F32, BF16 is needed"):
        list(mtp.mtp_tensors(30, None, path))


@pytest.mark.skipif(not mtp.MTP_FILE.is_file(), reason="the package has no trained layer")
def test_the_packaged_layer_is_whole() -> None:
    names = {name for name, _ in mtp.mtp_tensors(30, None)}
    assert {f"{LAYER}.{name}" for name in SHAPES if not name.startswith("mlp.")} < names
    assert all(np.isfinite(values).all() for _, values in mtp.mtp_tensors(30, None))
