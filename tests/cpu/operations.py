"""The operations of the engine on arrays of the caller, through the testing functions of the library."""

from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from glint.native import abi
from tests.cpu.testing_library import declare
from tests.reference.numpy_ops import SCALE_TILE, FloatArray, RouterRule, ScaleKind

SCALE_KINDS: dict[ScaleKind, int] = {"channel": 1, "tensor": 2, "tile": 3}
CACHE_DTYPES = {"f32": 1, "bf16": 2}
Rounding = Literal["none", "fp8", "rounded"]
ROUNDINGS: dict[Rounding, int] = {"none": 0, "fp8": 1, "rounded": 2}
_E4M3_DTYPE = 3
_FLOATS = POINTER(c_float)
_INTS = POINTER(c_int32)


class _Shape(Structure):
    _fields_ = [(name, c_int64) for name in ("max_cols", "group_heads", "head_dim", "page_tokens")]


class OperandCall(Structure):
    """Rows to quantise and round, and where their FP8 values or numbers and scales go."""

    _fields_ = [
        *((name, _FLOATS) for name in ("out", "scales", "values")),
        *((name, c_int64) for name in ("count", "width")),
        *((name, c_int32) for name in ("row_slices", "has_fp8")),
        ("group_size", c_int64),
    ]


class _Gemm(Structure):
    _fields_ = [
        ("out", _FLOATS),
        ("values", _FLOATS),
        ("weight", c_void_p),
        ("scales", _FLOATS),
        ("bias", _FLOATS),
        ("input_rows", _INTS),
        *((name, c_int64) for name in ("out_stride", "input_count", "count", "weight_rows", "weight_cols")),
        *((name, c_int64) for name in ("row_first", "row_count", "col_first", "col_count")),
        *((name, c_int32) for name in ("dtype", "scale_kind")),
        ("group_size", c_int64),
    ]


class _Request(Structure):
    _fields_ = [(name, c_int32) for name in ("row_first", "row_count", "first_position", "context_first")]
    _fields_ += [("pages", _INTS)]


class PagesCall(Structure):
    """Pages of a cache and the requests of a step that hold them."""

    _fields_ = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("num_pages", "page_tokens", "layer")),
        *((name, c_int32) for name in ("dtype", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, c_int32) for name in ("rounding", "request_count")),
        ("requests", POINTER(_Request)),
    ]


class RotationCall(Structure):
    """Query, key and value rows, their norms, and the cosines and sines of their positions."""

    _fields_ = [
        *((name, _FLOATS) for name in ("query", "key", "value", "query_norm", "key_norm", "cosines", "sines")),
        ("norm_epsilon", c_double),
    ]


class _Combine(Structure):
    _fields_ = [
        ("out", _FLOATS),
        ("routed", _FLOATS),
        ("routed_rows", _INTS),
        ("weights", _FLOATS),
        ("experts", _INTS),
        ("shared", _FLOATS),
        *((name, c_int64) for name in ("count", "hidden_size", "experts_per_token")),
        *((name, c_int32) for name in ("expert_first", "expert_last")),
    ]


def pointer(array: NDArray[Any] | None, kind: Any = _FLOATS) -> Any:
    """The address of a contiguous array, None for no array."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous; copy it first")
    return array.ctypes.data_as(kind)


def poisoned(*shape: int) -> FloatArray:
    """An array of NaN."""
    return np.full(shape, np.nan, np.float32)


@dataclass(frozen=True)
class StoredWeight:
    """A matrix [rows, cols]: E4M3 values (uint8) with scales of a kind, or bfloat16 bits (uint16) without."""

    data: NDArray[Any]
    scale: FloatArray | None = None
    kind: ScaleKind | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether the data are E4M3 values."""
        return self.data.dtype == np.uint8


