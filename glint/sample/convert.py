"""Turns a Llama model in GGUF into the tensors and documents of a GLM-4.x MoE folder, computing the same.

A Llama layer is a GLM-4.x MoE layer with rotary over the whole head, no q/k norm and no biases. Its MLP is cut into
eight experts of equal width: seven routed ones, all chosen for every token with weight 1 (equal scores, normalised,
times a scaling factor of 7), and one shared one. Layer 0 keeps its MLP as a dense layer.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from glint.errors import CheckpointError
from glint.sample.gguf import GgufFile

SampleDtype = Literal["fp8", "bf16"]

ROUTED_EXPERTS: Final = 7
SHARED_EXPERTS: Final = 1
E4M3_LARGEST: Final = 448.0
DATA_ALIGNMENT: Final = 64
_E4M3_SMALLEST_NORMAL: Final = 2.0**-6
_CONTROL_TOKEN: Final = 3
_PIECES: Final = ROUTED_EXPERTS + SHARED_EXPERTS
_PROJECTIONS: Final = ("_proj.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it goes into a safetensors file: the dtype's name there, and an array of values or of their bits."""

    dtype: str
    data: NDArray[Any]


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds float32 values to BF16, nearest even, as 16-bit patterns; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def round_to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounds float32 values to FP8 E4M3, nearest even, as 8-bit patterns; beyond 448 saturates; NaN stays NaN."""
    magnitude = np.minimum(np.abs(values, dtype=np.float32), np.float32(E4M3_LARGEST))
    bits = magnitude.view(np.uint32)
    normal = ((bits + (((bits >> 20) & 1) + 0x7FFFF)) >> 20) - (120 << 3)
    with np.errstate(invalid="ignore"):
        subnormal = np.rint(magnitude * np.float32(512)).astype(np.uint32)
    rounded = np.where(magnitude < _E4M3_SMALLEST_NORMAL, subnormal, normal).astype(np.uint8)
    rounded |= np.signbit(values).astype(np.uint8) << 7
    return np.where(np.isnan(values), np.uint8(0x7F), rounded)


def quantise_rows(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Gives E4M3 values of `weights` [.., out, in] and its scales [.., out, 1]: largest magnitude of a row / 448."""
    largest = np.abs(weights).max(axis=-1, keepdims=True)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(E4M3_LARGEST)).astype(np.float32)
    return round_to_e4m3(weights / scales), scales


def model_tensors(gguf: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields every tensor of the GLM-4.x MoE model by its checkpoint name, in float32, before any rounding."""
    yield "model.embed_tokens.weight", gguf.read("token_embd.weight")
    yield "model.norm.weight", gguf.read("output_norm.weight")
    num_heads = gguf.integer("llama.attention.head_count")
    num_kv_heads = gguf.integer("llama.attention.head_count_kv")
    for layer in range(gguf.integer("llama.block_count")):
        source, target = f"blk.{layer}", f"model.layers.{layer}"
        attention = f"{target}.self_attn"
        yield f"{target}.input_layernorm.weight", gguf.read(f"{source}.attn_norm.weight")
        yield f"{target}.post_attention_layernorm.weight", gguf.read(f"{source}.ffn_norm.weight")
        yield f"{attention}.q_proj.weight", _split_halves(gguf.read(f"{source}.attn_q.weight"), num_heads)
        yield f"{attention}.k_proj.weight", _split_halves(gguf.read(f"{source}.attn_k.weight"), num_kv_heads)
        yield f"{attention}.v_proj.weight", gguf.read(f"{source}.attn_v.weight")
        yield f"{attention}.o_proj.weight", gguf.read(f"{source}.attn_output.weight")
        mlp = {name: gguf.read(f"{source}.ffn_{name}.weight") for name in ("gate", "up", "down")}
        yield from _dense_tensors(target, mlp) if layer == 0 else expert_tensors(target, mlp)


def _split_halves(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    rows, columns = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _dense_tensors(target: str, mlp: dict[str, NDArray[np.float32]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name, weights in mlp.items():
        yield f"{target}.mlp.{name}_proj.weight", weights


def expert_tensors(target: str, mlp: dict[str, NDArray[np.float32]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields the router and the experts of a layer whose MLP has these gate, up and down projections."""
    hidden_size = mlp["down"].shape[0]
    yield f"{target}.mlp.gate.weight", np.zeros((ROUTED_EXPERTS, hidden_size), np.float32)
    yield f"{target}.mlp.gate.e_score_correction_bias", np.zeros(ROUTED_EXPERTS, np.float32)
    pieces = {name: np.split(weights, _PIECES, axis=1 if name == "down" else 0) for name, weights in mlp.items()}
    for index in range(_PIECES):
        expert = f"experts.{index}" if index < ROUTED_EXPERTS else "shared_experts"
        for name in mlp:
            yield f"{target}.mlp.{expert}.{name}_proj.weight", np.ascontiguousarray(pieces[name][index])


def store(name: str, values: NDArray[np.float32], dtype: SampleDtype) -> dict[str, StoredTensor]:
    """Rounds one tensor as GLM-4.7 keeps it: projections in FP8 with a scale per row or in BF16, the rest in BF16.

    The router's correction bias stays F32, the projection in front of the MTP layer BF16. The MTP layer's own head is
    a projection: no answer depends on the precision of a draft.
    """
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name} holds values that are not finite; the GGUF file is not usable")
    if name.endswith("e_score_correction_bias"):
        return {name: StoredTensor("F32", values)}
    if dtype == "bf16" or not name.endswith(_PROJECTIONS) or name.endswith("eh_proj.weight"):
        return {name: StoredTensor("BF16", round_to_bf16(values))}
    rounded, scales = quantise_rows(values)
    return {name: StoredTensor("F8_E4M3", rounded), f"{name}_scale": StoredTensor("F32", scales)}


