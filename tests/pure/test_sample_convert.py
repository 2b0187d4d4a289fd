"""The conversion of the sample model: roundings against torch, files against safetensors, logits against Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from glint.checkpoint.config import read_config, read_generation
from glint.checkpoint.gguf import GgufFile
from glint.checkpoint.sample import convert_gguf
from glint.checkpoint.sample_convert import (
    DATA_ALIGNMENT,
    SampleDtype,
    StoredTensor,
    bf16_codes,
    e4m3_codes,
    model_config,
    model_tensors,
    quantise_rows,
    tokenizer_documents,
    write_safetensors,
)
from glint.checkpoint.table import open_checkpoint
from tests.pure.sample_source import sample_gguf, silent

__all__ = ["sample_gguf"]

TEXT = "The capital of France is Paris, and 1234 people live there.\ndef main():\n    print('x')\n 世界 😀 é"


def bit_patterns() -> np.ndarray[Any, Any]:
    """Float32 values that cover every exponent, all ties of both formats, and many random mantissas."""
    random = np.random.default_rng(3)
    bits = random.integers(0, 2**32, 400_000, dtype=np.uint32)
    ties = np.arange(0, 2**32, 2**15, dtype=np.uint64).astype(np.uint32)
    around = np.concatenate([bits, ties, ties + 1, ties - 1])
    values = around.view(np.float32)
    small = random.normal(size=200_000).astype(np.float32) * np.float32(0.02)
    return np.concatenate([values, small, -small])


def test_bf16_rounding_is_that_of_torch() -> None:
    values = bit_patterns()
    expected = torch.from_numpy(values).to(torch.bfloat16)
    found = torch.from_numpy(bf16_codes(values).view(np.int16)).view(torch.bfloat16)
    is_nan = np.isnan(values)
    assert torch.equal(found[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))
    assert found[is_nan].isnan().all()


def test_e4m3_rounding_is_that_of_torch() -> None:
    values = bit_patterns()
    inside = values[np.abs(values) <= 448]
    expected = torch.from_numpy(inside).to(torch.float8_e4m3fn).view(torch.uint8)
    np.testing.assert_array_equal(e4m3_codes(inside), expected.numpy())


def test_e4m3_saturates_and_keeps_nan() -> None:
    values = np.array([449, 464, 500, 1e30, np.inf, -464.5, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(e4m3_codes(values), [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F])


def test_rows_are_scaled_to_the_largest_code() -> None:
    weights = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    weights[2] = 0
    codes, scales = quantise_rows(weights)
    assert scales.shape == (5, 1) and scales[2, 0] == 1
    np.testing.assert_array_equal(scales[[0, 1, 3, 4], 0], np.abs(weights[[0, 1, 3, 4]]).max(axis=1) / np.float32(448))
    decoded = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy() * scales
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
    loaded = load_file(tmp_path / "file")
    assert set(loaded) == set(tensors)
    assert torch.equal(loaded["odd"], torch.from_numpy(tensors["odd"].data))
    assert torch.equal(loaded["wide"], torch.from_numpy(tensors["wide"].data))
    assert torch.equal(loaded["codes"].view(torch.uint8), torch.from_numpy(tensors["codes"].data))
    assert torch.equal(loaded["half"].view(torch.int16), torch.from_numpy(tensors["half"].data.view(np.int16)))
    assert reports[-1] == (604, 604) and len(reports) == len(tensors)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_folder_holds_the_weights_as_torch_rounds_them(
    sample_gguf: Path, tmp_path: Path, dtype: SampleDtype
) -> None:
    convert_gguf(sample_gguf, tmp_path, dtype, silent)
    loaded = load_file(tmp_path / "model.safetensors")
    expected_names = set()
    with GgufFile(sample_gguf) as file:
        for name, values in model_tensors(file):
            expected_names.add(name)
            source = torch.from_numpy(values)
            if name.endswith("e_score_correction_bias"):
                assert torch.equal(loaded[name], source)
            elif dtype == "fp8" and name.endswith("_proj.weight"):
                scale = source.abs().amax(dim=1, keepdim=True) / 448
                expected_names.add(f"{name}_scale")
                assert torch.equal(loaded[f"{name}_scale"], scale)
                rounded = (source / scale).to(torch.float8_e4m3fn)
                assert torch.equal(loaded[name].view(torch.uint8), rounded.view(torch.uint8)), name
            else:
                assert torch.equal(loaded[name], source.to(torch.bfloat16)), name
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


def llama_model(path: Path) -> Any:
    """The Llama model of the GGUF file, in float32, with transformers' own tensor names and row order."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    with GgufFile(path) as file:
        document = model_config(file, "bf16")
        rotary = {"rope_type": "default", "rope_theta": document["rope_theta"]}
        shared = {name: document[name] for name in names}
        config = transformers.LlamaConfig(**shared, rope_parameters=rotary)
        with torch.device("meta"):
            outline = transformers.LlamaForCausalLM(config)
        processor = LlamaTensorProcessor(config=shared)
        processed = {name: processor.process(file.read(name), name).weights for name in file.tensors}
    llama_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {}
    for name in set(outline.state_dict()) - {"lm_head.weight"}:
        values = processed.pop(f"{llama_names.get_name(name.removesuffix('.weight'))}.weight")
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    assert not processed
    return transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors).eval()


def glm_model(path: Path, folder: Path) -> Any:
    """The converted model before rounding, as transformers reads it, in float32."""
    with GgufFile(path) as file:
        (folder / "config.json").write_text(json.dumps(model_config(file, "bf16")))
        tensors = {name: StoredTensor("F32", values) for name, values in model_tensors(file)}
    write_safetensors(folder / "model.safetensors", tensors, lambda done, total: None)
    return transformers.Glm4MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_logits_are_those_of_the_llama_model(sample_gguf: Path, tmp_path: Path) -> None:
    with GgufFile(sample_gguf) as file:
        for name, document in tokenizer_documents(file).items():
            (tmp_path / name).write_text(json.dumps(document))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = torch.tensor([tokenizer.encode(TEXT, add_special_tokens=False)])
    with torch.no_grad():
        expected = llama_model(sample_gguf)(ids).logits
        found = glm_model(sample_gguf, tmp_path)(ids).logits
    assert expected.abs().max() > 10
    assert (found - expected).abs().max() < 1e-3
