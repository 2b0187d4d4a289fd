"""Random small Glm4Moe checkpoint folders, the same bytes for the same arguments on every machine.

Weights are uniform numbers, so that only integer arithmetic and single float32 operations make them.
"""

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tests.reference.numpy_ops import E4M3_MAX, SCALE_TILE, ScaleKind, bf16_bits, encode_e4m3, expand_scale
from tests.reference.shapes import (
    FAMILIES,
    LAYOUTS,
    SCALE_KINDS,
    SHAPES,
    WEIGHTS,
    Family,
    Shape,
    Weights,
    config_of,
    generation_config_of,
)

__all__ = ["FAMILIES", "WEIGHTS", "Family", "Mtp", "Shape", "Weights", "make_checkpoint", "make_prompts"]

Mtp = Literal["without copies", "with copies", "with its own"]

PROMPT_LENGTHS = (1, 7, 16, 33, 60)

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}


@dataclass(frozen=True)
class Tensor:
    """One tensor as it lies in a file: format name, shape and little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def make_checkpoint(
    folder: Path, family: Family, weights: Weights, seed: int = 0, mtp: Mtp | None = None, **overrides: Any
) -> Path:
    """Write config, generation config and safetensors of a random model into the folder and return it.

    mtp adds an MTP layer: without copies of embedding and head as GLM-4.6, with copies as GLM-4.7, or with an embedding
    and a head of its own, the head quantised as in GLM-4.5-FP8. overrides replace fields of the family's Shape. The
    same arguments always give the same bytes.
    """
    shape = replace(SHAPES[family], **overrides)
    layout = LAYOUTS[family]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_of(shape, layout, weights))
    write_json(folder / "generation_config.json", generation_config_of(shape))
    values = [*make_values(shape, seed)]
    if mtp is not None:
        values += make_mtp(shape, ValueSource(seed), mtp, values)
    tensors = [part for name, array in values for part in store(name, array, weights, mtp == "with its own")]
    write_shards(folder, tensors, layout.num_shards)
    return folder


def make_prompts(vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Five random prompts of the lengths PROMPT_LENGTHS."""
    source = np.random.default_rng([seed, 5])
    return [source.integers(0, vocab_size, size=length).tolist() for length in PROMPT_LENGTHS]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write sorted, indented JSON as transformers does."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make_values(shape: Shape, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and float32 values of every tensor of the model, before any quantisation."""
    source = ValueSource(seed)
    hidden = shape.hidden_size
    embedding_spread = 0.25 if shape.tie_word_embeddings else 1.0
    yield source.spread("model.embed_tokens.weight", (shape.vocab_size, hidden), embedding_spread)
    for layer in range(shape.num_hidden_layers):
        yield from make_layer(shape, layer, source)
    yield source.norm("model.norm.weight", hidden)
    if not shape.tie_word_embeddings:
        yield source.spread("lm_head.weight", (shape.vocab_size, hidden), 3.0 / math.sqrt(hidden))


