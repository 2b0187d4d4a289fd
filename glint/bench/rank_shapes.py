"""One rank of a model: its shapes, the bytes that a step reads, the operations of a prefill, and projections.

All of it is arithmetic on shapes and measured times; nothing here runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from glint.checkpoint.config import CONFIG_NAME, ModelConfig, read_config
from glint.checkpoint.layout import ExpertLayout
from glint.checkpoint.quantisation import TILE_SIZE, ScaleKind
from glint.errors import RequestError

GLM_47 = ModelConfig(
    vocab_size=151552,
    hidden_size=5120,
    num_layers=92,
    num_dense_layers=3,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    rotary_dim=64,
    dense_width=12288,
    expert_width=1536,
    shared_width=1536,
    num_experts=160,
    experts_per_token=8,
    max_positions=202752,
    has_qk_norm=True,
    has_attention_bias=True,
    normalise_weights=True,
    weight_scale_kind=ScaleKind.CHANNEL,
    input_group_size=0,
    mtp_vocab_size=151552,
    routed_scaling=2.5,
    norm_epsilon=1e-5,
    rope_theta=1e6,
    eos_token_ids=(151329, 151336, 151338),
    pad_token_id=151329,
    dtype="bfloat16",
    mtp_layers=1,
    tied_embeddings=False,
    architecture="Glm4MoeForCausalLM",
    scale_suffix="weight_scale",
)
GLM_45 = replace(GLM_47, max_positions=131072)
GLM_45_AIR = replace(
    GLM_45,
    hidden_size=4096,
    num_layers=46,
    num_dense_layers=1,
    dense_width=10944,
    expert_width=1408,
    shared_width=1408,
    num_experts=128,
    has_qk_norm=False,
    routed_scaling=1.0,
)
KNOWN_MODELS = {"glm-4.5": GLM_45, "glm-4.5-air": GLM_45_AIR, "glm-4.6": GLM_47, "glm-4.7": GLM_47}
FLOAT_BYTES = 4
BF16_BYTES = 2


def find_model(name: str, flag: str = "--model") -> ModelConfig:
    """The shapes of a folder with a config.json, or in FP8 those of a model that is known by name.

    A name may be written as a hub or a folder has it: zai-org/GLM-4.5-Air-FP8 is glm-4.5-air.
    """
    folder = Path(name).expanduser()
    if (folder / CONFIG_NAME).is_file():
        return read_config(folder)
    known = KNOWN_MODELS.get(folder.name.lower().removesuffix("-fp8"))
    if known is None:
        raise RequestError(
            f"{flag} {name} is neither a known model nor a folder with a {CONFIG_NAME}; known are "
            f"{', '.join(KNOWN_MODELS)}"
        )
    return known


@dataclass(frozen=True)
class RankShape:
    """One of `tp` ranks of the model `whole`: `model` has the rank's own widths and heads.

    The rank holds `local_experts` of the `model.num_experts` experts that its router chooses from. `differences` says
    where the rank is not exactly what a rank of the whole would be.
    """

    whole: ModelConfig
    model: ModelConfig
    tp: int
    expert_layout: ExpertLayout
    local_experts: int
    differences: tuple[str, ...]

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return self.model.num_layers - self.model.num_dense_layers


def shape_rank(whole: ModelConfig, tp: int, expert_layout: ExpertLayout) -> RankShape:
    """Cut a model into `tp` equal ranks; the vocabulary is rounded up, all else must divide."""
    is_ep = expert_layout == "ep"
    for name, size in (
        ("num_attention_heads", whole.num_heads),
        ("intermediate_size", whole.dense_width),
        ("shared expert width", whole.shared_width),
        ("n_routed_experts" if is_ep else "moe_intermediate_size", whole.num_experts if is_ep else whole.expert_width),
    ):
        if size % tp:
            raise RequestError(f"--tp is {tp}, which does not divide {name} {size}; choose another")
    if whole.num_kv_heads % tp and tp % whole.num_kv_heads:
        raise RequestError(f"--tp is {tp}, which does not go with {whole.num_kv_heads} key/value heads; choose another")
    differences = ["collectives between ranks are left out of measured times and added to projected ones"]
    if tp > 1:
        differences.append(
            f"in a prefill step the rank norms and routes 1/{tp} of the rows, as a rank of several does; rows of the "
            "others are copies of its own"
        )
        differences.append(f"the embedding has 1/{tp} of its rows here; a rank of several holds all of them")
    vocab_size = -(-whole.vocab_size // tp)
    model = replace(
        whole,
        num_heads=whole.num_heads // tp,
        num_kv_heads=max(1, whole.num_kv_heads // tp),
        dense_width=whole.dense_width // tp,
        expert_width=whole.expert_width if is_ep else whole.expert_width // tp,
        shared_width=whole.shared_width // tp,
        vocab_size=vocab_size,
        mtp_vocab_size=vocab_size,
    )
    local = whole.num_experts // tp if is_ep else whole.num_experts
    return RankShape(whole, model, tp, expert_layout, local, tuple(differences))


def expected_experts(shape: RankShape, batch: int) -> float:
    """Different experts of this rank that `batch` tokens need in one layer, were every choice equally likely."""
    model = shape.model
    return shape.local_experts * (1.0 - (1.0 - model.experts_per_token / model.num_experts) ** batch)


def product_bytes(model: ModelConfig, rows: int, cols: int) -> int:
    """Bytes of one weight matrix of the layers, with its scales as FP32."""
    kind = model.weight_scale_kind
    if kind is ScaleKind.NONE:
        return rows * cols * BF16_BYTES
    tiles = -(-rows // TILE_SIZE) * -(-cols // TILE_SIZE)
    scales = {ScaleKind.CHANNEL: rows, ScaleKind.TENSOR: 1, ScaleKind.TILE: tiles}[kind]
    return rows * cols + scales * FLOAT_BYTES


def swiglu_bytes(model: ModelConfig, width: int) -> int:
    """Bytes of gate, up and down of one expert or dense layer."""
    return 2 * product_bytes(model, width, model.hidden_size) + product_bytes(model, model.hidden_size, width)


def attention_bytes(model: ModelConfig) -> int:
    """Bytes of the weights of one attention: query, key and value with their bias, and output."""
    query_width = model.num_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    bias = (query_width + 2 * kv_width) * FLOAT_BYTES if model.has_attention_bias else 0
    inputs = product_bytes(model, query_width, model.hidden_size) + 2 * product_bytes(
        model, kv_width, model.hidden_size
    )
    return inputs + bias + product_bytes(model, model.hidden_size, query_width)


def step_bytes(
    shape: RankShape, batch: int, context: float, experts_per_layer: float, page_element_bytes: int = BF16_BYTES
) -> dict[str, float]:
    """Bytes that one decode step reads, by part: every weight once, the experts it needs, and keys and values.

    `context` is the mean length of the requests, `experts_per_layer` how many different experts a layer needs,
    `page_element_bytes` what one number of a key or value takes.
    """
    model = shape.model
    norms = 2 * model.num_layers + 1
    head_norms = 2 * model.num_layers * model.head_dim if model.has_qk_norm else 0
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * page_element_bytes
    return {
        "attention": model.num_layers * attention_bytes(model),
        "dense layers": model.num_dense_layers * swiglu_bytes(model, model.dense_width),
        "shared experts": shape.num_moe_layers * swiglu_bytes(model, model.shared_width),
        "routed experts": shape.num_moe_layers * experts_per_layer * swiglu_bytes(model, model.expert_width),
        "router": shape.num_moe_layers * model.num_experts * (model.hidden_size * BF16_BYTES + FLOAT_BYTES),
        "norms": (norms * model.hidden_size + head_norms) * FLOAT_BYTES,
        "embedding": batch * model.hidden_size * BF16_BYTES,
        "lm_head": model.vocab_size * model.hidden_size * BF16_BYTES,
        "keys and values": batch * context * token_bytes,
    }


def step_operations(shape: RankShape, tokens: int, pairs: float, sampled: int) -> dict[str, float]:
    """Floating-point operations of a step of `tokens` tokens, by the parts of `step_bytes` that compute.

    `pairs` counts each token with each that it sees, itself included; `sampled` rows go through lm_head. Experts of
    other ranks are left out, every expert being equally likely.
    """
    model = shape.model
    hidden = model.hidden_size
    heads_width = model.num_heads * model.head_dim
    projections = hidden * (2 * heads_width + 2 * model.num_kv_heads * model.head_dim)
    routed = 3 * hidden * model.expert_width * model.experts_per_token * shape.local_experts / model.num_experts
    moe_rows = shape.num_moe_layers * tokens
    return {
        "attention": 2 * model.num_layers * tokens * projections,
        "dense layers": 2 * model.num_dense_layers * tokens * 3 * hidden * model.dense_width,
        "shared experts": 2 * moe_rows * 3 * hidden * model.shared_width,
        "routed experts": 2 * moe_rows * routed,
        "router": 2 * moe_rows * hidden * model.num_experts,
        "lm_head": 2 * sampled * model.vocab_size * hidden,
        "keys and values": 4 * heads_width * pairs * model.num_layers,
    }


def prefill_operations(shape: RankShape, tokens: int, cached: int) -> float:
    """Floating-point operations of one step of `tokens` tokens of one request after `cached` others.

    Each token sees itself and all before it. Only the last row goes through lm_head.
    """
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    return sum(step_operations(shape, tokens, pairs, sampled=1).values())


@dataclass(frozen=True)
class Projection:
    """The throughput of `tp` such GPUs for a load of equal requests that come together: projected, not measured."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time."""
        return self.requests * self.output_tokens / (self.prefill_seconds + self.decode_seconds)


def project_load(
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    decode_ms: float,
    prefill_ms: float,
    prefill_tokens: int,
) -> Projection:
    """All prompts in whole prefill steps, which bring the first token of each, then the others in decode steps."""
    prefill_steps = -(-requests * prompt_tokens // prefill_tokens)
    return Projection(
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_seconds=prefill_steps * prefill_ms * 1e-3,
        decode_seconds=(output_tokens - 1) * decode_ms * 1e-3,
    )
