"""Makers of model folders for the tests.

Names, shapes and types are spelled out here from the published checkpoints, apart from glint's own table of them.
Data areas are left as holes of the true length, so that a folder of any size costs only its headers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Spec = tuple[str, tuple[int, ...]]
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ELEMENT_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4, "F16": 2, "U8": 1}

GLM_47: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 151552,
}

SMALL: dict[str, Any] = GLM_47 | {
    "eos_token_id": [1, 2],
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 192,
    "intermediate_size": 320,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 160,
    "n_routed_experts": 4,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 1,
    "vocab_size": 96,
}


def quantization(strategy: str) -> dict[str, Any]:
    """Give a compressed-tensors quantization_config with weight scales by channel, tensor or block."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True, "actorder": None, "observer": None}
    tile = [128, 128] if strategy == "block" else None
    activations = numbers | {"dynamic": True, "strategy": "token", "group_size": None, "block_structure": None}
    weights = numbers | {"dynamic": False, "strategy": strategy, "group_size": None, "block_structure": tile}
    group = {
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def fp8_method() -> dict[str, Any]:
    """Give the quantization_config of the fp8 method with 128x128 tiles."""
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


class SpecMaker:
    """Lists the tensors of a GLM-4.x checkpoint as name -> (dtype, shape)."""

    def __init__(self, document: Mapping[str, Any], scale_dtype: str) -> None:
        self.document = document
        self.scale_dtype = scale_dtype
        self.specs: dict[str, Spec] = {}
        section = document.get("quantization_config")
        self.strategy: str | None = None
        self.suffix = "weight_scale"
        if section and section["quant_method"] == "fp8":
            self.strategy = "block"
            self.suffix = "weight_scale_inv"
        elif section:
            self.strategy = section["config_groups"]["group_0"]["weights"]["strategy"]

    def linear(self, name: str, rows: int, cols: int) -> None:
        """Add one projection, with its scale in a quantised checkpoint."""
        self.specs[f"{name}.weight"] = ("F8_E4M3" if self.strategy else "BF16", (rows, cols))
        tiles = ((rows + 127) // 128, (cols + 127) // 128)
        shapes: dict[str, tuple[int, ...]] = {"channel": (rows, 1), "tensor": (1,), "block": tiles}
        if self.strategy:
            self.specs[f"{name}.{self.suffix}"] = (self.scale_dtype, shapes[self.strategy])

    def mlp(self, name: str, width: int) -> None:
        """Add the gate, up and down projections of one SwiGLU."""
        hidden = self.document["hidden_size"]
        self.linear(f"{name}.gate_proj", width, hidden)
        self.linear(f"{name}.up_proj", width, hidden)
        self.linear(f"{name}.down_proj", hidden, width)

    def layer(self, index: int, is_dense: bool) -> None:
        """Add one decoder layer."""
        document, specs = self.document, self.specs
        prefix, hidden, head_dim = f"model.layers.{index}", document["hidden_size"], document["head_dim"]
        query = document["num_attention_heads"] * head_dim
        kv = document["num_key_value_heads"] * head_dim
        specs[f"{prefix}.input_layernorm.weight"] = ("BF16", (hidden,))
        specs[f"{prefix}.post_attention_layernorm.weight"] = ("BF16", (hidden,))
        for letter, width in (("q", query), ("k", kv), ("v", kv)):
            self.linear(f"{prefix}.self_attn.{letter}_proj", width, hidden)
            if document["attention_bias"]:
                specs[f"{prefix}.self_attn.{letter}_proj.bias"] = ("BF16", (width,))
        self.linear(f"{prefix}.self_attn.o_proj", hidden, query)
        if document["use_qk_norm"]:
            specs[f"{prefix}.self_attn.q_norm.weight"] = ("BF16", (head_dim,))
            specs[f"{prefix}.self_attn.k_norm.weight"] = ("BF16", (head_dim,))
        if is_dense:
            self.mlp(f"{prefix}.mlp", document["intermediate_size"])
            return
        experts, width = document["n_routed_experts"], document["moe_intermediate_size"]
        specs[f"{prefix}.mlp.gate.weight"] = ("BF16", (experts, hidden))
        specs[f"{prefix}.mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
        for expert in range(experts):
            self.mlp(f"{prefix}.mlp.experts.{expert}", width)
        self.mlp(f"{prefix}.mlp.shared_experts", width * document["n_shared_experts"])

    def mtp(self, index: int) -> None:
        """Add one MTP layer with its own copies of the embedding and the head."""
        vocab, hidden = self.document["vocab_size"], self.document["hidden_size"]
        self.layer(index, is_dense=False)
        prefix = f"model.layers.{index}"
        self.specs[f"{prefix}.embed_tokens.weight"] = ("BF16", (vocab, hidden))
        self.specs[f"{prefix}.shared_head.head.weight"] = ("BF16", (vocab, hidden))
        self.specs[f"{prefix}.eh_proj.weight"] = ("BF16", (hidden, 2 * hidden))
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.specs[f"{prefix}.{name}.weight"] = ("BF16", (hidden,))


def make_specs(document: Mapping[str, Any], has_mtp: bool = False, scale_dtype: str = "F32") -> dict[str, Spec]:
    """List every tensor that a checkpoint with this config.json holds."""
    maker = SpecMaker(document, scale_dtype)
    vocab, hidden, layers = document["vocab_size"], document["hidden_size"], document["num_hidden_layers"]
    maker.specs["model.embed_tokens.weight"] = ("BF16", (vocab, hidden))
    for index in range(layers):
        maker.layer(index, is_dense=index < document["first_k_dense_replace"])
    maker.specs["model.norm.weight"] = ("BF16", (hidden,))
    if not document["tie_word_embeddings"]:
        maker.specs["lm_head.weight"] = ("BF16", (vocab, hidden))
    if has_mtp:
        maker.mtp(layers)
    return maker.specs


def spec_bytes(spec: Spec) -> int:
    """Count the bytes of one tensor."""
    dtype, shape = spec
    total = ELEMENT_BYTES[dtype]
    for size in shape:
        total *= size
    return total


def write_raw(path: Path, header: bytes, data_bytes: int, header_length: int | None = None) -> None:
    """Write a safetensors file from a literal header; the data area is a hole of `data_bytes`."""
    length = len(header) if header_length is None else header_length
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data_bytes)


def write_shard(path: Path, specs: Mapping[str, Spec]) -> None:
    """Write a valid safetensors file with these tensors, in this order, padded as the official writer does."""
    members: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in specs.items():
        end = position + spec_bytes((dtype, shape))
        members[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(members, separators=(",", ":")).encode()
    write_raw(path, header + b" " * (-len(header) % 8), position)


def deal_specs(specs: Mapping[str, Spec], count: int) -> list[dict[str, Spec]]:
    """Cut the tensors, in order, into `count` runs of about equal size."""
    share = sum(map(spec_bytes, specs.values())) / count
    shards: list[dict[str, Spec]] = [{} for _ in range(count)]
    position = 0
    for name, spec in specs.items():
        shards[min(int(position / share), count - 1)][name] = spec
        position += spec_bytes(spec)
    return shards


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")


def write_folder(
    folder: Path, document: Mapping[str, Any], specs: Mapping[str, Spec], num_shards: int | None = None
) -> Path:
    """Write a model folder: a single model.safetensors, or shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", document)
    for name in TEXT_FILES:
        write_json(folder / name, {})
    if num_shards is None:
        write_shard(folder / "model.safetensors", specs)
        return folder
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(deal_specs(specs, num_shards), 1):
        name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        write_shard(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    return folder


def small_folder(folder: Path, strategy: str | None = None, num_shards: int | None = None, **changes: Any) -> Path:
    """Write a valid small model folder; `strategy` quantises it, `changes` alter its config.json and its tensors."""
    document = SMALL | changes
    if strategy is not None:
        document |= {"quantization_config": quantization(strategy)}
    return write_folder(folder, document, make_specs(document), num_shards)
