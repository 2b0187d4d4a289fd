"""The tensors that a GLM-4.x MoE checkpoint must hold: names, roles, shapes and types."""

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Literal, NamedTuple

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.quantisation import TILE_SIZE, ScaleKind

ExpertLayout = Literal["tp", "ep"]


class Dtype(IntEnum):
    """Element types the engine reads; numbered as GLINT_DTYPE_ in glint.h."""

    F32 = 1
    BF16 = 2
    F8_E4M3 = 3


class Role(IntEnum):
    """The purpose of a tensor; numbered as GLINT_ROLE_ in glint.h."""

    EMBEDDING = 1
    LM_HEAD = 2
    FINAL_NORM = 3
    INPUT_NORM = 4
    POST_ATTENTION_NORM = 5
    QUERY = 6
    KEY = 7
    VALUE = 8
    OUTPUT = 9
    QUERY_NORM = 10
    KEY_NORM = 11
    GATE = 12
    UP = 13
    DOWN = 14
    ROUTER = 15
    SHARED_GATE = 16
    SHARED_UP = 17
    SHARED_DOWN = 18
    EMBEDDING_NORM = 19
    HIDDEN_NORM = 20
    EH_PROJ = 21


class Part(IntEnum):
    """The part of a role that a tensor holds; numbered as GLINT_PART_ in glint.h."""

    WEIGHT = 0
    SCALE = 1
    BIAS = 2


class ExpectedTensor(NamedTuple):
    """A tensor that the config implies; a vector of length n has n rows and one column."""

    name: str
    role: Role
    part: Part
    layer: int | None
    expert: int | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Dtype, ...]
    rows: int
    cols: int


EMBEDDING_NAME = "model.embed_tokens.weight"
LM_HEAD_NAME = "lm_head.weight"
_BF16 = (Dtype.BF16,)
_F8 = (Dtype.F8_E4M3,)
_BF16_OR_F32 = (Dtype.BF16, Dtype.F32)


def expected_tensors(config: ModelConfig) -> Iterator[ExpectedTensor]:
    """Yield every tensor of the main model, in the order of the forward pass; not those of the MTP layers.

    A tied model's lm_head is not among them.
    """
    yield _matrix(EMBEDDING_NAME, Role.EMBEDDING, None, config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        yield from _attention(config, layer)
        if layer < config.num_dense_layers:
            yield from _dense(config, layer)
        else:
            yield from _experts(config, layer)
    yield _vector("model.norm.weight", Role.FINAL_NORM, Part.WEIGHT, None, config.hidden_size)
    if not config.tied_embeddings:
        yield _matrix(LM_HEAD_NAME, Role.LM_HEAD, None, config.vocab_size, config.hidden_size)


def expected_mtp_tensors(config: ModelConfig, dtypes: Mapping[str, str]) -> Iterator[ExpectedTensor]:
    """Yield every tensor of the MTP layer, whose number is `num_layers`.

    `dtypes` names the type of each tensor in the files: copies of the embedding and of the head are expected only
    where they are there, since the main model's serve as well, and the head may be quantised or not.
    """
    layer, vocab, hidden = config.num_layers, config.vocab_size, config.hidden_size
    prefix = f"model.layers.{layer}"
    yield _vector(f"{prefix}.enorm.weight", Role.EMBEDDING_NORM, Part.WEIGHT, layer, hidden)
    yield _vector(f"{prefix}.hnorm.weight", Role.HIDDEN_NORM, Part.WEIGHT, layer, hidden)
    yield _matrix(f"{prefix}.eh_proj.weight", Role.EH_PROJ, layer, hidden, 2 * hidden)
    yield from _attention(config, layer)
    yield from _experts(config, layer)
    yield _vector(f"{prefix}.shared_head.norm.weight", Role.FINAL_NORM, Part.WEIGHT, layer, hidden)
    embedding, head = f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head"
    if embedding in dtypes:
        yield _matrix(embedding, Role.EMBEDDING, layer, vocab, hidden)
    if dtypes.get(f"{head}.weight") == Dtype.F8_E4M3.name:
        yield from _projection(config, head, Role.LM_HEAD, layer, None, vocab, hidden)
    elif f"{head}.weight" in dtypes:
        yield _matrix(f"{head}.weight", Role.LM_HEAD, layer, vocab, hidden)


def _attention(config: ModelConfig, layer: int) -> Iterator[ExpectedTensor]:
    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    hidden = config.hidden_size
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    yield _vector(f"{prefix}.input_layernorm.weight", Role.INPUT_NORM, Part.WEIGHT, layer, hidden)
    yield _vector(f"{prefix}.post_attention_layernorm.weight", Role.POST_ATTENTION_NORM, Part.WEIGHT, layer, hidden)
    for name, role, width in (
        ("q_proj", Role.QUERY, query_width),
        ("k_proj", Role.KEY, kv_width),
        ("v_proj", Role.VALUE, kv_width),
    ):
        yield from _projection(config, f"{attention}.{name}", role, layer, None, width, hidden)
        if config.has_attention_bias:
            yield _vector(f"{attention}.{name}.bias", role, Part.BIAS, layer, width, _BF16)
    yield from _projection(config, f"{attention}.o_proj", Role.OUTPUT, layer, None, hidden, query_width)
    if config.has_qk_norm:
        yield _vector(f"{attention}.q_norm.weight", Role.QUERY_NORM, Part.WEIGHT, layer, config.head_dim)
        yield _vector(f"{attention}.k_norm.weight", Role.KEY_NORM, Part.WEIGHT, layer, config.head_dim)


def _dense(config: ModelConfig, layer: int) -> Iterator[ExpectedTensor]:
    roles = (Role.GATE, Role.UP, Role.DOWN)
    yield from _swiglu(config, f"model.layers.{layer}.mlp", roles, layer, None, config.dense_width)


def _experts(config: ModelConfig, layer: int) -> Iterator[ExpectedTensor]:
    prefix = f"model.layers.{layer}.mlp"
    experts = config.num_experts
    yield _matrix(f"{prefix}.gate.weight", Role.ROUTER, layer, experts, config.hidden_size)
    yield _vector(f"{prefix}.gate.e_score_correction_bias", Role.ROUTER, Part.BIAS, layer, experts)
    roles = (Role.GATE, Role.UP, Role.DOWN)
    for expert in range(experts):
        yield from _swiglu(config, f"{prefix}.experts.{expert}", roles, layer, expert, config.expert_width)
    shared_roles = (Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN)
    yield from _swiglu(config, f"{prefix}.shared_experts", shared_roles, layer, None, config.shared_width)


def _swiglu(
    config: ModelConfig, prefix: str, roles: tuple[Role, Role, Role], layer: int, expert: int | None, width: int
) -> Iterator[ExpectedTensor]:
    gate, up, down = roles
    hidden = config.hidden_size
    yield from _projection(config, f"{prefix}.gate_proj", gate, layer, expert, width, hidden)
    yield from _projection(config, f"{prefix}.up_proj", up, layer, expert, width, hidden)
    yield from _projection(config, f"{prefix}.down_proj", down, layer, expert, hidden, width)


def _projection(
    config: ModelConfig, prefix: str, role: Role, layer: int, expert: int | None, rows: int, cols: int
) -> Iterator[ExpectedTensor]:
    name = f"{prefix}.weight"
    kind = config.weight_scale_kind
    weight_dtypes = _BF16 if kind is ScaleKind.NONE else _F8
    yield ExpectedTensor(name, role, Part.WEIGHT, layer, expert, ((rows, cols),), weight_dtypes, rows, cols)
    if kind is ScaleKind.NONE:
        return
    shapes: tuple[tuple[int, ...], ...]
    if kind is ScaleKind.CHANNEL:
        scale_rows, scale_cols = rows, 1
        shapes = ((rows, 1), (rows,))
    elif kind is ScaleKind.TENSOR:
        scale_rows, scale_cols = 1, 1
        shapes = ((1,), ())
    else:
        scale_rows, scale_cols = -(-rows // TILE_SIZE), -(-cols // TILE_SIZE)
        shapes = ((scale_rows, scale_cols),)
    name = f"{prefix}.{config.scale_suffix}"
    yield ExpectedTensor(name, role, Part.SCALE, layer, expert, shapes, _BF16_OR_F32, scale_rows, scale_cols)


def _matrix(name: str, role: Role, layer: int | None, rows: int, cols: int) -> ExpectedTensor:
    return ExpectedTensor(name, role, Part.WEIGHT, layer, None, ((rows, cols),), _BF16, rows, cols)


def _vector(
    name: str, role: Role, part: Part, layer: int | None, length: int, dtypes: tuple[Dtype, ...] = _BF16_OR_F32
) -> ExpectedTensor:
    return ExpectedTensor(name, role, part, layer, None, ((length,),), dtypes, length, 1)
