"""Rows whose sums round at nearly every step are the same at every row count; avx512 and amx sum in the order of tiles.

The amx kernels multiply up to 32 rows by E4M3 weights with the weights as the first tile, more with the rows as the
first; the avx512 kernels have no tiles.
Each way must sum as TDPBF16PS is specified: 32 columns at a time, even and odd columns in chains of their own from
zero, then both chains together onto the sum before. At BF16 weights amx multiplies 32 columns of each row three times:
by the high, the middle and the low 8 bits of their numbers.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.cpu.kernel_sets import KERNELS, open_operations
from tests.cpu.operations import GemmCase, Operations, StoredWeight
from tests.reference import numpy_ops
from tests.reference.numpy_ops import FloatArray, ScaleKind

pytestmark = pytest.mark.sanitize

ROWS = 53
INPUTS = 40
COUNTS = (*range(1, 18), 32, 33, INPUTS)
COLUMNS = (7, 32, 130, 576)
KINDS: tuple[ScaleKind, ...] = ("channel", "tensor", "tile")
STEP = 32
SIGN = np.uint8(0x80)
LARGEST = np.uint8(0x7E)


@pytest.fixture(scope="module", params=KERNELS)
def operations(request: pytest.FixtureRequest) -> Iterator[Operations]:
    """The operations of each kernel set of this machine."""
    with open_operations(request.param, 2) as opened:
        yield opened


@pytest.fixture(scope="module", params=["avx512", "amx"])
def tiled(request: pytest.FixtureRequest) -> Iterator[Operations]:
    """The operations of the kernel sets that sum as tiles do, where the processor has them."""
    with open_operations(request.param, 2) as opened:
        yield opened


def every_value(generator: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Random E4M3 values of all sizes and signs, none of them NaN."""
    return (generator.integers(0, 127, (rows, cols)) + 128 * generator.integers(0, 2, (rows, cols))).astype(np.uint8)


def hard_values(seed: int, rows: int, cols: int) -> np.ndarray:
    """E4M3 values: random ones, ones that cancel two columns later, and the largest beside the smallest."""
    generator = np.random.default_rng(seed)
    fp8 = every_value(generator, rows, cols)
    cancelled = fp8[1::3]
    for col in range(2, cols):
        if col % 4 >= 2:
            cancelled[:, col] = cancelled[:, col - 2] ^ SIGN
    extremes = np.array([LARGEST, 0x01, LARGEST | SIGN, 0x81, 0x00, 0x80], np.uint8)
    fp8[2::3] = generator.choice(extremes, fp8[2::3].shape)
    return fp8


