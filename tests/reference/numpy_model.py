"""The whole model as NumPy sentences over the tensors of a checkpoint folder; needs neither torch nor transformers.

Every sum is taken in float64 and rounded where numpy_ops says so. tests/reference/test_layers.py holds each layer to
transformers' code with the same rounding points.
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
from numpy.typing import NDArray

from tests.reference import numpy_ops as ops

Backend = Literal["cpu", "cuda"]


def read_tensors(folder: Path) -> dict[str, NDArray[Any]]:
    """Tensors by name through the official reader: E4M3 as bytes, everything else as float32 values."""
    tensors: dict[str, NDArray[Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            tensors[name] = decode_tensor(entry["dtype"], bytes(entry["data"])).reshape(entry["shape"])
    return tensors


def decode_tensor(dtype: str, data: bytes) -> NDArray[Any]:
    """The numbers of a tensor as it lies in a file."""
    if dtype == "F8_E4M3":
        return np.frombuffer(data, np.uint8)
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    raise ValueError(f"a tensor of type {dtype}; the models of the tests are made of F8_E4M3, BF16 and F32")


def scale_kind(scale: ops.FloatArray, rows: int) -> ops.ScaleKind:
    """How a stored scale is laid out: [rows, 1], one number, or one number per tile."""
    if scale.shape == (rows, 1):
        return "channel"
    return "tensor" if scale.ndim < 2 else "tile"


def has_input_groups(config: dict[str, Any]) -> bool:
    """Whether a checkpoint asks for inputs by groups of 128: by its fp8 method, or in compressed-tensors' words."""
    section = config.get("quantization_config") or {}
    groups = section.get("config_groups", {}).values()
    return section.get("quant_method") == "fp8" or any(
        group["input_activations"]["strategy"] == "group" for group in groups
    )