def make_mtp(
    shape: Shape, source: "ValueSource", mtp: Mtp, main: list[tuple[str, NDArray[np.float32]]]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Tensors of the MTP layer behind the layers of the main model."""
    prefix = f"model.layers.{shape.num_hidden_layers}"
    hidden = shape.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield source.norm(f"{prefix}.{name}.weight", hidden)
    yield source.matrix(f"{prefix}.eh_proj.weight", hidden, 2 * hidden, 1.0)
    yield from make_layer(shape, shape.num_hidden_layers, source)
    names = f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"
    if mtp == "with copies":
        by_name = dict(main)
        embedding = by_name["model.embed_tokens.weight"]
        yield from zip(names, (embedding, by_name.get("lm_head.weight", embedding)), strict=True)
    elif mtp == "with its own":
        yield source.spread(names[0], (shape.vocab_size, hidden), 1.0)
        yield source.spread(names[1], (shape.vocab_size, hidden), 3.0 / math.sqrt(hidden))


def make_layer(shape: Shape, layer: int, source: "ValueSource") -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Tensors of one decoder layer."""
    prefix = f"model.layers.{layer}"
    hidden, head_dim = shape.hidden_size, shape.head_dim
    yield source.norm(f"{prefix}.input_layernorm.weight", hidden)
    yield source.norm(f"{prefix}.post_attention_layernorm.weight", hidden)
    query_heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    for part, heads, gain, bias in (("q", query_heads, 1.4, 0.7), ("k", kv_heads, 1.4, 0.7), ("v", kv_heads, 1.0, 0.3)):
        yield source.matrix(f"{prefix}.self_attn.{part}_proj.weight", heads * head_dim, hidden, gain)
        if shape.attention_bias:
            yield source.spread(f"{prefix}.self_attn.{part}_proj.bias", (heads * head_dim,), bias)
    yield source.matrix(f"{prefix}.self_attn.o_proj.weight", hidden, shape.num_attention_heads * head_dim, 1.2)
    if shape.use_qk_norm:
        yield source.norm(f"{prefix}.self_attn.q_norm.weight", head_dim, 1.5)
        yield source.norm(f"{prefix}.self_attn.k_norm.weight", head_dim)
    if layer < shape.first_k_dense_replace:
        yield from make_mlp(f"{prefix}.mlp", hidden, shape.intermediate_size, source)
        return
    yield source.matrix(f"{prefix}.mlp.gate.weight", shape.n_routed_experts, hidden, 1.6)
    yield source.spread(f"{prefix}.mlp.gate.e_score_correction_bias", (shape.n_routed_experts,), 0.25)
    for expert in range(shape.n_routed_experts):
        yield from make_mlp(f"{prefix}.mlp.experts.{expert}", hidden, shape.moe_intermediate_size, source, 1.6)
    shared_width = shape.moe_intermediate_size * shape.n_shared_experts
    yield from make_mlp(f"{prefix}.mlp.shared_experts", hidden, shared_width, source)


def make_mlp(
    prefix: str, hidden: int, width: int, source: "ValueSource", down_gain: float = 1.0
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Gate, up and down matrices of one dense layer or expert."""
    yield source.matrix(f"{prefix}.gate_proj.weight", width, hidden, 1.5)
    yield source.matrix(f"{prefix}.up_proj.weight", width, hidden, 1.0)
    yield source.matrix(f"{prefix}.down_proj.weight", hidden, width, down_gain)


@dataclass(frozen=True)
class ValueSource:
    """Random float32 values for named tensors; a tensor depends on the seed and its name alone."""

    seed: int

    def spread(self, name: str, shape: tuple[int, ...], deviation: float) -> tuple[str, NDArray[np.float32]]:
        """Uniform values around zero of the given standard deviation."""
        reach = np.float32(deviation * math.sqrt(3.0))
        return name, (self._unit(name, shape) * 2 - 1) * reach

    def norm(self, name: str, width: int, gain: float = 1.0) -> tuple[str, NDArray[np.float32]]:
        """Norm weights between 0.4 and 1.6 times the gain."""
        return name, (self._unit(name, (width,)) * np.float32(1.2) + np.float32(0.4)) * np.float32(gain)

    def matrix(self, name: str, rows: int, cols: int, gain: float) -> tuple[str, NDArray[np.float32]]:
        """A matrix of about the given gain whose rows and 128x128 tiles differ in size by up to sixteen times."""
        _, values = self.spread(name, (rows, cols), gain / math.sqrt(2.08 * cols))
        row_sizes = self._unit(f"{name} rows", (rows, 1)) * np.float32(1.5) + np.float32(0.25)
        tiles = self._unit(f"{name} tiles", (-(-rows // SCALE_TILE), -(-cols // SCALE_TILE)))
        tile_sizes = expand_scale(tiles * np.float32(1.5) + np.float32(0.5), "tile", rows, cols).astype(np.float32)
        return name, values * row_sizes * tile_sizes

    def _unit(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        source = np.random.default_rng([self.seed, zlib.crc32(name.encode("utf-8"))])
        return source.random(shape, dtype=np.float32)


def store(name: str, values: NDArray[np.float32], weights: Weights, quantises_head: bool = False) -> Iterator[Tensor]:
    """The tensors a value becomes in a file: F32 selection bias, E4M3 with its scale, else BF16."""
    is_gemm_weight = name.endswith("_proj.weight") and not name.endswith("eh_proj.weight")
    is_gemm_weight |= quantises_head and name.endswith("shared_head.head.weight")
    if name.endswith("e_score_correction_bias"):
        yield Tensor(name, "F32", values.shape, values.astype("<f4").tobytes())
    elif weights == "bf16" or not is_gemm_weight:
        yield Tensor(name, "BF16", values.shape, bf16_bits(values).astype("<u2").tobytes())
    else:
        kind = SCALE_KINDS[weights]
        scale = weight_scale(values, kind)
        fp8 = encode_e4m3(values / expand_scale(scale, kind, *values.shape).astype(np.float32))
        yield Tensor(name, "F8_E4M3", values.shape, fp8.tobytes())
        scale_name = f"{name}_scale_inv" if weights == "fp8_method" else f"{name}_scale"
        yield Tensor(scale_name, "F32", scale.shape, scale.astype("<f4").tobytes())


def weight_scale(values: NDArray[np.float32], kind: ScaleKind) -> NDArray[np.float32]:
    """Absolute maximum over 448 of each scale group: [rows, 1], [1] or one per 128x128 tile."""
    largest = np.abs(values)
    if kind == "channel":
        largest = largest.max(axis=1, keepdims=True)
    elif kind == "tensor":
        largest = largest.max(keepdims=True).reshape(1)
    else:
        largest = np.maximum.reduceat(largest, np.arange(0, values.shape[0], SCALE_TILE), axis=0)
        largest = np.maximum.reduceat(largest, np.arange(0, values.shape[1], SCALE_TILE), axis=1)
    return (largest / np.float32(E4M3_MAX)).astype(np.float32)


def write_shards(folder: Path, tensors: list[Tensor], num_shards: int) -> None:
    """Write one model.safetensors, or several shards with their index."""
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    weight_map = {}
    for index in range(num_shards):
        file_name = f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        first, last = (len(tensors) * i // num_shards for i in (index, index + 1))
        write_safetensors(folder / file_name, tensors[first:last])
        weight_map.update({tensor.name: file_name for tensor in tensors[first:last]})
    total_bytes = sum(len(tensor.data) for tensor in tensors)
    write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    )


def write_safetensors(path: Path, tensors: list[Tensor]) -> None:
    """Write a safetensors file: tensors by falling item size, then name; the header padded to eight bytes."""
    ordered = sorted(tensors, key=lambda tensor: (-_ITEM_BYTES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        ends = [offset, offset + len(tensor.data)]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.writelines(tensor.data for tensor in ordered)