def hard_weight(kind: ScaleKind, cols: int) -> StoredWeight:
    """A weight of hard values with powers of two from very small to very large as scales."""
    shape = {"channel": (ROWS, 1), "tensor": (1,), "tile": (1, -(-cols // numpy_ops.SCALE_TILE))}[kind]
    exponents = np.random.default_rng(cols).integers(-100, 60, shape)
    return StoredWeight(hard_values(cols, ROWS, cols), np.exp2(exponents).astype(np.float32), kind)


def hard_rows(cols: int) -> FloatArray:
    """Rows that quantise to hard values exactly: each has the largest, and its scale is a power of two."""
    fp8 = hard_values(cols + 1, INPUTS, cols)
    fp8[:, 0] = LARGEST
    exponents = np.random.default_rng(cols + 2).integers(-20, 20, (INPUTS, 1))
    return (numpy_ops.decode_e4m3(fp8) * np.exp2(exponents)).astype(np.float32)


def bf16_weight(cols: int) -> StoredWeight:
    """A BF16 weight whose exponents are far apart."""
    generator = np.random.default_rng(cols + 3)
    values = generator.standard_normal((ROWS, cols)) * np.exp2(generator.integers(-12, 12, (ROWS, cols)))
    return StoredWeight((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


def float_rows(cols: int) -> FloatArray:
    """Rows of numbers with 24 bits whose exponents are far apart."""
    generator = np.random.default_rng(cols + 4)
    exponents = generator.integers(-12, 12, (INPUTS, cols))
    return (generator.standard_normal((INPUTS, cols)) * np.exp2(exponents)).astype(np.float32)


def planes_of(rows: FloatArray) -> list[FloatArray]:
    """Three arrays of BF16 numbers, largest first, whose sum is exactly the rows."""
    planes = []
    for _ in range(3):
        planes.append((rows.view(np.uint32) & 0xFFFF0000).view(np.float32))
        rows = rows - planes[-1]
    assert not rows.any()
    return planes


def tile_sums(rows: FloatArray, weight: FloatArray) -> FloatArray:
    """Products of E4M3 numbers [inputs, cols] and [rows, cols] summed in float32 in the order of TDPBF16PS."""
    return plane_sums([rows], weight)


def plane_sums(planes: list[FloatArray], weight: FloatArray) -> FloatArray:
    """The same for numbers that are sums of planes: 32 columns of each plane in turn."""
    sums = np.zeros((len(planes[0]), len(weight)), np.float32)
    for first in range(0, weight.shape[1], STEP):
        for rows in planes:
            chains = np.zeros((2, *sums.shape), np.float32)
            for col in range(first, min(first + STEP, weight.shape[1])):
                chains[col % 2] += np.outer(rows[:, col], weight[:, col])
            sums += chains[0] + chains[1]
    return sums


def tile_gemm(rows: FloatArray, weight: StoredWeight, bias: FloatArray) -> FloatArray:
    """The GEMM of tiles in NumPy float32, for scales whose products with a sum are exact."""
    assert weight.scale is not None
    quantised = numpy_ops.quantise(rows)
    inputs, values = (numpy_ops.decode_e4m3(fp8).astype(np.float32) for fp8 in (quantised.fp8, weight.data))
    if weight.kind != "tile":
        return tile_sums(inputs, values) * (quantised.scales * weight.scale.reshape(1, -1)) + bias
    sums = np.zeros((len(rows), len(values)), np.float32)
    for index, scale in enumerate(weight.scale[0]):
        cols = slice(index * numpy_ops.SCALE_TILE, (index + 1) * numpy_ops.SCALE_TILE)
        sums += tile_sums(inputs[:, cols], values[:, cols]) * scale
    return sums * quantised.scales + bias


def hard_bias() -> FloatArray:
    """A bias whose sizes are those of small and large results."""
    return np.exp2(np.random.default_rng(3).integers(-60, 0, ROWS)).astype(np.float32)


def check_row_counts(operations: Operations, case: GemmCase) -> None:
    """Every part of the rows must have the bits that it has among all of them."""
    whole = operations.gemm(case)
    for count in COUNTS:
        for first in range(0, INPUTS - count + 1, count):
            got = operations.gemm(replace(case, rows=case.rows[first : first + count]))
            np.testing.assert_array_equal(got, whole[first : first + count], err_msg=f"{count} rows from {first}")


@pytest.mark.parametrize("cols", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_rows_are_the_same_at_every_row_count(operations: Operations, kind: ScaleKind, cols: int) -> None:
    check_row_counts(operations, GemmCase(hard_rows(cols), hard_weight(kind, cols), hard_bias()))


@pytest.mark.parametrize("cols", COLUMNS)
def test_float_rows_are_the_same_at_every_row_count(operations: Operations, cols: int) -> None:
    check_row_counts(operations, GemmCase(float_rows(cols), bf16_weight(cols), hard_bias()))


@pytest.mark.parametrize("cols", COLUMNS)
def test_float_rows_are_multiplied_in_three_planes(cols: int) -> None:
    rows, weight, bias = float_rows(cols), bf16_weight(cols), hard_bias()
    values = (weight.data.astype(np.uint32) << 16).view(np.float32)
    want = plane_sums(planes_of(rows), values) + bias
    with open_operations("amx", 2) as opened:
        for count in COUNTS:
            got = opened.gemm(GemmCase(rows[:count], weight, bias))
            np.testing.assert_array_equal(got, want[:count], err_msg=f"{count} rows")


@pytest.mark.parametrize("cols", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_in_the_order_of_tiles(tiled: Operations, kind: ScaleKind, cols: int) -> None:
    rows, weight, bias = hard_rows(cols), hard_weight(kind, cols), hard_bias()
    want = tile_gemm(rows, weight, bias)
    for count in COUNTS:
        got = tiled.gemm(GemmCase(rows[:count], weight, bias))
        np.testing.assert_array_equal(got, want[:count], err_msg=f"{count} rows")


def test_the_order_of_sums_shows() -> None:
    rows, weight, nothing = hard_rows(576), hard_weight("channel", 576), np.zeros(ROWS, np.float32)
    backwards = StoredWeight(weight.data[:, ::-1], weight.scale, weight.kind)
    other = tile_gemm(rows[:, ::-1], backwards, nothing)
    assert np.mean(tile_gemm(rows, weight, nothing) != other) > 0.5


@pytest.mark.parametrize("kernels", KERNELS)
def test_upper_halves_of_registers_are_clear_behind_a_gemm(kernels: str) -> None:
    """Else the next SSE instruction of the same thread waits for them to be stored, which costs a tenth of a step."""
    rows = float_rows(576)
    weights = (hard_weight("channel", 576), hard_weight("tile", 576), bf16_weight(576))
    with open_operations(kernels, 1) as opened:
        for count in COUNTS:
            in_use = [opened.upper_halves_after(GemmCase(rows[:count], weight, hard_bias())) for weight in weights]
            assert in_use == [0, 0, 0], f"{count} rows"
