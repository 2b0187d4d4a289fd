"""The operations of the CUDA library on arrays of the caller, through the testing functions of its test build.

Every array lies on the GPU between bytes of 0xFF, which are NaN in every format. An operation runs as often as asked
for from the same inputs; bytes that differ between two runs fail the call.
"""

from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint16, c_void_p
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from glint.native import abi
from tests.cpu.operations import (
    GemmCase,
    OperandCall,
    PageCache,
    PagedRequest,
    RotationCall,
    pointer,
    poisoned,
)
from tests.cpu.sampling_rows import Row, TestResult, TestRow
from tests.cpu.testing_library import declare
from tests.gpu.forced_ptx import skip_without_ptx
from tests.reference.numpy_ops import FloatArray, RouterRule

Family = Literal["hopper", "portable", "fallback"]

FP8_ROW_BYTES = 128
FAMILY_NUMBERS: dict[Family, int] = {
    "hopper": abi.KERNELS_HOPPER,
    "portable": abi.KERNELS_PORTABLE,
    "fallback": -1,
}
_FLOATS = POINTER(c_float)
_INTS = POINTER(c_int32)


class _Embed(Structure):
    _fields_ = [
        ("out", _FLOATS),
        ("table", POINTER(c_uint16)),
        *((name, _INTS) for name in ("tokens", "sampled_rows", "sampled")),
        *((name, c_int64) for name in ("count", "width", "vocab_size", "sampled_count")),
    ]


class _Norm(Structure):
    _fields_ = [
        *((name, _FLOATS) for name in ("hidden", "normed", "fp8", "scales", "parts", "weight")),
        *((name, c_int64) for name in ("count", "width", "part_stride", "fp8_stride")),
        ("epsilon", c_double),
        ("num_parts", c_int32),
    ]


class _Swiglu(Structure):
    _fields_ = [
        *((name, _FLOATS) for name in ("out", "fp8", "scales", "gate_up")),
        *((name, c_int64) for name in ("count", "width", "in_stride", "slice_stride")),
        ("row_slices", c_int32),
    ]


class _Gather(Structure):
    _fields_ = [
        *((name, _FLOATS) for name in ("out", "values", "update")),
        ("rows", _INTS),
        *((name, c_int64) for name in ("in_count", "count", "width")),
    ]


class _Route(Structure):
    _fields_ = [
        ("experts", _INTS),
        *((name, _FLOATS) for name in ("weights", "values")),
        ("weight", POINTER(c_uint16)),
        ("bias", _FLOATS),
        *((name, c_int64) for name in ("count", "width")),
        ("model", POINTER(abi.Model)),
    ]


@dataclass(frozen=True)
class NormCase:
    """Hidden rows [count, width], parts [num_parts, count, width] to add to them, and the norm's weight."""

    hidden: FloatArray
    parts: FloatArray
    weight: FloatArray
    epsilon: float = 1e-5


@dataclass(frozen=True)
class NormResult:
    """Hidden rows with the parts added, their norm, and that as FP8 [count, padded width] with scales [count]."""

    hidden: FloatArray
    normed: FloatArray
    fp8: FloatArray
    scales: FloatArray


@dataclass(frozen=True)
class RouteCase:
    """Rows [count, width], the router's bfloat16 weight [experts, width] and bias, and how experts are chosen."""

    rows: FloatArray
    weight: NDArray[np.uint16]
    bias: FloatArray
    rule: RouterRule

    @property
    def num_experts(self) -> int:
        """Number of experts to choose from."""
        return len(self.weight)


