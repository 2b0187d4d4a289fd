"""Routed experts and the grouping of tokens by expert on CUDA, and what the CPU operations make of the same inputs."""

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tests.cpu.operations import CACHE_DTYPES, SCALE_KINDS, GemmCase, Operations, StoredWeight, pointer, poisoned
from tests.cpu.testing_library import declare
from tests.gpu.operations_cuda import CudaOperations, padded_width
from tests.gpu.operations_inputs import normal_rows, random_fp8, row_scales, source
from tests.reference.numpy_ops import FloatArray, ScaleKind, bf16_bits, round_bf16

IntArray = NDArray[np.int32]
GEMMS_AT_ONCE = 32
E4M3_DTYPE = 3
FEW_TOKENS = 64
UNUSABLE_EXPERTS = (-1, 1 << 20, 2**31 - 1, -(2**31))
_FLOATS = POINTER(c_float)
_INTS = POINTER(c_int32)


class _Grouping(Structure):
    _fields_ = [
        ("row_tokens", _INTS),
        ("row_weights", _FLOATS),
        *((name, _INTS) for name in ("gate_up_tiles", "down_tiles", "counts", "row_places", "experts")),
        ("weights", _FLOATS),
        *((name, c_int64) for name in ("num_tokens", "max_tiles")),
        *((name, c_int32) for name in ("experts_per_token", "expert_first", "expert_last", "has_shared")),
        *((name, c_int32) for name in ("num_real_tokens", "is_in_expert_order")),
    ]


class _Experts(Structure):
    _fields_ = [
        *((name, _FLOATS) for name in ("hidden", "gate", "up", "fp8", "fp8_scales", "routed", "out", "values")),
        *((name, c_void_p) for name in ("gate_weights", "up_weights", "down_weights")),
        *((name, _FLOATS) for name in ("gate_scales", "up_scales", "down_scales", "shared")),
        ("grouping", POINTER(_Grouping)),
        *((name, c_int64) for name in ("hidden_size", "width")),
        *((name, c_int32) for name in ("dtype", "scale_kind")),
    ]


@dataclass(frozen=True)
class ExpertLayout:
    """Experts first to last of all on one rank; for the tiled family the shared expert is one more matrix."""

    num_experts: int
    first: int
    last: int
    hidden_size: int
    width: int
    experts_per_token: int
    is_tiled: bool
    kind: ScaleKind | None = "channel"

    @property
    def num_local(self) -> int:
        """Experts of this rank."""
        return self.last - self.first

    @property
    def num_matrices(self) -> int:
        """Matrices of each kind."""
        return self.num_local + int(self.is_tiled)


@dataclass(frozen=True)
class ExpertWeights:
    """Gate, up and down of every matrix, [matrices, rows, cols] with scales [matrices, rows or tiles]."""

    gate: StoredWeight
    up: StoredWeight
    down: StoredWeight

    def one(self, name: str, matrix: int) -> StoredWeight:
        """One matrix."""
        all_of = getattr(self, name)
        scale = None if all_of.scale is None else all_of.scale[matrix]
        return StoredWeight(all_of.data[matrix], scale, all_of.kind)


