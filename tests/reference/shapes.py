"""Three families of small models: their numbers, and how they spell config.json."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from tests.reference.numpy_ops import SCALE_TILE, ScaleKind

Family = Literal["glm47", "air", "tied"]
Weights = Literal["bf16", "fp8_channel", "fp8_tensor", "fp8_block", "fp8_group", "fp8_method"]

FAMILIES: tuple[Family, ...] = ("glm47", "air", "tied")
TOKEN_WEIGHTS: tuple[Weights, ...] = ("bf16", "fp8_channel", "fp8_tensor", "fp8_block")
WEIGHTS: tuple[Weights, ...] = (*TOKEN_WEIGHTS, "fp8_group")
SCALE_KINDS: dict[Weights, ScaleKind] = {
    "fp8_channel": "channel",
    "fp8_tensor": "tensor",
    "fp8_block": "tile",
    "fp8_group": "tile",
    "fp8_method": "tile",
}


@dataclass(frozen=True)
class Shape:
    """Numbers of a small model, named as config.json names them."""

    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    vocab_size: int
    routed_scaling_factor: float
    use_qk_norm: bool
    attention_bias: bool = True
    n_shared_experts: int = 1
    norm_topk_prob: bool = True
    partial_rotary_factor: float = 0.5
    rope_theta: float = 1000000.0
    rms_norm_eps: float = 1e-05
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    mtp_vocab_size: int | None = None


@dataclass(frozen=True)
class Layout:
    """How a family writes its folder: files, and which spelling of the config fields."""

    num_shards: int
    has_rope_parameters: bool
    dtype_field: Literal["torch_dtype", "dtype"]


SHAPES: dict[Family, Shape] = {
    "glm47": Shape(
        hidden_size=192,
        intermediate_size=320,
        moe_intermediate_size=16,
        num_hidden_layers=5,
        first_k_dense_replace=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        n_routed_experts=160,
        num_experts_per_tok=8,
        vocab_size=1003,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "air": Shape(
        hidden_size=192,
        intermediate_size=288,
        moe_intermediate_size=160,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=10,
        num_experts_per_tok=3,
        vocab_size=1000,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "tied": Shape(
        hidden_size=160,
        intermediate_size=320,
        moe_intermediate_size=96,
        num_hidden_layers=5,
        first_k_dense_replace=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=4,
        vocab_size=1024,
        routed_scaling_factor=0.5,
        use_qk_norm=False,
        attention_bias=False,
        n_shared_experts=2,
        norm_topk_prob=False,
        partial_rotary_factor=1.0,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
}

LAYOUTS: dict[Family, Layout] = {
    "glm47": Layout(num_shards=3, has_rope_parameters=False, dtype_field="torch_dtype"),
    "air": Layout(num_shards=1, has_rope_parameters=False, dtype_field="torch_dtype"),
    "tied": Layout(num_shards=2, has_rope_parameters=True, dtype_field="dtype"),
}


def config_of(shape: Shape, layout: Layout, weights: Weights) -> dict[str, Any]:
    """config.json of a model of this shape, in the spelling of the layout."""
    fields = {name: value for name, value in asdict(shape).items() if value is not None}
    rope = {name: fields.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    if layout.has_rope_parameters:
        fields["rope_parameters"] = {"rope_type": "default", **rope}
    else:
        fields.update(rope, rope_scaling=None)
    fields[layout.dtype_field] = "bfloat16"
    fields.update(
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        attention_dropout=0.0,
        eos_token_id=eos_tokens(shape),
        hidden_act="silu",
        initializer_range=0.02,
        n_group=1,
        num_nextn_predict_layers=1,
        pad_token_id=eos_tokens(shape)[0],
        topk_group=1,
        transformers_version="4.54.0",
        use_cache=True,
    )
    if weights != "bf16":
        fields.update(scoring_func="sigmoid", topk_method="noaux_tc", moe_router_dtype="float32")
        fields["quantization_config"] = (
            fp8_method_of(shape) if weights == "fp8_method" else quantization_of(shape, weights)
        )
    return fields


def eos_tokens(shape: Shape) -> list[int]:
    """The last three ids of the vocabulary."""
    return [shape.vocab_size - 3, shape.vocab_size - 2, shape.vocab_size - 1]


def generation_config_of(shape: Shape) -> dict[str, Any]:
    """generation_config.json with the fields of GLM-4.7's."""
    return {
        "_from_model_config": True,
        "eos_token_id": eos_tokens(shape),
        "pad_token_id": eos_tokens(shape)[0],
        "temperature": 1.0,
        "transformers_version": "4.56.2",
    }


def unquantised_modules(shape: Shape) -> list[str]:
    """The head and the routers."""
    layers = range(shape.first_k_dense_replace, shape.num_hidden_layers)
    return ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers)]


def fp8_method_of(shape: Shape) -> dict[str, Any]:
    """quantization_config of the fp8 method: E4M3 weights by 128x128 tiles and inputs by groups of 128."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": unquantised_modules(shape),
        "quant_method": "fp8",
        "weight_block_size": [SCALE_TILE, SCALE_TILE],
    }


def quantization_of(shape: Shape, weights: Weights) -> dict[str, Any]:
    """quantization_config in compressed-tensors' words for E4M3 weights and inputs per token, or per group of 128."""
    kind = SCALE_KINDS[weights]
    has_groups = weights == "fp8_group"
    common = {"actorder": None, "group_size": None, "num_bits": 8, "observer_kwargs": {}, "symmetric": True}
    strategy = "block" if kind == "tile" else kind
    structure = [SCALE_TILE, SCALE_TILE] if kind == "tile" else None
    group = {
        "input_activations": {
            **common,
            "block_structure": None,
            "dynamic": True,
            "group_size": SCALE_TILE if has_groups else None,
            "observer": None,
            "strategy": "group" if has_groups else "token",
            "type": "float",
        },
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            **common,
            "block_structure": structure,
            "dynamic": False,
            "observer": "minmax",
            "strategy": strategy,
            "type": "float",
        },
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": unquantised_modules(shape),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