class NumpyModel:
    """A checkpoint folder with the rounding points of a backend."""

    def __init__(self, folder: Path, rounds_like: Backend = "cpu") -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.rope: dict[str, Any] = self.config.get("rope_parameters") or self.config
        self.tensors = read_tensors(folder)
        self.has_bf16_inputs = rounds_like == "cuda"
        self.has_input_groups = has_input_groups(self.config)
        self.has_bf16_cache = self.has_bf16_inputs or bool(self.config.get("quantization_config"))

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return int(self.config["vocab_size"])

    def gemm(self, rows: ops.FloatArray, name: str) -> ops.FloatArray:
        """The named projection of the rows; the input is quantised where the weight is."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        scale = self.tensors.get(f"{name}.weight_scale", self.tensors.get(f"{name}.weight_scale_inv"))
        if scale is not None:
            if self.has_input_groups:
                return ops.gemm_groups(ops.quantise_groups(rows), weight, scale, "tile", bias)
            return ops.gemm_fp8(ops.quantise(rows), weight, scale, scale_kind(scale, len(weight)), bias)
        return ops.gemm_bf16(ops.round_bf16(rows) if self.has_bf16_inputs else rows, weight, bias)

    def norm(self, rows: ops.FloatArray, name: str) -> ops.FloatArray:
        """The named RMSNorm of the rows."""
        return ops.rms_norm(rows, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def mlp(self, rows: ops.FloatArray, name: str) -> ops.FloatArray:
        """SwiGLU of the rows by the named matrices."""
        gate, up = (self.gemm(rows, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.gemm(ops.swiglu(gate, up), f"{name}.down_proj")

    def attention(self, rows: ops.FloatArray, name: str, first_position: int = 0) -> ops.FloatArray:
        """Attention of the rows among themselves."""
        order, head_dim = np.arange(len(rows)), self.config["head_dim"]
        positions = order + first_position
        rotary_dim = int(head_dim * self.rope["partial_rotary_factor"])
        heads = {}
        for part in ("q", "k", "v"):
            values = self.gemm(rows, f"{name}.{part}_proj").reshape(len(rows), -1, head_dim)
            if part != "v" and self.config["use_qk_norm"]:
                values = self.norm(values, f"{name}.{part}_norm")
            if part != "v":
                values = ops.rotary(values, positions, rotary_dim, self.rope["rope_theta"])
            heads[part] = ops.round_bf16(values) if self.has_bf16_cache else values
        mixed = ops.attention(heads["q"], heads["k"], heads["v"], order, self.has_bf16_cache)
        return self.gemm(mixed.reshape(len(rows), -1), f"{name}.o_proj")

    def experts(self, rows: ops.FloatArray, name: str) -> ops.FloatArray:
        """Routed and shared experts of the rows."""
        config = self.config
        rule = ops.RouterRule(
            experts_per_token=config["num_experts_per_tok"],
            has_normalised_weights=config["norm_topk_prob"],
            routed_scaling=config["routed_scaling_factor"],
        )
        bias = self.tensors[f"{name}.gate.e_score_correction_bias"]
        routing = ops.route(rows, self.tensors[f"{name}.gate.weight"], bias, rule)
        outputs = np.empty((*routing.experts.shape, rows.shape[1]), np.float32)
        for expert in np.unique(routing.experts):
            tokens, places = np.nonzero(routing.experts == expert)
            outputs[tokens, places] = self.mlp(rows[tokens], f"{name}.experts.{expert}")
        return ops.combine(outputs, routing.weights, self.mlp(rows, f"{name}.shared_experts"))

    def layer(self, hidden: ops.FloatArray, index: int, first_position: int = 0) -> ops.FloatArray:
        """Output of one decoder layer."""
        prefix = f"model.layers.{index}"
        normed = self.norm(hidden, f"{prefix}.input_layernorm")
        hidden = ops.add_residual(hidden, self.attention(normed, f"{prefix}.self_attn", first_position))
        normed = self.norm(hidden, f"{prefix}.post_attention_layernorm")
        is_dense = index < self.config["first_k_dense_replace"]
        update = self.mlp(normed, f"{prefix}.mlp") if is_dense else self.experts(normed, f"{prefix}.mlp")
        return ops.add_residual(hidden, update)

    def embed(self, token_ids: list[int]) -> ops.FloatArray:
        """Rows of the embedding."""
        rows: ops.FloatArray = self.tensors["model.embed_tokens.weight"][token_ids]
        return rows

    def head(self, hidden: ops.FloatArray) -> ops.FloatArray:
        """Logits [len, vocab] of what the last layer gives out."""
        return self.gemm(self.norm(hidden, "model.norm"), self.head_name)

    def draft_logits(self, token_ids: list[int], normed: ops.FloatArray, first_position: int = 1) -> ops.FloatArray:
        """Logits [len, vocab] of the MTP layer over tokens from a position on; on the CPU -inf beyond its vocabulary.

        normed is what the main model has behind its final norm for the token before each of the first tokens. For the
        tokens behind those it is what the MTP layer gave for the token before, behind its own norm.
        """
        prefix = f"model.layers.{self.num_layers}"
        table = self.tensors.get(f"{prefix}.embed_tokens.weight", self.tensors["model.embed_tokens.weight"])
        embedded = self.norm(table[token_ids], f"{prefix}.enorm")
        states = [*normed]
        while True:
            both = [embedded[: len(states)], self.norm(np.stack(states), f"{prefix}.hnorm")]
            inputs = self.gemm(np.concatenate(both, axis=1), f"{prefix}.eh_proj")
            drafted = self.norm(self.layer(inputs, self.num_layers, first_position), f"{prefix}.shared_head.norm")
            if len(states) == len(token_ids):
                break
            states.append(drafted[-1])
        own_head = f"{prefix}.shared_head.head"
        logits = self.gemm(drafted, own_head if f"{own_head}.weight" in self.tensors else self.head_name)
        if not self.has_bf16_inputs:
            logits[:, self.config.get("mtp_vocab_size", self.vocab_size) :] = -np.inf
        return logits

    @property
    def head_name(self) -> str:
        """The matrix that makes logits: the embedding where it is shared."""
        return "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"

    def hidden_states(self, token_ids: list[int]) -> ops.FloatArray:
        """Input of each layer and the output of the last, before the final norm: [layers + 1, len, hidden]."""
        states = [self.embed(token_ids)]
        for index in range(self.num_layers):
            states.append(self.layer(states[-1], index))
        return np.stack(states)

    def logits(self, token_ids: list[int]) -> NDArray[np.float64]:
        """Logits [len, vocab] of every position."""
        return self.head(self.hidden_states(token_ids)[-1]).astype(np.float64)

    def greedy(self, prompt_ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """count greedy tokens, the lower id among equals, and the gap between the best two logits at each."""
        tokens: list[int] = []
        gaps: list[float] = []
        for _ in range(count):
            row = self.logits(prompt_ids + tokens)[-1]
            best = np.sort(row)[-2:]
            tokens.append(int(row.argmax()))
            gaps.append(float(best[1] - best[0]))
        return tokens, gaps