def write_safetensors(path: Path, tensors: dict[str, StoredTensor], report: Callable[[int, int], None]) -> None:
    """Writes one safetensors file without holes and calls `report` with the bytes written and the bytes in all.

    Promises that every tensor whose length is a multiple of 64 bytes starts at a multiple of 64 in the file, so that
    kernels may read it in place; the others come last, widest type first.
    """
    order = sorted(tensors, key=lambda name: _file_order(name, tensors[name].data))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        data = tensors[name].data
        header[name] = {"dtype": tensors[name].dtype, "shape": data.shape, "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % DATA_ALIGNMENT)
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            data = np.ascontiguousarray(tensors[name].data)
            file.write(data.astype(data.dtype.newbyteorder("<"), copy=False).tobytes())
            written += data.nbytes
            report(written, end)


def _file_order(name: str, data: NDArray[Any]) -> tuple[bool, int, str]:
    return data.nbytes % DATA_ALIGNMENT != 0, -data.itemsize, name


def model_config(gguf: GgufFile, dtype: SampleDtype) -> dict[str, Any]:
    """Gives config.json of the GLM-4.x MoE model that the GGUF file becomes."""
    architecture = gguf.text("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{gguf.path}: general.architecture is {architecture!r}, 'llama' is needed")
    hidden_size = gguf.integer("llama.embedding_length")
    num_heads = gguf.integer("llama.attention.head_count")
    width = gguf.integer("llama.feed_forward_length")
    if hidden_size % num_heads or gguf.integer("llama.rope.dimension_count") * num_heads != hidden_size:
        raise CheckpointError(f"{gguf.path}: {num_heads} heads do not share {hidden_size} values with rotary over all")
    if width % _PIECES or "output.weight" in gguf.tensors:
        raise CheckpointError(f"{gguf.path}: an MLP of {width} in {_PIECES} parts and tied embeddings are needed")
    config: dict[str, Any] = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": gguf.integer("llama.vocab_size"),
        "hidden_size": hidden_size,
        "num_hidden_layers": gguf.integer("llama.block_count"),
        "first_k_dense_replace": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.integer("llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
        "rope_theta": gguf.real("llama.rope.freq_base"),
        "rope_scaling": None,
        "max_position_embeddings": gguf.integer("llama.context_length"),
        "intermediate_size": width,
        "moe_intermediate_size": width // _PIECES,
        "n_routed_experts": ROUTED_EXPERTS,
        "n_shared_experts": SHARED_EXPERTS,
        "num_experts_per_tok": ROUTED_EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(ROUTED_EXPERTS),
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": gguf.real("llama.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **_token_ids(gguf),
    }
    return config | {"quantization_config": _quantisation(config)} if dtype == "fp8" else config


def generation_config(gguf: GgufFile) -> dict[str, Any]:
    """Gives generation_config.json: light sampling with a repetition penalty, as small models loop when greedy."""
    return {"do_sample": True, "temperature": 0.3, "top_p": 0.95, "repetition_penalty": 1.1, **_token_ids(gguf)}


def _token_ids(gguf: GgufFile) -> dict[str, Any]:
    end_of_turn = gguf.integer("tokenizer.ggml.eos_token_id")
    end_of_text = gguf.integer("tokenizer.ggml.unknown_token_id")
    return {
        "bos_token_id": gguf.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": gguf.integer("tokenizer.ggml.padding_token_id"),
    }


def _quantisation(config: dict[str, Any]) -> dict[str, Any]:
    common: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "group_size": None,
        "num_bits": 8,
        "observer_kwargs": {},
        "symmetric": True,
        "type": "float",
    }
    moe_layers = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in moe_layers)],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": common | {"dynamic": False, "strategy": "channel", "observer": "minmax"},
                "input_activations": common | {"dynamic": True, "strategy": "token", "observer": None},
                "output_activations": None,
            }
        },
    }


def tokenizer_documents(gguf: GgufFile) -> dict[str, dict[str, Any]]:
    """Gives tokenizer.json and tokenizer_config.json, made of the GGUF file's own vocabulary, merges and template.

    Each digit stands alone, then words are cut as GPT-2 does and merged over bytes. Bytes for which the vocabulary
    has no token are left out of an encoding, as in llama.cpp.
    """
    model, pre = gguf.text("tokenizer.ggml.model"), gguf.text("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise CheckpointError(f"{gguf.path}: tokenizer is {model!r} with pre-tokeniser {pre!r}, not gpt2 with smollm")
    tokens = gguf.texts("tokenizer.ggml.tokens")
    ids = _token_ids(gguf)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.integer("llama.context_length"),
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"][0]],
        "pad_token": tokens[ids["pad_token_id"]],
        "chat_template": gguf.text("tokenizer.chat_template"),
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _special_tokens(tokens, gguf.integers("tokenizer.ggml.token_type")),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": _merge_model(tokens, gguf.texts("tokenizer.ggml.merges")),
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def _special_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    numbered = enumerate(zip(tokens, kinds, strict=True))
    return [{"id": index, "content": token, **flags} for index, (token, kind) in numbered if kind == _CONTROL_TOKEN]


def _merge_model(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }
