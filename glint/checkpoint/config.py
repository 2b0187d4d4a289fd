"""The model's shape and generation settings, from config.json and generation_config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glint.checkpoint.document import read_object
from glint.checkpoint.quantisation import Quantisation, ScaleKind, read_quantisation
from glint.errors import CheckpointError

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
ARCHITECTURE = "Glm4MoeForCausalLM"
MODEL_TYPE = "glm4_moe"
MAX_MATRIX_SIDE = 2**24


@dataclass(frozen=True)
class ModelConfig:
    """Everything the engine must know about a GLM-4.x MoE model.

    The first fields are those of `glint_model` in glint.h, under the same names. Nothing here was defaulted: a
    config.json that lacks a needed field is refused.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    dense_width: int
    expert_width: int
    shared_width: int
    num_experts: int
    experts_per_token: int
    max_positions: int
    has_qk_norm: bool
    has_attention_bias: bool
    normalise_weights: bool
    weight_scale_kind: ScaleKind
    input_group_size: int
    mtp_vocab_size: int
    routed_scaling: float
    norm_epsilon: float
    rope_theta: float
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str
    mtp_layers: int
    tied_embeddings: bool
    architecture: str
    scale_suffix: str | None

    @property
    def quantisation(self) -> Quantisation:
        """How the layer projections are stored."""
        return Quantisation(self.weight_scale_kind, self.scale_suffix, self.input_group_size)


