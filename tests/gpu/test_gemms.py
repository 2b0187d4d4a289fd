"""GEMMs of every family against the CPU's on fresh random inputs: the tiled one with both multiplies, and the fallback.

The exact CPU kernels compute in FP64. BOUNDS has the largest error of a row that is allowed. What is printed at the end
and what the environment changes: `test_operations.py`.
"""

import numpy as np
import pytest

from tests.cpu.operations import GemmCase, Operations
from tests.gpu.operations_cases import REPEATS, open_for
from tests.gpu.operations_cuda import CudaOperations, Family
from tests.gpu.operations_inputs import ErrorRecord, GemmShape, same_bits, source
from tests.gpu.product_cases import (
    ALL_FAMILIES,
    ROW_COUNT_GEMMS,
    TILED,
    expected_gemm,
    families_of,
    gemm_runs,
)
from tests.reference.numpy_ops import ScaleKind

BOUNDS = {
    "GEMM E4M3, hopper": 1e-3,
    "GEMM E4M3, portable": 1e-6,
    "GEMM E4M3, fallback": 1e-6,
    "GEMM BF16, hopper": 1e-6,
    "GEMM BF16, portable": 1e-6,
    "GEMM BF16, fallback": 1e-6,
}
FEW_REPEATS = min(REPEATS, 3)
NORM_ERROR = 5e-6
SHORT_ACCUMULATOR_ERROR = 1e-3
ODD_ROWS = (1, 7, 192, 1003)
ODD_COLS = (16, 80, 96, 128, 160, 192, 320, 384, 576, 1536, 5120)
ODD_COUNTS = (1, 2, 7, 8, 9, 16, 24, 33, 64, 130)
SPOILED_SHAPES = (GemmShape("E4M3", 300, 4096, "channel"), GemmShape("BF16", 300, 1536, None))
RUNS = {f"{shape.name}, {family}": (shape, family, counts) for shape, family, counts in gemm_runs()}
ROW_COUNT_RUNS = {
    f"{shape.name}, {family}": (shape, family, count)
    for shape, count in ROW_COUNT_GEMMS.values()
    for family in families_of(shape, TILED)
}


@pytest.mark.parametrize("run", RUNS)
def test_gemms(record: ErrorRecord, run: str) -> None:
    shape, family, counts = RUNS[run]
    expected = expected_gemm(shape, counts)
    whole = expected.case
    bound = f"GEMM {'BF16' if shape.kind is None else 'E4M3'}, {family}"
    for count in counts:
        case = GemmCase(np.ascontiguousarray(whole.rows[:count]), whole.weight, whole.bias)
        with open_for(count, family) as cuda:
            seen = cuda.gemm(case, shape.margin)
        is_there = expected.chosen < count
        assert np.isfinite(seen).all()
        record.compare(bound, seen[expected.chosen[is_there]], expected.rows[is_there], f"{run}, {count} rows")


@pytest.mark.parametrize("run", ROW_COUNT_RUNS)
def test_row_of_a_gemm_is_the_same_for_every_row_count(run: str) -> None:
    shape, family, count = ROW_COUNT_RUNS[run]
    with CudaOperations(family, 1) as cuda:
        cuda.gemm_row_counts(shape.case(count))


@pytest.mark.parametrize("name", ["qkv", "BF16"])
def test_row_of_the_fallback_is_the_same_for_every_row_count(name: str) -> None:
    shape, count = ROW_COUNT_GEMMS[name]
    with CudaOperations("fallback", 1) as cuda:
        cuda.gemm_row_counts(shape.case(count))


@pytest.mark.parametrize("rows", ODD_ROWS)
@pytest.mark.parametrize("kind", ["channel", "tensor", "tile", None], ids=str)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_gemms_of_odd_sizes(cpu: Operations, family: Family, kind: ScaleKind | None, rows: int) -> None:
    """Near the CPU at most rows of the input; with fewer rows each keeps its bits, and nothing beside it is written."""
    shapes = [GemmShape("odd", rows, cols, kind, has_bias=rows % 2 == 1) for cols in ODD_COLS]
    bound = SHORT_ACCUMULATOR_ERROR if family == "hopper" and kind is not None else NORM_ERROR
    for shape in shapes if family == "fallback" else [shape for shape in shapes if shape.is_tiled]:
        whole = shape.case(max(ODD_COUNTS))
        expected = cpu.gemm(whole)
        with CudaOperations(family, FEW_REPEATS) as cuda:
            most = cuda.gemm(whole, 3)
            for count in ODD_COUNTS:
                case = GemmCase(np.ascontiguousarray(whole.rows[:count]), whole.weight, whole.bias)
                assert same_bits(cuda.gemm(case, 3), most[:count]), f"{shape.cols} columns, {count} rows"
        gap, size = (float(np.linalg.norm(part.astype(np.float64))) for part in (most - expected, expected))
        assert gap <= bound * size, f"{shape.cols} columns"


@pytest.mark.parametrize("shape", SPOILED_SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_rows_of_nan_spoil_no_others(family: Family, shape: GemmShape) -> None:
    for count in (2, 16, 64, 65, 300, 1100):
        whole = shape.case(count)
        spoiled = whole.rows.copy()
        is_spoiled = source(count).random(count) < 0.5
        spoiled[is_spoiled] = np.nan
        with CudaOperations(family, FEW_REPEATS) as cuda:
            expected = cuda.gemm(whole, 0)
            seen = cuda.gemm(GemmCase(spoiled, whole.weight, whole.bias), 0)
        assert same_bits(seen[~is_spoiled], expected[~is_spoiled]), count
        assert np.isnan(seen[is_spoiled]).all(), count


@pytest.mark.parametrize("family", TILED)
@pytest.mark.parametrize("shape", [GemmShape("odd", 37, 200, "channel"), GemmShape("tiles", 128, 128, "tile")])
def test_what_the_tiled_family_refuses_names_the_fallback(family: Family, shape: GemmShape) -> None:
    with CudaOperations(family, 1) as cuda, pytest.raises(AssertionError, match="run the fallback"):
        cuda.gemm(shape.case(1), 0)
