"""The random checkpoints: read back by safetensors and transformers, the same every time, and lively."""

import json
from pathlib import Path

import pytest
import safetensors
import torch
import transformers

from tests.reference import transformers_reference as reference
from tests.reference.checkpoints import FAMILIES, WEIGHTS, Family, Weights, make_checkpoint, make_prompts
from tests.reference.expected import digest_folder
from tests.reference.shapes import SHAPES


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by the official reader."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_checkpoints_hold_the_bf16_ones_values(tmp_path: Path, family: Family) -> None:
    plain = read_tensors(make_checkpoint(tmp_path / "bf16", family, "bf16"))
    for weights in WEIGHTS[1:]:
        folder = make_checkpoint(tmp_path / weights, family, weights)
        raw = read_tensors(folder)
        scaled = {name.removesuffix("_scale") for name in raw if name.endswith("_scale")}
        assert scaled == {name for name in plain if name.endswith("_proj.weight")}
        assert all(raw[name].dtype == torch.float8_e4m3fn for name in scaled)
        values = reference.read_checkpoint(folder).values
        assert set(values) == set(plain)
        for name, tensor in plain.items():
            spread = tensor.double().abs().max()
            assert (values[name] - tensor.double()).abs().max() <= 0.04 * spread, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["bf16", "fp8_block"])
def test_transformers_reads_the_config_as_meant(tmp_path: Path, family: Family, weights: Weights) -> None:
    folder = make_checkpoint(tmp_path, family, weights)
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("quantization_config", None)
    config = transformers.Glm4MoeConfig.from_dict(fields)
    shape = SHAPES[family]
    assert config.rope_parameters["rope_theta"] == shape.rope_theta
    assert config.rope_parameters["partial_rotary_factor"] == shape.partial_rotary_factor
    assert (config.n_group, config.topk_group) == (1, 1)
    for name in ("head_dim", "routed_scaling_factor", "use_qk_norm", "attention_bias"):
        assert getattr(config, name) == getattr(shape, name), name
    assert config.dtype == torch.bfloat16


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    digests = [
        digest_folder(make_checkpoint(tmp_path / str(index), "tied", "fp8_block", seed))
        for index, seed in enumerate((0, 0, 1))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_overrides_reach_config_and_tensors(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "tied", "fp8_channel", num_hidden_layers=3, vocab_size=300)
    tensors = read_tensors(folder)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    assert tensors["model.embed_tokens.weight"].shape[0] == 300
    assert not any(name.startswith("model.layers.3.") for name in tensors)


def test_tile_scales_cover_partial_tiles(tmp_path: Path) -> None:
    tensors = read_tensors(make_checkpoint(tmp_path, "air", "fp8_block"))
    scale = tensors["model.layers.1.mlp.experts.0.down_proj.weight_scale"]
    assert scale.shape == (2, 2)
    assert len(scale.unique()) == 4


def test_prompts_are_within_the_vocabulary() -> None:
    prompts = make_prompts(50)
    assert [len(prompt) for prompt in prompts] == [1, 7, 16, 33, 60]
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
