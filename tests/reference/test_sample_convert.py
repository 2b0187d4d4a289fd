"""The conversion of the sample model: roundings against torch, weights as torch rounds them, logits against Llama."""

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

from glint.sample.convert import (
    SampleDtype,
    StoredTensor,
    model_config,
    model_tensors,
    round_to_bf16,
    round_to_e4m3,
    tokenizer_documents,
    write_safetensors,
)
from glint.sample.gguf import GgufFile
from glint.sample.model import convert_gguf
from tests.pure.sample_source import sample_gguf, silent
from tests.pure.test_sample_convert import bit_patterns

__all__ = ["sample_gguf"]

TEXT = "The capital of France is Paris, and 1234 people live there.\ndef main():\n    print('x')\n 世界 😀 é"


def test_bf16_rounding_is_that_of_torch() -> None:
    values = bit_patterns()
    expected = torch.from_numpy(values).to(torch.bfloat16)
    found = torch.from_numpy(round_to_bf16(values).view(np.int16)).view(torch.bfloat16)
    is_nan = np.isnan(values)
    assert torch.equal(found[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))
    assert found[is_nan].isnan().all()


def test_e4m3_rounding_is_that_of_torch() -> None:
    values = bit_patterns()
    inside = values[np.abs(values) <= 448]
    expected = torch.from_numpy(inside).to(torch.float8_e4m3fn).view(torch.uint8)
    np.testing.assert_array_equal(round_to_e4m3(inside), expected.numpy())


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_folder_holds_the_weights_as_torch_rounds_them(
    sample_gguf: Path, tmp_path: Path, dtype: SampleDtype
) -> None:
    convert_gguf(sample_gguf, tmp_path, dtype, silent)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = {name: value for name, value in stored.items() if ".layers.30." not in name}
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