@dataclass(frozen=True)
class GenerationConfig:
    """The sampling defaults of generation_config.json; None where the file sets none.

    `temperature` is 0 where do_sample is false. `unused` names what it asks for beyond these fields.
    """

    eos_token_ids: tuple[int, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    unused: tuple[str, ...] = ()

    def sampling(self) -> dict[str, Any]:
        """The fields that say how to sample, by the names of SamplingParams, without those that are left open."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class _Number:
    """A numeric field: its names in the file, oldest last, and its range."""

    spellings: tuple[str, ...]
    minimum: float
    maximum: float
    is_integer: bool = True


_INTEGERS = {
    "vocab_size": _Number(("vocab_size",), 1, MAX_MATRIX_SIDE),
    "hidden_size": _Number(("hidden_size",), 1, 2**20),
    "num_layers": _Number(("num_hidden_layers",), 1, 4096),
    "num_dense_layers": _Number(("first_k_dense_replace",), 0, 4096),
    "num_heads": _Number(("num_attention_heads",), 1, 2**16),
    "num_kv_heads": _Number(("num_key_value_heads",), 1, 2**16),
    "head_dim": _Number(("head_dim",), 2, 2**16),
    "dense_width": _Number(("intermediate_size",), 1, MAX_MATRIX_SIDE),
    "expert_width": _Number(("moe_intermediate_size",), 1, MAX_MATRIX_SIDE),
    "shared_experts": _Number(("n_shared_experts",), 1, 1024),
    "num_experts": _Number(("n_routed_experts", "num_local_experts"), 2, 2**16),
    "experts_per_token": _Number(("num_experts_per_tok",), 1, 2**16),
    "max_positions": _Number(("max_position_embeddings",), 1, 2**30),
}
_REALS = {
    "routed_scaling": _Number(("routed_scaling_factor",), 1e-6, 1e6, False),
    "norm_epsilon": _Number(("rms_norm_eps",), 1e-30, 1.0, False),
}
_ROTARY = {
    "rope_theta": _Number(("rope_theta",), 1.0, 1e15, False),
    "partial_rotary_factor": _Number(("partial_rotary_factor",), 1e-6, 1.0, False),
}
_FLAGS = {
    "has_qk_norm": "use_qk_norm",
    "has_attention_bias": "attention_bias",
    "normalise_weights": "norm_topk_prob",
    "tied_embeddings": "tie_word_embeddings",
}
_GENERATION_REALS = {
    "temperature": _Number(("temperature",), 0.0, 100.0, False),
    "top_p": _Number(("top_p",), 1e-9, 1.0, False),
    "min_p": _Number(("min_p",), 0.0, 1.0, False),
    "repetition_penalty": _Number(("repetition_penalty",), 1e-3, 1e3, False),
}
_GENERATION_TOP_K = _Number(("top_k",), 0, MAX_MATRIX_SIDE)
_GENERATION_KNOWN = {
    *_GENERATION_REALS,
    "top_k",
    "do_sample",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "transformers_version",
    "_from_model_config",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
}
_MTP_LAYERS = _Number(("num_nextn_predict_layers", "num_mtp_layers"), 0, 64)


@dataclass(frozen=True)
class _Relation:
    """A condition between fields, checked once all of them were read."""

    fields: tuple[str, ...]
    holds: Callable[..., bool]
    text: str


_RELATIONS = (
    _Relation(
        ("num_dense_layers", "num_layers"),
        lambda dense, layers: dense <= layers,
        "first_k_dense_replace {num_dense_layers} is more than num_hidden_layers {num_layers}",
    ),
    _Relation(
        ("num_layers", "num_experts"),
        lambda layers, experts: layers * experts <= 2**20,
        "num_hidden_layers {num_layers} x n_routed_experts {num_experts} is beyond any model known",
    ),
    _Relation(
        ("num_heads", "num_kv_heads"),
        lambda heads, kv_heads: heads % kv_heads == 0,
        "num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
    ),
    _Relation(
        ("num_heads", "head_dim"),
        lambda heads, head_dim: heads * head_dim <= MAX_MATRIX_SIDE,
        "num_attention_heads {num_heads} x head_dim {head_dim} is beyond any model known",
    ),
    _Relation(
        ("shared_experts", "expert_width"),
        lambda shared, width: shared * width <= MAX_MATRIX_SIDE,
        "n_shared_experts {shared_experts} x moe_intermediate_size {expert_width} is beyond any model known",
    ),
    _Relation(
        ("experts_per_token", "num_experts"),
        lambda chosen, experts: chosen <= experts,
        "num_experts_per_tok {experts_per_token} is more than n_routed_experts {num_experts}",
    ),
    _Relation(
        ("head_dim", "partial_rotary_factor"),
        lambda head_dim, factor: _rotary_dim(head_dim, factor) is not None,
        "head_dim {head_dim} x partial_rotary_factor {partial_rotary_factor} is not a positive even whole number",
    ),
)


def _rotary_dim(head_dim: int, factor: float) -> int | None:
    rotated = round(head_dim * factor)
    is_whole = abs(head_dim * factor - rotated) < 1e-6
    return rotated if is_whole and rotated >= 2 and rotated % 2 == 0 else None


class _Fields:
    """Reads fields of one document and collects what is wrong with them."""

    def __init__(self, document: dict[str, Any], source: str) -> None:
        self.document = document
        self.source = source
        self.problems: list[str] = []

    def report(self, text: str) -> None:
        """Note one problem of this file."""
        self.problems.append(f"{self.source}: {text}")

    def find(self, spellings: tuple[str, ...], places: tuple[dict[str, Any], ...] | None = None) -> Any:
        """Give the value under any of the spellings; None when absent; report it when two of them disagree."""
        searched = (self.document,) if places is None else places
        found = [place[name] for place in searched for name in spellings if place.get(name) is not None]
        if any(value != found[0] for value in found[1:]):
            self.report(f"{' / '.join(spellings)} is given more than once with different values: {found}")
        return found[0] if found else None

    def number(self, rule: _Number, places: tuple[dict[str, Any], ...] | None = None) -> int | float | None:
        """Read a required number; None, with a problem, when it is missing or out of range."""
        value = self.find(rule.spellings, places)
        name = rule.spellings[0]
        if value is None:
            self.report(f"{name} is missing; the engine does not guess it, take the model's own {self.source}")
            return None
        if type(value) is not int and (rule.is_integer or type(value) is not float):
            kind = "an integer" if rule.is_integer else "a number"
            self.report(f"{name} is {value!r}, {kind} is needed")
            return None
        if not (rule.minimum <= value <= rule.maximum):
            self.report(f"{name} is {value!r}, it must lie between {rule.minimum:g} and {rule.maximum:g}")
            return None
        return value if rule.is_integer else float(value)

    def flag(self, name: str) -> bool | None:
        """Read a required truth value; None, with a problem, when it is missing or something else."""
        value = self.document.get(name)
        if value is None:
            self.report(f"{name} is missing; the engine does not guess it, take the model's own {self.source}")
            return None
        if type(value) is not bool:
            self.report(f"{name} is {value!r}, true or false is needed")
            return None
        return value

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """Read a token id or a list of them; None when the field is absent or null."""
        value = self.document.get(name)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < MAX_MATRIX_SIDE for token in ids):
            self.report(f"{name} is {value!r}, a token id or a list of token ids is needed")
            return None
        return tuple(ids)

    def optional_number(self, name: str, rule: _Number) -> int | float | None:
        """Read a number that may be absent or null."""
        return None if self.document.get(name) is None else self.number(rule)


def _check_identity(fields: _Fields) -> None:
    model_type = fields.document.get("model_type")
    if model_type != MODEL_TYPE:
        hint = " (GLM-4.7-Flash is another architecture)" if model_type == "glm4_moe_lite" else ""
        fields.report(f"model_type is {model_type!r}{hint}, this engine runs {MODEL_TYPE!r} only: GLM-4.5, 4.6, 4.7")
    architectures = fields.document.get("architectures")
    if architectures != [ARCHITECTURE]:
        fields.report(f"architectures is {architectures!r}, [{ARCHITECTURE!r}] is needed")


def _check_arithmetic(fields: _Fields) -> None:
    rules: dict[str, tuple[str | None, ...]] = {
        "hidden_act": ("silu",),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "moe_router_dtype": (None, "float32"),
    }
    for name, allowed in rules.items():
        value = fields.document.get(name)
        if value not in allowed:
            fields.report(f"{name} is {value!r}, the engine computes {allowed[-1]!r} only")
    for name in ("n_group", "topk_group"):
        value = fields.document.get(name)
        if type(value) is not int or value != 1:
            fields.report(
                f"{name} is {value!r}, 1 is needed: this engine does not choose experts in groups, and no GLM-4.5, 4.6 "
                f"or 4.7 does; take the model's own {fields.source}"
            )
    dtype = fields.find(("dtype", "torch_dtype"))
    if dtype != "bfloat16":
        fields.report(f"dtype (or torch_dtype) is {dtype!r}, 'bfloat16' is needed")


def _rotary_places(fields: _Fields) -> tuple[dict[str, Any], ...]:
    places = [fields.document]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for name in ("rope_parameters", "rope_scaling"):
        section = fields.document.get(name)
        if section is None:
            continue
        if not isinstance(section, dict):
            fields.report(f"{name} is {section!r}, an object or null is needed")
            continue
        kind = section.get("rope_type", section.get("type", "default"))
        unknown = sorted(key for key, value in section.items() if key not in known and value is not None)
        if kind != "default":
            fields.report(f"{name} asks for {kind!r} rotary scaling, only null or 'default' is supported; remove it")
        elif unknown:
            fields.report(f"{name} holds {', '.join(unknown)}, which the engine does not know; remove it")
        places.append(section)
    return tuple(places)


def _read_values(fields: _Fields) -> dict[str, Any]:
    places = _rotary_places(fields)
    values: dict[str, Any] = {name: fields.number(rule) for name, rule in (_INTEGERS | _REALS).items()}
    values |= {name: fields.number(rule, places) for name, rule in _ROTARY.items()}
    values |= {name: fields.flag(spelling) for name, spelling in _FLAGS.items()}
    for relation in _RELATIONS:
        arguments = [values[name] for name in relation.fields]
        if None not in arguments and not relation.holds(*arguments):
            fields.report(relation.text.format(**values))
    return values


def _read_mtp_vocab_size(fields: _Fields, vocab_size: int | None) -> int | float | None:
    """The number of tokens, counted from id 0, among which the MTP layer drafts; all where the file does not say."""
    rule = _Number(("mtp_vocab_size",), 1, vocab_size or MAX_MATRIX_SIDE)
    return vocab_size if fields.find(rule.spellings) is None else fields.number(rule)


def parse_config(document: dict[str, Any], source: str = CONFIG_NAME) -> ModelConfig:
    """Turn a config.json document into a ModelConfig.

    Raises CheckpointError with every problem: missing fields, wrong types, sizes that do not fit together, and
    whatever the engine cannot compute.
    """
    fields = _Fields(document, source)
    _check_identity(fields)
    _check_arithmetic(fields)
    values = _read_values(fields)
    quantisation = read_quantisation(document.get("quantization_config"), fields.problems)
    if "eos_token_id" not in document:
        fields.report("eos_token_id is missing; write null to say that there is none")
    eos_token_ids = fields.token_ids("eos_token_id") or ()
    pad_token_ids = fields.token_ids("pad_token_id") or ()
    mtp_layers = fields.number(_MTP_LAYERS) if fields.find(_MTP_LAYERS.spellings) is not None else 0
    vocab_size = values["vocab_size"]
    values["mtp_vocab_size"] = _read_mtp_vocab_size(fields, vocab_size)
    for name, ids in (("eos_token_id", eos_token_ids), ("pad_token_id", pad_token_ids)):
        outside = [token for token in ids if vocab_size is not None and token >= vocab_size]
        if outside:
            fields.report(f"{name} holds {outside}, outside of vocab_size {vocab_size}")
    if fields.problems:
        raise CheckpointError(*fields.problems)
    factor = values.pop("partial_rotary_factor")
    shared_experts = values.pop("shared_experts")
    return ModelConfig(
        **values,
        rotary_dim=round(values["head_dim"] * factor),
        shared_width=shared_experts * values["expert_width"],
        weight_scale_kind=quantisation.scale_kind,
        input_group_size=quantisation.input_group_size,
        scale_suffix=quantisation.scale_suffix,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_ids[0] if pad_token_ids else None,
        dtype="bfloat16",
        mtp_layers=int(mtp_layers or 0),
        architecture=ARCHITECTURE,
    )


def parse_generation(document: dict[str, Any], source: str = GENERATION_NAME) -> GenerationConfig:
    """Turn a generation_config.json document into a GenerationConfig; raise CheckpointError with every problem."""
    fields = _Fields(document, source)
    top_k = fields.optional_number("top_k", _GENERATION_TOP_K)
    reals = {name: fields.optional_number(name, rule) for name, rule in _GENERATION_REALS.items()}
    if document.get("do_sample") is not None and fields.flag("do_sample") is False:
        reals["temperature"] = 0.0
    generation = GenerationConfig(
        **reals,
        eos_token_ids=fields.token_ids("eos_token_id"),
        top_k=None if top_k is None else int(top_k),
        unused=tuple(name for name, value in document.items() if value is not None and name not in _GENERATION_KNOWN),
    )
    if fields.problems:
        raise CheckpointError(*fields.problems)
    return generation


def read_config(folder: Path) -> ModelConfig:
    """Read config.json of a model folder; raise CheckpointError with every problem."""
    return parse_config(read_object(folder / CONFIG_NAME))


def read_generation(folder: Path) -> GenerationConfig:
    """Read generation_config.json of a model folder; a folder without one asks for nothing."""
    path = folder / GENERATION_NAME
    if not path.exists():
        return GenerationConfig()
    return parse_generation(read_object(path))