@cache
def make_weights(layout: ExpertLayout) -> ExpertWeights:
    """Fresh random weights."""
    numbers = source(layout.num_experts, layout.width, layout.hidden_size)

    def matrices(rows: int, cols: int) -> StoredWeight:
        shape = (layout.num_matrices, rows, cols)
        if layout.kind is None:
            return StoredWeight(bf16_bits(numbers.standard_normal(shape, np.float32) * np.float32(cols**-0.5)))
        tiles = (-(-rows // 128), -(-cols // 128)) if layout.kind == "tile" else (rows,)
        scale = row_scales(numbers, cols, layout.num_matrices, *tiles)
        return StoredWeight(random_fp8(numbers, *shape), scale, layout.kind)

    hidden, width = layout.hidden_size, layout.width
    return ExpertWeights(matrices(width, hidden), matrices(width, hidden), matrices(hidden, width))


@dataclass(frozen=True)
class GroupedRows:
    """Rows by (local expert, token): their tokens, experts and weights."""

    tokens: IntArray
    experts: IntArray
    weights: FloatArray

    def places(self) -> dict[tuple[int, int], int]:
        """Row of (local expert, token)."""
        pairs = zip(self.experts.tolist(), self.tokens.tolist(), strict=True)
        return {pair: row for row, pair in enumerate(pairs)}


@dataclass(frozen=True)
class Choices:
    """Experts, ascending, and weights [tokens, experts_per_token]; from num_real on nothing there is usable."""

    experts: IntArray
    weights: FloatArray
    num_real: int

    def grouped(self, layout: ExpertLayout) -> GroupedRows:
        """The rows of this rank, with those of the shared expert last."""
        real = self.experts[: self.num_real]
        tokens = np.repeat(np.arange(self.num_real, dtype=np.int32), layout.experts_per_token)
        experts, weights = real.ravel() - layout.first, self.weights[: self.num_real].ravel()
        kept = (experts >= 0) & (experts < layout.num_local)
        tokens, experts, weights = tokens[kept], experts[kept], weights[kept]
        order = np.lexsort((tokens, experts))
        rows = GroupedRows(tokens[order], experts[order].astype(np.int32), weights[order])
        if not layout.is_tiled:
            return rows
        shared = np.arange(self.num_real, dtype=np.int32)
        return GroupedRows(
            np.concatenate([rows.tokens, shared]),
            np.concatenate([rows.experts, np.full_like(shared, layout.num_local)]),
            np.concatenate([rows.weights, np.ones(len(shared), np.float32)]),
        )


def make_choices(layout: ExpertLayout, count: int, num_real: int) -> Choices:
    """Random different experts of every token."""
    numbers = source(count, num_real, layout.num_experts)
    ranked = numbers.random((count, layout.num_experts)).argsort(axis=1)[:, : layout.experts_per_token]
    experts = np.sort(ranked, axis=1).astype(np.int32)
    weights = numbers.uniform(0.05, 0.6, experts.shape).astype(np.float32)
    experts[num_real:] = numbers.choice(np.array(UNUSABLE_EXPERTS, np.int32), experts[num_real:].shape)
    weights[num_real:] = np.nan
    return Choices(experts, weights, num_real)


@dataclass(frozen=True)
class Grouping:
    """What CUDA's grouping gives, as the library takes it and as arrays."""

    row_tokens: IntArray
    row_weights: FloatArray
    gate_up_tiles: IntArray
    down_tiles: IntArray
    counts: IntArray
    row_places: IntArray
    native: _Grouping


def new_grouping(layout: ExpertLayout, choices: Choices, is_in_expert_order: bool = False) -> Grouping:
    """Room for the grouping of these choices, whose gate_up tiles go by size or, where asked for, by expert."""
    count, per_token = choices.experts.shape
    native = _Grouping(
        experts=pointer(choices.experts, _INTS),
        weights=pointer(choices.weights),
        num_tokens=count,
        experts_per_token=per_token,
        expert_first=layout.first,
        expert_last=layout.last,
        has_shared=layout.is_tiled,
        num_real_tokens=choices.num_real,
        is_in_expert_order=is_in_expert_order,
    )
    most = declare("glint_testing_most_tiles", c_int64, POINTER(_Grouping), device="cuda")(byref(native))
    rows = count * (per_token + 1)
    room = Grouping(
        np.full(rows, -1, np.int32),
        poisoned(rows),
        np.full((most, 4), -1, np.int32),
        np.full((most, 4), -1, np.int32),
        np.full(3, -1, np.int32),
        np.full(min(count, FEW_TOKENS) * (per_token + 1), -1, np.int32),
        native,
    )
    native.row_tokens, native.row_weights = pointer(room.row_tokens, _INTS), pointer(room.row_weights)
    native.gate_up_tiles, native.down_tiles = pointer(room.gate_up_tiles, _INTS), pointer(room.down_tiles, _INTS)
    native.counts, native.max_tiles = pointer(room.counts, _INTS), most
    native.row_places = pointer(room.row_places, _INTS)
    return room


@dataclass(frozen=True)
class ExpertCase:
    """Tokens [count, hidden] with their choices, on experts of a layout; shared [count, hidden] is added at the end."""

    layout: ExpertLayout
    weights: ExpertWeights
    rows: FloatArray
    choices: Choices
    shared: FloatArray


@dataclass(frozen=True)
class ExpertResult:
    """What CUDA computed: grouped rows of gate, up, SwiGLU (`inputs`, as down takes them) and down, and the sum.

    `fp8` and `fp8_scales` are those of the inputs, none for BF16. `touched` is the number of experts that the tiled
    family says it read.
    """

    gate: FloatArray
    up: FloatArray
    inputs: FloatArray
    fp8: FloatArray
    fp8_scales: FloatArray
    routed: FloatArray
    out: FloatArray
    touched: int


def make_case(layout: ExpertLayout, weights: ExpertWeights, count: int, num_real: int) -> ExpertCase:
    """Fresh tokens and choices."""
    numbers = source(count, layout.hidden_size)
    rows = normal_rows(numbers, count, layout.hidden_size)
    shared = normal_rows(numbers, count, layout.hidden_size)
    rows = round_bf16(rows) if layout.kind is None else rows
    return ExpertCase(layout, weights, rows, make_choices(layout, count, num_real), shared)


def run_experts(
    cuda: CudaOperations, case: ExpertCase, row_counts: bool = False, is_in_expert_order: bool = False
) -> ExpertResult:
    """Run a case; with row_counts compare row i of 1, 2, 3 and so on up to all tokens with that of all."""
    layout, count = case.layout, len(case.rows)
    pairs = count * layout.experts_per_token
    width, hidden = layout.width, layout.hidden_size
    fp8_shape = (pairs + count, width) if layout.is_tiled else (pairs, padded_width(width))
    arrays = {
        "hidden": poisoned(pairs + count, width),
        "gate": poisoned(pairs, width),
        "up": poisoned(pairs, width),
        "fp8": poisoned(*fp8_shape),
        "fp8_scales": poisoned(fp8_shape[0]),
        "routed": poisoned(pairs, hidden),
        "out": poisoned(count, hidden),
    }
    grouping = new_grouping(layout, case.choices, is_in_expert_order)
    native = _Experts(
        **{name: pointer(array) for name, array in arrays.items()},
        **{f"{name}_weights": getattr(case.weights, name).data.ctypes.data for name in ("gate", "up", "down")},
        **{f"{name}_scales": pointer(getattr(case.weights, name).scale) for name in ("gate", "up", "down")},
        values=pointer(case.rows),
        shared=pointer(case.shared),
        grouping=POINTER(_Grouping)(grouping.native),
        hidden_size=hidden,
        width=width,
        dtype=CACHE_DTYPES["bf16"] if layout.kind is None else E4M3_DTYPE,
        scale_kind=0 if layout.kind is None else SCALE_KINDS[layout.kind],
    )
    family = "tiled" if layout.is_tiled else "portable"
    cuda.call(f"glint_testing_{family}_expert_row_counts" if row_counts else f"glint_testing_{family}_experts", native)
    inputs = arrays["hidden"]
    if not layout.is_tiled and layout.kind is None:
        inputs = arrays["gate"]
    elif not layout.is_tiled:
        inputs = arrays["fp8"][:, :width] * arrays["fp8_scales"][:, None]
    touched = int(grouping.counts[2])
    kept = {name: arrays[name] for name in ("gate", "up", "fp8", "fp8_scales", "routed", "out")}
    return ExpertResult(inputs=inputs, touched=touched, **kept)


@dataclass(frozen=True)
class ExpectedExperts:
    """Rows of the CPU: which grouped rows they are, their gate, up, SwiGLU and down, and the sums of some tokens."""

    places: IntArray
    gate: FloatArray
    up: FloatArray
    gated: FloatArray
    routed: FloatArray
    out: FloatArray


def _run_gemms(operations: Operations, cases: list[GemmCase], width: int) -> FloatArray:
    parts = [cases[first : first + GEMMS_AT_ONCE] for first in range(0, len(cases), GEMMS_AT_ONCE)]
    results = [result for part in parts for result in operations.gemms(part)]
    return np.concatenate([np.empty((0, width), np.float32), *results])


def expect_experts(operations: Operations, case: ExpertCase, tokens: IntArray, inputs: FloatArray) -> ExpectedExperts:
    """What the CPU makes of some tokens; its down GEMM takes CUDA's inputs, so that errors do not add up."""
    layout = case.layout
    grouped = case.choices.grouped(layout)
    wanted = np.isin(grouped.tokens, tokens)
    chosen = np.flatnonzero(wanted)
    by_expert = [chosen[grouped.experts[chosen] == expert] for expert in np.unique(grouped.experts[chosen])]
    matrices = [int(grouped.experts[rows[0]]) for rows in by_expert]
    first_inputs = [case.rows[grouped.tokens[rows]] for rows in by_expert]
    down_inputs = [round_bf16(inputs[rows]) if layout.kind is None else inputs[rows] for rows in by_expert]

    def gemm(name: str, rows: list[FloatArray]) -> FloatArray:
        pairs = zip(rows, matrices, strict=True)
        cases = [GemmCase(part, case.weights.one(name, matrix)) for part, matrix in pairs]
        return _run_gemms(operations, cases, getattr(case.weights, name).data.shape[1])

    gate, up = gemm("gate", first_inputs), gemm("up", first_inputs)
    routed = gemm("down", down_inputs)
    places = np.concatenate([np.empty(0, np.int64), *by_expert]).astype(np.int32)
    row_of = {place: row for row, place in enumerate(places.tolist())}
    by_pair = grouped.places()
    experts = case.choices.experts[tokens]
    routed_rows = np.zeros(experts.shape, np.int32)
    for index, token in enumerate(tokens.tolist()):
        for choice, expert in enumerate(experts[index].tolist()):
            if layout.first <= expert < layout.last:
                routed_rows[index, choice] = row_of[by_pair[expert - layout.first, token]]
    shared = case.shared[tokens]
    if layout.is_tiled:
        shared = routed[[row_of[by_pair[layout.num_local, token]] for token in tokens.tolist()]]
    weights = np.ascontiguousarray(case.choices.weights[tokens])
    out = operations.combine(routed, routed_rows, weights, experts, shared, (layout.first, layout.last))
    gated = operations.swiglu(gate, up)
    return ExpectedExperts(places, gate, up, gated, routed, out)