@dataclass(frozen=True)
class GemmCase:
    """A GEMM of rows [inputs, col_count] with a part of a weight; input_rows says which rows, None all of them.

    With has_groups each 128 values of a row share a scale, else the whole row does.
    """

    rows: FloatArray
    weight: StoredWeight
    bias: FloatArray | None = None
    input_rows: NDArray[np.int32] | None = None
    row_slice: tuple[int, int] | None = None
    col_slice: tuple[int, int] | None = None
    has_groups: bool = False

    @property
    def row_part(self) -> tuple[int, int]:
        """First row of the weight and number of rows."""
        return self.row_slice or (0, self.weight.data.shape[0])

    def native(self, out: FloatArray) -> _Gemm:
        """The GEMM as the library takes it, with out [count, at least rows] for the result."""
        rows, cols = self.weight.data.shape
        col_first, col_count = self.col_slice or (0, cols)
        return _Gemm(
            out=pointer(out),
            values=pointer(self.rows),
            weight=self.weight.data.ctypes.data,
            scales=pointer(self.weight.scale),
            bias=pointer(self.bias),
            input_rows=pointer(self.input_rows, _INTS),
            out_stride=out.shape[1],
            input_count=len(self.rows),
            count=len(out),
            weight_rows=rows,
            weight_cols=cols,
            row_first=self.row_part[0],
            row_count=self.row_part[1],
            col_first=col_first,
            col_count=col_count,
            dtype=_E4M3_DTYPE if self.weight.is_fp8 else CACHE_DTYPES["bf16"],
            scale_kind=0 if self.weight.kind is None else SCALE_KINDS[self.weight.kind],
            group_size=SCALE_TILE if self.has_groups else 0,
        )


@dataclass(frozen=True)
class PagedRequest:
    """Rows row_first to row_first + row_count of a step, whose first position is given, and the request's pages.

    Positions before `context_first` are not attended to.
    """

    row_first: int
    row_count: int
    first_position: int
    pages: NDArray[np.int32]
    context_first: int = 0


@dataclass(frozen=True)
class PageCache:
    """Memory of keys and values, [layers, 2, pages, kv_heads, page_tokens, head_dim] of float32 or bfloat16 bits.

    A page of keys lies by dimension: its last two axes are [head_dim, page_tokens] in the same memory. What is stored
    may be rounded to E4M3; with "fp8", CUDA also keeps it so.
    """

    data: NDArray[Any]
    num_heads: int
    rotary_dim: int
    rounding: Rounding = "none"

    def native(self, layer: int, requests: list[PagedRequest]) -> tuple[PagesCall, Any]:
        """The cache as the library takes it, and what must stay alive meanwhile."""
        _, _, num_pages, kv_heads, page_tokens, head_dim = self.data.shape
        natives = (_Request * len(requests))(
            *(
                _Request(r.row_first, r.row_count, r.first_position, r.context_first, pointer(r.pages, _INTS))
                for r in requests
            )
        )
        pages = PagesCall(
            data=self.data.ctypes.data,
            num_pages=num_pages,
            page_tokens=page_tokens,
            layer=layer,
            dtype=CACHE_DTYPES["f32" if self.data.dtype == np.float32 else "bf16"],
            num_heads=self.num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=self.rotary_dim,
            rounding=ROUNDINGS[self.rounding],
            request_count=len(requests),
            requests=natives,
        )
        return pages, natives


