"""The FP8 format that a checkpoint's quantization_config describes."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

TILE_SIZE = 128


class ScaleKind(IntEnum):
    """The weights that share one scale; numbered as GLINT_SCALE_ in glint.h."""

    NONE = 0
    CHANNEL = 1
    TENSOR = 2
    TILE = 3


@dataclass(frozen=True)
class Quantisation:
    """How the layer projections are stored, and how their inputs are quantised.

    `scale_suffix` is the last part of a scale tensor's name, None in an unquantised checkpoint. `input_group_size` is
    how many values of an input row share a scale, 0 where the whole row does.
    """

    scale_kind: ScaleKind
    scale_suffix: str | None
    input_group_size: int = 0


UNQUANTISED = Quantisation(ScaleKind.NONE, None)

_SCALE_KINDS = {"channel": ScaleKind.CHANNEL, "tensor": ScaleKind.TENSOR, "block": ScaleKind.TILE}
_SUPPORTED = (
    "glint reads compressed-tensors float-quantized FP8 with weight scales per channel, tensor or 128x128, "
    "and the fp8 method with weight_block_size [128, 128]; use such a checkpoint or the BF16 one"
)
_EMPTY: tuple[Any, ...] = (None, {}, [])


def read_quantisation(section: Any, problems: list[str]) -> Quantisation:
    """Read the quantization_config of a config.json; None means that there is none.

    Appends to `problems` a line for every value that the engine cannot compute with.
    """
    if section is None:
        return UNQUANTISED
    found: list[str] = []
    quantisation = UNQUANTISED
    if not isinstance(section, dict):
        found.append(f"quantization_config is {section!r}, an object is needed")
    elif section.get("quant_method") == "compressed-tensors":
        quantisation = _read_compressed_tensors(section, found)
    elif section.get("quant_method") == "fp8":
        _check_fp8_method(section, found)
        quantisation = Quantisation(ScaleKind.TILE, "weight_scale_inv", input_group_size=TILE_SIZE)
    else:
        found.append(f"quantization_config.quant_method is {section.get('quant_method')!r}, which is not supported")
    if found:
        problems.extend(f"config.json: {problem}" for problem in found)
        problems.append(f"config.json: quantization_config: {_SUPPORTED}")
    return quantisation


def _expect(section: dict[str, Any], where: str, field: str, allowed: tuple[Any, ...], problems: list[str]) -> None:
    value = section.get(field)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        wanted = " or ".join("null" if choice is None else repr(choice) for choice in allowed)
        problems.append(f"{where}.{field} is {value!r}, the engine needs {wanted}")


def _check_fp8_method(section: dict[str, Any], problems: list[str]) -> None:
    where = "quantization_config"
    _expect(section, where, "weight_block_size", ([TILE_SIZE, TILE_SIZE],), problems)
    _expect(section, where, "activation_scheme", ("dynamic",), problems)
    _expect(section, where, "fmt", (None, "e4m3"), problems)
    _expect(section, where, "scale_fmt", (None, "float"), problems)
    _expect(section, where, "expert_dtype", (None, "fp8"), problems)
    _expect(section, where, "kv_cache_scheme", (None,), problems)


def _read_compressed_tensors(section: dict[str, Any], problems: list[str]) -> Quantisation:
    where = "quantization_config"
    _expect(section, where, "format", ("float-quantized",), problems)
    _expect(section, where, "kv_cache_scheme", _EMPTY, problems)
    _expect(section, where, "transform_config", _EMPTY, problems)
    sparsity = section.get("sparsity_config")
    if sparsity not in _EMPTY and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        problems.append(f"{where}.sparsity_config is {sparsity!r}, only dense weights are supported")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        count = len(groups) if isinstance(groups, dict) else 0
        problems.append(f"{where}.config_groups holds {count} groups, exactly one is needed for all projections")
        return UNQUANTISED
    name, group = next(iter(groups.items()))
    where = f"{where}.config_groups.{name}"
    if not isinstance(group, dict):
        problems.append(f"{where} is {group!r}, an object is needed")
        return UNQUANTISED
    _expect(group, where, "format", (None, "float-quantized"), problems)
    _expect(group, where, "output_activations", (None,), problems)
    kind = _read_weights(group.get("weights"), f"{where}.weights", problems)
    group_size = _read_activations(group.get("input_activations"), f"{where}.input_activations", kind, problems)
    return Quantisation(kind, "weight_scale", group_size)


def _read_weights(weights: Any, where: str, problems: list[str]) -> ScaleKind:
    if not isinstance(weights, dict):
        problems.append(f"{where} is {weights!r}, an object is needed")
        return ScaleKind.NONE
    _expect(weights, where, "num_bits", (8,), problems)
    _expect(weights, where, "type", ("float",), problems)
    _expect(weights, where, "symmetric", (True,), problems)
    _expect(weights, where, "dynamic", (False,), problems)
    _expect(weights, where, "strategy", tuple(_SCALE_KINDS), problems)
    _expect(weights, where, "group_size", (None,), problems)
    _expect(weights, where, "actorder", (None, False), problems)
    strategy = weights.get("strategy")
    kind = _SCALE_KINDS.get(strategy, ScaleKind.NONE) if isinstance(strategy, str) else ScaleKind.NONE
    tile = [TILE_SIZE, TILE_SIZE] if kind is ScaleKind.TILE else None
    _expect(weights, where, "block_structure", (tile,), problems)
    return kind


def _read_activations(activations: Any, where: str, kind: ScaleKind, problems: list[str]) -> int:
    """How many values of an input row share a scale, 0 where the whole row does."""
    if not isinstance(activations, dict):
        problems.append(f"{where} is {activations!r}, dynamic FP8 activations are needed")
        return 0
    _expect(activations, where, "num_bits", (8,), problems)
    _expect(activations, where, "type", ("float",), problems)
    _expect(activations, where, "symmetric", (True,), problems)
    _expect(activations, where, "dynamic", (True,), problems)
    _expect(activations, where, "strategy", ("token", "group") if kind is ScaleKind.TILE else ("token",), problems)
    grouped = activations.get("strategy") == "group"
    _expect(activations, where, "group_size", (TILE_SIZE,) if grouped else (None,), problems)
    return TILE_SIZE if grouped else 0
