"""Every operation of the model as a NumPy sentence in float64, rounded where the arithmetic says so.

Arrays named ``row`` or ``rows`` hold float32 values unless a docstring says otherwise; results are float32 arrays.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
WideArray = NDArray[np.float64]
Fp8Array = NDArray[np.uint8]
ScaleKind = Literal["channel", "tensor", "tile"]

E4M3_MAX = 448.0
SCALE_TILE = 128


def round_bf16(values: NDArray) -> FloatArray:
    """Round to float32, then to bfloat16 with ties to even; finite input only."""
    return (bf16_bits(values).astype(np.uint32) << 16).view(np.float32)


def bf16_bits(values: NDArray) -> NDArray[np.uint16]:
    """Bits of the bfloat16 numbers nearest to finite values, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _decode_table() -> WideArray:
    fp8 = np.arange(256)
    exponent, mantissa = (fp8 >> 3) & 15, fp8 & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(fp8 & 127) == 127] = np.nan
    return np.where(fp8 >= 128, -magnitude, magnitude)


E4M3_VALUES = _decode_table()


def decode_e4m3(fp8: Fp8Array) -> WideArray:
    """Numbers of E4M3 bytes; 0x7F and 0xFF are NaN."""
    return E4M3_VALUES[fp8]


def encode_e4m3(values: NDArray) -> Fp8Array:
    """E4M3 nearest to the values, ties to even, saturated at 448."""
    wide = np.asarray(values, dtype=np.float64)
    if not np.isfinite(wide).all():
        raise ValueError("E4M3 is made of finite values only; the input holds NaN or infinity")
    magnitude = np.minimum(np.abs(wide), E4M3_MAX)
    exponent = np.frexp(np.maximum(magnitude, 2.0**-6))[1] - 1
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)
    return ((exponent + 6) * 8 + steps + np.where(np.signbit(wide), 128, 0)).astype(np.uint8)


def rms_norm(rows: FloatArray, weight: FloatArray, epsilon: float) -> FloatArray:
    """f32(weight * row / sqrt(mean(row^2) + epsilon)) over the last axis."""
    wide = rows.astype(np.float64)
    mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
    return (weight.astype(np.float64) * wide / np.sqrt(mean_square + epsilon)).astype(np.float32)


@dataclass(frozen=True)
class QuantisedRows:
    """E4M3 values [rows, cols] with one float32 scale per row and slice [rows, slices]."""

    fp8: Fp8Array
    scales: FloatArray

    def values(self) -> WideArray:
        """Exact float64 numbers: FP8 value times scale."""
        width = self.fp8.shape[1] // self.scales.shape[1]
        return decode_e4m3(self.fp8) * np.repeat(self.scales.astype(np.float64), width, axis=1)


def quantise(rows: FloatArray, row_slices: int = 1) -> QuantisedRows:
    """Quantise each 1/row_slices of each row of [rows, cols] by its absolute maximum over 448."""
    count, cols = rows.shape
    if cols % row_slices != 0:
        raise ValueError(f"a row of {cols} values cannot be cut into {row_slices} slices; choose a divisor")
    sliced = rows.reshape(count, row_slices, cols // row_slices)
    largest = np.max(np.abs(sliced), axis=2)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(E4M3_MAX)).astype(np.float32)
    fp8 = encode_e4m3(sliced / scales[:, :, None])
    return QuantisedRows(fp8=fp8.reshape(count, cols), scales=scales)


@dataclass(frozen=True)
class GroupedRows:
    """E4M3 values [rows, cols] with one float32 scale per row and group of 128 columns [rows, groups]."""

    fp8: Fp8Array
    scales: FloatArray

    def values(self) -> WideArray:
        """Exact float64 numbers: FP8 value times scale."""
        scales = np.repeat(self.scales.astype(np.float64), SCALE_TILE, axis=1)
        return decode_e4m3(self.fp8) * scales[:, : self.fp8.shape[1]]