def padded_width(width: int) -> int:
    """FP8 values of a row as CUDA lays them out."""
    return -(-width // FP8_ROW_BYTES) * FP8_ROW_BYTES


class CudaOperations:
    """The operations with one set of kernels, each run `repeats` times; a context that frees what the library holds.

    The fallback is the portable set with the GEMM of the shapes that the tiled family refuses. Raises LookupError with
    the library's words where the kernels do not run here.
    """

    def __init__(self, kernels: Family, repeats: int) -> None:
        skip_without_ptx(kernels)
        new = declare("glint_testing_backend_new", c_void_p, c_int32, c_int32, device="cuda")
        self._backend = new(FAMILY_NUMBERS[kernels], repeats)
        self.repeats = repeats
        if self._backend is None:
            raise LookupError(self._error())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        declare("glint_testing_backend_free", None, c_void_p, device="cuda")(self._backend)

    def embed(
        self,
        table: NDArray[np.uint16],
        tokens: NDArray[np.int32],
        sampled_rows: NDArray[np.int32],
        sampled: NDArray[np.int32],
    ) -> FloatArray:
        """Rows of a bfloat16 table; a row whose sampled_rows is not -1 takes sampled[sampled_rows] as its token."""
        out = poisoned(len(tokens), table.shape[1])
        case = _Embed(
            pointer(out),
            pointer(table, POINTER(c_uint16)),
            *(pointer(numbers, _INTS) for numbers in (tokens, sampled_rows, sampled)),
            *out.shape,
        )
        case.vocab_size, case.sampled_count = len(table), len(sampled)
        self.call("glint_testing_embed", case)
        return out

    def norm(self, case: NormCase) -> NormResult:
        """Add parts, norm and quantise; the parts stand a little apart."""
        count, width = case.hidden.shape
        gap = 8
        parts = poisoned(len(case.parts), count * width + gap)
        parts[:, : count * width] = case.parts.reshape(len(case.parts), count * width)
        result = NormResult(
            case.hidden.copy(), poisoned(count, width), poisoned(count, padded_width(width)), poisoned(count)
        )
        native = _Norm(
            *map(pointer, (result.hidden, result.normed, result.fp8, result.scales)),
            parts=pointer(parts) if len(parts) else None,
            weight=pointer(case.weight),
            count=count,
            width=width,
            part_stride=parts.shape[1],
            fp8_stride=padded_width(width),
            epsilon=case.epsilon,
            num_parts=len(parts),
        )
        self.call("glint_testing_norm", native)
        return result

    def prepare(self, rows: FloatArray, row_slices: int, has_fp8: bool) -> tuple[FloatArray, FloatArray]:
        """A GEMM's operand [count, slices, padded width] as values, and its scales [count, slices]."""
        count, width = rows.shape
        stride = declare("glint_testing_operand_stride", c_int64, c_void_p, c_int64, c_int32, c_int32, device="cuda")(
            self._backend, width, row_slices, has_fp8
        )
        out, scales = poisoned(count, row_slices, stride // row_slices), poisoned(row_slices, count)
        case = OperandCall(*map(pointer, (out, scales, rows)), count, width, row_slices, has_fp8)
        self.call("glint_testing_prepare", case)
        return out, scales.T

    def swiglu(self, gate_up: FloatArray, width: int, row_slices: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """SwiGLU of rows [count, gate, up, padding], its FP8 values [count, slices, padded width] and their scales."""
        count = len(gate_up)
        slice_stride = padded_width(width // row_slices)
        out, fp8, scales = (
            poisoned(count, width),
            poisoned(count, row_slices, slice_stride),
            poisoned(row_slices, count),
        )
        sizes = (count, width, gate_up.shape[1], slice_stride, row_slices)
        self.call("glint_testing_swiglu", _Swiglu(*map(pointer, (out, fp8, scales, gate_up)), *sizes))
        return out, fp8, scales.T

    def add_rows(self, hidden: FloatArray, update: FloatArray) -> FloatArray:
        """hidden + update of flat arrays."""
        out = hidden.copy()
        run = declare("glint_testing_add_rows", c_int32, c_void_p, _FLOATS, _FLOATS, c_int64, device="cuda")
        self._check(run(self._backend, pointer(out), pointer(update), out.size), "glint_testing_add_rows")
        return out

    def gather_rows(self, rows: FloatArray, chosen: NDArray[np.int32], update: FloatArray | None) -> FloatArray:
        """The chosen rows of [count, width], with those of an update added."""
        out = poisoned(len(chosen), rows.shape[1])
        case = _Gather(*map(pointer, (out, rows, update)), pointer(chosen, _INTS), len(rows), *out.shape)
        self.call("glint_testing_gather_rows", case)
        return out

    def gemm(self, case: GemmCase, margin: int) -> FloatArray:
        """Result [count, rows] of one GEMM; fails where it writes into the margin behind a row's end."""
        out = poisoned(len(case.rows), case.row_part[1] + margin)
        native = case.native(out)
        run = declare("glint_testing_gemms", c_int32, c_void_p, POINTER(type(native)), c_int32, device="cuda")
        self._check(run(self._backend, byref(native), 1), "glint_testing_gemms")
        assert np.isnan(out[:, case.row_part[1] :]).all()
        return out[:, : case.row_part[1]]

    def gemm_row_counts(self, case: GemmCase) -> None:
        """Fail where row i of a GEMM of 1, 2, 3 and so on up to all rows differs from that of all rows."""
        self.call("glint_testing_gemm_row_counts", case.native(poisoned(len(case.rows), case.row_part[1])))

    def fill_rotary(self, positions: NDArray[np.int32], rotary_dim: int, theta: float) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines [positions, rotary_dim / 2]."""
        cosines, sines = poisoned(len(positions), rotary_dim // 2), poisoned(len(positions), rotary_dim // 2)
        kinds = (c_void_p, _FLOATS, _FLOATS, _INTS, c_int64, c_int64, c_double)
        run = declare("glint_testing_fill_rotary", c_int32, *kinds, device="cuda")
        places = (pointer(cosines), pointer(sines), pointer(positions, _INTS))
        self._check(run(self._backend, *places, len(positions), rotary_dim, theta), "glint_testing_fill_rotary")
        return cosines, sines

    def rope_and_cache(
        self,
        heads: tuple[FloatArray, FloatArray, FloatArray],
        norms: tuple[FloatArray, FloatArray] | None,
        table: tuple[FloatArray, FloatArray],
        cache: PageCache,
        requests: list[PagedRequest],
        epsilon: float = 1e-5,
    ) -> FloatArray:
        """Norm, rotate and store query, key and value [rows, heads, head_dim] in layer 1; the query for attention."""
        query, key, value = (part.copy() for part in heads)
        rotation = RotationCall(*map(pointer, (query, key, value, *(norms or (None, None)), *table)), epsilon)
        pages, alive = cache.native(1, requests)
        self.call("glint_testing_rope_and_cache", rotation, pages)
        del alive
        return query

    def attention_step(
        self,
        heads: tuple[FloatArray, FloatArray, FloatArray],
        norms: tuple[FloatArray, FloatArray] | None,
        table: tuple[FloatArray, FloatArray],
        cache: PageCache,
        requests: list[PagedRequest],
        epsilon: float = 1e-5,
    ) -> tuple[FloatArray, FloatArray]:
        """Rotate, store, attend and quantise requests of one row each; FP8 [rows, width] and scales.

        With one KV head that is one kernel; with several, the rows are quantised by a second kernel.
        """
        count, num_heads, head_dim = heads[0].shape
        fp8, scales = poisoned(count, num_heads * head_dim), poisoned(count)
        result = OperandCall(pointer(fp8), pointer(scales), None, count, num_heads * head_dim, 1, 1)
        rotation = RotationCall(*map(pointer, (*heads, *(norms or (None, None)), *table)), epsilon)
        pages, alive = cache.native(1, requests)
        self.call("glint_testing_attention_step", result, rotation, pages)
        del alive
        return fp8, scales

    def attend(self, query: FloatArray, cache: PageCache, requests: list[PagedRequest]) -> FloatArray:
        """Attention of query [rows, heads, head_dim] over the pages of each row's request in layer 1."""
        out = poisoned(*query.shape)
        pages, alive = cache.native(1, requests)
        run = declare("glint_testing_attend", c_int32, c_void_p, _FLOATS, _FLOATS, POINTER(type(pages)), device="cuda")
        self._check(run(self._backend, pointer(out), pointer(query), byref(pages)), "glint_testing_attend")
        del alive
        return out

    def route(self, case: RouteCase) -> tuple[NDArray[np.int32], FloatArray]:
        """Chosen experts and weights [count, experts_per_token]."""
        experts = np.full((len(case.rows), case.rule.experts_per_token), -1, np.int32)
        weights = poisoned(*experts.shape)
        self.call("glint_testing_route", self._route(case, experts, weights))
        return experts, weights

    def route_and_group(self, case: RouteCase, grouping: Structure) -> tuple[NDArray[np.int32], FloatArray]:
        """Chosen experts and weights [count, experts_per_token], which are also grouped into `grouping`."""
        experts = np.full((len(case.rows), case.rule.experts_per_token), -1, np.int32)
        weights = poisoned(*experts.shape)
        self.call("glint_testing_route_and_group", self._route(case, experts, weights), grouping)
        return experts, weights

    def route_row_counts(self, case: RouteCase) -> None:
        """Fail where the weights of row i of 1, 2, 3 and so on up to all rows differ from those of all rows."""
        experts = np.full((len(case.rows), case.rule.experts_per_token), -1, np.int32)
        self.call("glint_testing_route_row_counts", self._route(case, experts, poisoned(*experts.shape)))

    def sample(self, rows: list[Row]) -> list[TestResult]:
        """One token of every row, all rows in one launch."""
        natives = [row.native() for row in rows]
        array = (TestRow * len(rows))(*(native for native, _ in natives))
        results = (TestResult * len(rows))()
        kinds = (c_void_p, POINTER(TestRow), c_int32, POINTER(TestResult))
        run = declare("glint_testing_sample_rows", c_int32, *kinds, device="cuda")
        self._check(run(self._backend, array, len(rows), results), "glint_testing_sample_rows")
        return list(results)

    def call(self, name: str, *cases: Structure) -> None:
        """Run a testing function that takes structures; fails with its words, and where repeats differ."""
        kinds = [POINTER(type(case)) for case in cases]
        run = declare(name, c_int32, c_void_p, *kinds, device="cuda")
        self._check(run(self._backend, *map(byref, cases)), name)

    def _route(self, case: RouteCase, experts: NDArray[np.int32], weights: FloatArray) -> _Route:
        model = abi.sized(
            abi.Model,
            num_experts=case.num_experts,
            experts_per_token=case.rule.experts_per_token,
            normalise_weights=int(case.rule.has_normalised_weights),
            routed_scaling=case.rule.routed_scaling,
        )
        return _Route(
            pointer(experts, _INTS),
            pointer(weights),
            pointer(case.rows),
            pointer(case.weight, POINTER(c_uint16)),
            pointer(case.bias),
            *case.rows.shape,
            POINTER(abi.Model)(model),
        )

    def _check(self, status: int, name: str) -> None:
        assert status == abi.STATUS_OK, f"{name}: {self._error()}"
        count = declare("glint_testing_backend_different_bytes", c_int64, c_void_p, device="cuda")
        different = count(self._backend)
        assert different == 0, f"{name}: {different} bytes differ between runs on the same input"

    def _error(self) -> str:
        text: bytes = declare("glint_testing_operations_error", c_char_p, device="cuda")()
        return text.decode()