class Operations:
    """The operations of one kernel set with a number of threads; a context that frees the backend.

    Raises LookupError with the library's words where the kernels do not run here.
    """

    def __init__(self, kernels: str, threads: int) -> None:
        shape = _Shape(max_cols=8192, group_heads=16, head_dim=128, page_tokens=16)
        new = declare("glint_testing_backend_new", c_void_p, c_int32, c_int32, POINTER(_Shape))
        self._backend = new(getattr(abi, f"KERNELS_{kernels.upper()}"), threads, byref(shape))
        if self._backend is None:
            raise LookupError(declare("glint_testing_operations_error", c_char_p)().decode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        declare("glint_testing_backend_free", None, c_void_p)(self._backend)

    @property
    def kernels(self) -> str:
        """Name of the kernel set that computes."""
        return declare("glint_testing_backend_kernels", c_char_p, c_void_p)(self._backend).decode()

    def embed(self, table: NDArray[np.uint16], tokens: NDArray[np.int32]) -> FloatArray:
        """Rows of a bfloat16 table [vocab, width]."""
        out = poisoned(len(tokens), table.shape[1])
        kinds = (_FLOATS, POINTER(c_uint16), _INTS, c_int64, c_int64)
        tokens = np.ascontiguousarray(tokens, np.int32)
        arguments = (pointer(out), pointer(table, POINTER(c_uint16)), pointer(tokens, _INTS), *out.shape)
        self._call("glint_testing_embed", kinds, *arguments)
        return out

    def rms_norm(self, rows: FloatArray, weight: FloatArray, epsilon: float) -> FloatArray:
        """RMSNorm of rows [count, width]."""
        out = poisoned(*rows.shape)
        kinds = (_FLOATS, _FLOATS, _FLOATS, c_int64, c_int64, c_double)
        self._call("glint_testing_rms_norm", kinds, *map(pointer, (out, rows, weight)), *rows.shape, epsilon)
        return out

    def prepare(self, rows: FloatArray, row_slices: int, has_fp8: bool) -> tuple[FloatArray, FloatArray]:
        """A GEMM's operand [count, slices, padded width] as values, and its scales [count, slices]."""
        count, width = rows.shape
        stride = declare("glint_testing_operand_stride", c_int64, c_void_p, c_int64, c_int32)
        out = poisoned(count, row_slices, stride(self._backend, width, row_slices) // row_slices)
        scales = poisoned(row_slices, count)
        pointers = [pointer(part) for part in (out, scales, rows)]
        operand = OperandCall(*pointers, count, width, row_slices, has_fp8)
        self._call("glint_testing_prepare", (POINTER(OperandCall),), byref(operand))
        return out, scales.T

    def prepare_groups(self, rows: FloatArray, row_slices: int) -> tuple[FloatArray, FloatArray]:
        """An FP8 operand [count, slices, padded width] as values, and its scales [count, slices, groups of 128]."""
        count, width = rows.shape
        stride = declare("glint_testing_operand_stride", c_int64, c_void_p, c_int64, c_int32)
        out = poisoned(count, row_slices, stride(self._backend, width, row_slices) // row_slices)
        scales = poisoned(row_slices, count, -(-width // row_slices // SCALE_TILE))
        pointers = [pointer(part) for part in (out, scales, rows)]
        operand = OperandCall(*pointers, count, width, row_slices, True, SCALE_TILE)
        self._call("glint_testing_prepare", (POINTER(OperandCall),), byref(operand))
        return out, scales.transpose(1, 0, 2)

    def gemm(self, case: GemmCase) -> FloatArray:
        """Result [count, rows] of one GEMM."""
        return self.gemms([case])[0]

    def gemms(self, cases: list[GemmCase]) -> list[FloatArray]:
        """Results of several GEMMs run together; fails where a GEMM writes beside its result."""
        margin = 3
        counts = [len(case.rows) if case.input_rows is None else len(case.input_rows) for case in cases]
        outs = [poisoned(count, case.row_part[1] + margin) for count, case in zip(counts, cases, strict=True)]
        natives = (_Gemm * len(cases))(*(case.native(out) for case, out in zip(cases, outs, strict=True)))
        run = declare("glint_testing_gemms", c_int32, c_void_p, POINTER(_Gemm), c_int32)
        assert run(self._backend, natives, len(cases)) == abi.STATUS_OK
        assert all(np.isnan(out[:, -margin:]).all() for out in outs)
        return [out[:, :-margin].copy() for out in outs]

    def upper_halves_after(self, case: GemmCase) -> int:
        """The states of the calling thread's vector registers that are in use behind a GEMM: AVX 4, AVX-512 64.

        Zero on a processor that does not tell.
        """
        out = poisoned(len(case.rows), case.row_part[1])
        native = case.native(out)
        in_use = c_uint32(~0)
        kinds = (c_void_p, POINTER(_Gemm), c_int32, POINTER(c_uint32))
        run = declare("glint_testing_upper_halves_after_gemms", c_int32, *kinds)
        assert run(self._backend, byref(native), 1, byref(in_use)) == abi.STATUS_OK
        return in_use.value

    def fill_rotary(self, positions: NDArray[np.int32], rotary_dim: int, theta: float) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines [positions, rotary_dim / 2]."""
        cosines, sines = poisoned(len(positions), rotary_dim // 2), poisoned(len(positions), rotary_dim // 2)
        kinds = (_FLOATS, _FLOATS, _INTS, c_int64, c_int64, c_double)
        positions = np.ascontiguousarray(positions, np.int32)
        arguments = (pointer(cosines), pointer(sines), pointer(positions, _INTS), len(positions), rotary_dim, theta)
        self._call("glint_testing_fill_rotary", kinds, *arguments)
        return cosines, sines

    def rope_and_cache(
        self,
        heads: tuple[FloatArray, FloatArray, FloatArray],
        norms: tuple[FloatArray, FloatArray] | None,
        table: tuple[FloatArray, FloatArray],
        cache: PageCache,
        layer: int,
        requests: list[PagedRequest],
        epsilon: float = 1e-5,
    ) -> FloatArray:
        """Norm, rotate and store query, key and value [rows, heads, head_dim]; the query as attention takes it."""
        query, key, value = (part.copy() for part in heads)
        parts = (query, key, value, *(norms or (None, None)), *table)
        rotation = RotationCall(*map(pointer, parts), epsilon)
        pages, alive = cache.native(layer, requests)
        kinds = (POINTER(RotationCall), POINTER(PagesCall))
        self._call("glint_testing_rope_and_cache", kinds, byref(rotation), byref(pages))
        del alive
        return query

    def attend(self, query: FloatArray, cache: PageCache, layer: int, requests: list[PagedRequest]) -> FloatArray:
        """Attention of query [rows, heads, head_dim] over the pages of each row's request."""
        out = poisoned(*query.shape)
        pages, alive = cache.native(layer, requests)
        self._call("glint_testing_attend", (_FLOATS, _FLOATS, POINTER(PagesCall)), *map(pointer, (out, query)), pages)
        del alive
        return out

    def swiglu(self, gate: FloatArray, up: FloatArray) -> FloatArray:
        """SwiGLU of flat arrays."""
        out = poisoned(*gate.shape)
        kinds = (_FLOATS, _FLOATS, _FLOATS, c_int64)
        self._call("glint_testing_swiglu", kinds, *map(pointer, (out, gate, up)), gate.size)
        return out

    def route(self, logits: FloatArray, bias: FloatArray, rule: RouterRule) -> tuple[NDArray[np.int32], FloatArray]:
        """Chosen experts and weights [count, experts_per_token] of router logits [count, experts]."""
        count, num_experts = logits.shape
        model = abi.sized(
            abi.Model,
            num_experts=num_experts,
            experts_per_token=rule.experts_per_token,
            normalise_weights=int(rule.has_normalised_weights),
            routed_scaling=rule.routed_scaling,
        )
        experts = np.full((count, rule.experts_per_token), -1, np.int32)
        weights = poisoned(count, rule.experts_per_token)
        kinds = (c_void_p, _INTS, _FLOATS, _FLOATS, _FLOATS, c_int64, POINTER(abi.Model))
        status = declare("glint_testing_route", c_int32, *kinds)(
            self._backend, pointer(experts, _INTS), *map(pointer, (weights, logits, bias)), count, byref(model)
        )
        assert status == abi.STATUS_OK
        return experts, weights

    def combine(
        self,
        routed: FloatArray,
        routed_rows: NDArray[np.int32],
        weights: FloatArray,
        experts: NDArray[np.int32],
        shared: FloatArray,
        expert_range: tuple[int, int],
    ) -> FloatArray:
        """Weighted sum of routed rows [routed, hidden] by expert of the range, plus shared [count, hidden]."""
        out = poisoned(*shared.shape)
        call = _Combine(
            out=pointer(out),
            routed=pointer(routed),
            routed_rows=pointer(routed_rows, _INTS),
            weights=pointer(weights),
            experts=pointer(experts, _INTS),
            shared=pointer(shared),
            count=shared.shape[0],
            hidden_size=shared.shape[1],
            experts_per_token=weights.shape[1],
            expert_first=expert_range[0],
            expert_last=expert_range[1],
        )
        self._call("glint_testing_combine", (POINTER(_Combine),), byref(call))
        return out

    def reduce_slices(self, parts: FloatArray) -> FloatArray:
        """Sum of parts [num_parts, count], reduced in place; each part stands a little behind the last."""
        spaced = np.full((parts.shape[0], parts.shape[1] + 5), np.nan, np.float32)
        spaced[:, :-5] = parts
        kinds = (_FLOATS, c_int64, c_int32, c_int64)
        self._call("glint_testing_reduce_slices", kinds, pointer(spaced), spaced.shape[1], *parts.shape)
        assert np.isnan(spaced[:, -5:]).all()
        return spaced[0, :-5]

    def add_rows(self, hidden: FloatArray, update: FloatArray) -> FloatArray:
        """hidden + update of flat arrays."""
        out = hidden.copy()
        self._call("glint_testing_add_rows", (_FLOATS, _FLOATS, c_int64), pointer(out), pointer(update), out.size)
        return out

    def gather_rows(self, rows: FloatArray, chosen: NDArray[np.int32]) -> FloatArray:
        """The chosen rows of [count, width]."""
        out = poisoned(len(chosen), rows.shape[1])
        kinds = (_FLOATS, _FLOATS, _INTS, c_int64, c_int64)
        self._call("glint_testing_gather_rows", kinds, *map(pointer, (out, rows)), pointer(chosen, _INTS), *out.shape)
        return out

    def _call(self, name: str, kinds: tuple[Any, ...], *arguments: Any) -> None:
        declare(name, None, c_void_p, *kinds)(self._backend, *arguments)


def _convert(name: str, values: NDArray[Any], source: Any, target: Any, dtype: type) -> NDArray[Any]:
    out = np.zeros(values.shape, dtype)
    declare(name, None, POINTER(target), POINTER(source), c_int64)(
        pointer(out, POINTER(target)), pointer(values, POINTER(source)), values.size
    )
    return out


def e4m3_from_float(values: FloatArray) -> NDArray[np.uint8]:
    """float32 values rounded to E4M3, natively."""
    return _convert("glint_testing_e4m3_from_float", values, c_float, c_uint8, np.uint8)


def float_from_e4m3(fp8: NDArray[np.uint8]) -> FloatArray:
    """Numbers of E4M3 values, natively."""
    return _convert("glint_testing_float_from_e4m3", fp8, c_uint8, c_float, np.float32)


def bf16_from_float(values: FloatArray) -> NDArray[np.uint16]:
    """bfloat16 bits of float32 values, natively."""
    return _convert("glint_testing_bf16_from_float", values, c_float, c_uint16, np.uint16)


def float_from_bf16(bits: NDArray[np.uint16]) -> FloatArray:
    """Values of bfloat16 bits, natively."""
    return _convert("glint_testing_float_from_bf16", bits, c_uint16, c_float, np.float32)