def quantise_groups(rows: FloatArray) -> GroupedRows:
    """Quantise each group of 128 columns of each row, the last of what is left, by its absolute maximum over 448."""
    cols = rows.shape[1]
    groups = -(-cols // SCALE_TILE)
    padded = quantise(np.pad(rows, ((0, 0), (0, groups * SCALE_TILE - cols))), row_slices=groups)
    return GroupedRows(padded.fp8[:, :cols], padded.scales)


def expand_scale(scale: FloatArray, kind: ScaleKind, rows: int, cols: int) -> WideArray:
    """Scale of every element [rows, cols] of a weight from its stored scale of the given kind."""
    wide = scale.astype(np.float64)
    if kind == "channel":
        return np.broadcast_to(wide.reshape(rows, 1), (rows, cols))
    if kind == "tensor":
        return np.broadcast_to(wide.reshape(1, 1), (rows, cols))
    return np.repeat(np.repeat(wide, SCALE_TILE, axis=0)[:rows], SCALE_TILE, axis=1)[:, :cols]


def gemm_bf16(rows: FloatArray, weight: FloatArray, bias: FloatArray | None = None) -> FloatArray:
    """f32(rows @ weight.T + bias), the sum in float64; weight [out, in] holds bfloat16 values."""
    result = rows.astype(np.float64) @ weight.astype(np.float64).T
    return _add_bias(result, bias)


def gemm_fp8(
    rows: QuantisedRows, fp8: Fp8Array, scale: FloatArray, kind: ScaleKind, bias: FloatArray | None = None
) -> FloatArray:
    """f32(sum of scaled values + bias) for quantised rows and E4M3 weight values [out, in].

    With several slices each slice sum is rounded to float32 and the slices are reduced; there is no bias then.
    """
    weight = decode_e4m3(fp8) * expand_scale(scale, kind, *fp8.shape)
    slices = rows.scales.shape[1]
    inputs = np.split(decode_e4m3(rows.fp8), slices, axis=1)
    weights = np.split(weight, slices, axis=1)
    scales = rows.scales.astype(np.float64)
    sums = [scales[:, i : i + 1] * (inputs[i] @ weights[i].T) for i in range(slices)]
    if slices == 1:
        return _add_bias(sums[0], bias)
    return reduce_slices([part.astype(np.float32) for part in sums])


def gemm_groups(
    rows: GroupedRows, fp8: Fp8Array, scale: FloatArray, kind: ScaleKind, bias: FloatArray | None = None
) -> FloatArray:
    """f32(sum of scaled values + bias) for rows quantised by groups and E4M3 weight values [out, in]."""
    weight = decode_e4m3(fp8) * expand_scale(scale, kind, *fp8.shape)
    return _add_bias(rows.values() @ weight.T, bias)


def reduce_slices(parts: list[FloatArray]) -> FloatArray:
    """Sum of float32 slice results by one binary tree of neighbours, each addition rounded to float32."""
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def _add_bias(result: WideArray, bias: FloatArray | None) -> FloatArray:
    return (result if bias is None else result + bias.astype(np.float64)).astype(np.float32)


def rotary_table(positions: NDArray[np.int64], rotary_dim: int, theta: float) -> tuple[FloatArray, FloatArray]:
    """Cosine and sine [positions, rotary_dim / 2], made in float64 and rounded to float32."""
    inverse = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    angles = np.asarray(positions, dtype=np.float64)[:, None] * inverse[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotary(heads: FloatArray, positions: NDArray[np.int64], rotary_dim: int, theta: float) -> FloatArray:
    """Rotate the first rotary_dim dims of heads [tokens, heads, head_dim] in split halves, one rounding to float32."""
    cosine, sine = (part.astype(np.float64)[:, None, :] for part in rotary_table(positions, rotary_dim, theta))
    half = rotary_dim // 2
    wide = heads.astype(np.float64)
    first, second, rest = wide[:, :, :half], wide[:, :, half:rotary_dim], wide[:, :, rotary_dim:]
    turned = (first * cosine - second * sine, second * cosine + first * sine, rest)
    return np.concatenate(turned, axis=2).astype(np.float32)


def softmax_weights(scores: FloatArray) -> FloatArray:
    """f32(exp(score) / 2^k) with the least whole k that leaves no weight above 1."""
    wide = scores.astype(np.float64)
    exponent = np.ceil(wide.max() * np.log2(np.e))
    return np.exp(wide - exponent * np.log(2.0)).astype(np.float32)


def attention(
    query: FloatArray, key: FloatArray, value: FloatArray, positions: NDArray[np.int64], is_bf16: bool
) -> FloatArray:
    """Causal attention of query [tokens, heads, head_dim] at positions over key, value [context, kv_heads, head_dim].

    With is_bf16 query, key and value must already hold bfloat16 values and the softmax weights are rounded to
    bfloat16 above the line, not below it. Returns [tokens, heads, head_dim].
    """
    tokens, heads, head_dim = query.shape
    group = heads // key.shape[1]
    result = np.empty((tokens, heads, head_dim), dtype=np.float32)
    for token in range(tokens):
        allowed = int(positions[token]) + 1
        for head in range(heads):
            keys = key[:allowed, head // group].astype(np.float64)
            values = value[:allowed, head // group].astype(np.float64)
            scores = (keys @ query[token, head].astype(np.float64) * head_dim**-0.5).astype(np.float32)
            raw = softmax_weights(scores)
            weights = round_bf16(raw) if is_bf16 else raw
            result[token, head] = weights.astype(np.float64) @ values / raw.astype(np.float64).sum()
    return result


@dataclass(frozen=True)
class RouterRule:
    """How experts are chosen from their scores."""

    experts_per_token: int
    has_normalised_weights: bool
    routed_scaling: float


@dataclass(frozen=True)
class Routing:
    """Chosen experts [rows, experts_per_token], best first, and their weights of the same shape."""

    experts: NDArray[np.int64]
    weights: FloatArray


def route(rows: FloatArray, weight: FloatArray, bias: FloatArray, rule: RouterRule) -> Routing:
    """Choose experts by sigmoid score plus bias, lower index first among equals."""
    logits = gemm_bf16(rows, weight).astype(np.float64)
    scores = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    experts = _largest(scores + bias.astype(np.float32), rule.experts_per_token)
    picked = np.take_along_axis(scores, experts, axis=1).astype(np.float64)
    if rule.has_normalised_weights:
        picked = picked / (picked.sum(axis=1, keepdims=True) + 1e-20)
    return Routing(experts=experts, weights=(picked * rule.routed_scaling).astype(np.float32))


def _largest(values: NDArray, count: int) -> NDArray[np.int64]:
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def swiglu(gate: FloatArray, up: FloatArray) -> FloatArray:
    """f32(gate / (1 + exp(-gate)) * up)."""
    wide = gate.astype(np.float64)
    return (wide / (1.0 + np.exp(-wide)) * up.astype(np.float64)).astype(np.float32)


def combine(expert_outputs: FloatArray, weights: FloatArray, shared: FloatArray) -> FloatArray:
    """f32(sum of weights [rows, k] times outputs [rows, k, hidden] plus shared [rows, hidden])."""
    routed = np.einsum("tk,tkh->th", weights.astype(np.float64), expert_outputs.astype(np.float64))
    return (routed + shared.astype(np.float64)).astype(np.float32)


def add_residual(hidden: FloatArray, update: FloatArray) -> FloatArray:
    """f32(hidden + update)."""
    return hidden.astype(np.float32) + update.astype(np.float32)
