"""Every operation of every kernel set that runs here against its NumPy sentence, and bitwise against itself.

Bounds and what was seen: exact one unit in the last place of float32 (0); fast GEMMs FAST_BOUND of the sum of
magnitudes behind a result (1.2e-7), fast SwiGLU FAST_BOUND of the result (2e-7).
"""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.cpu.kernel_sets import KERNELS, open_operations
from tests.cpu.operations import (
    GemmCase,
    Operations,
    StoredWeight,
    bf16_from_float,
    e4m3_from_float,
    float_from_bf16,
    float_from_e4m3,
)
from tests.reference import numpy_ops
from tests.reference.checkpoints import weight_scale
from tests.reference.numpy_ops import FloatArray, RouterRule, ScaleKind

pytestmark = pytest.mark.sanitize

FAST_BOUND = 1e-6
KINDS: tuple[ScaleKind, ...] = ("channel", "tensor", "tile")
SHAPES = ((1, 1), (3, 5), (33, 33), (40, 130), (17, 192), (150, 320), (130, 1536), (20, 5120), (9, 8192))
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 129, 512, 1000, 2048, 4095)


@pytest.fixture(scope="module", params=KERNELS)
def operations(request: pytest.FixtureRequest) -> Iterator[Operations]:
    """The operations of each kernel set of this machine, with two threads."""
    with open_operations(request.param, 2) as opened:
        assert opened.kernels == request.param
        yield opened


def normal(seed: int, *shape: int, spread: float = 1.0) -> FloatArray:
    """Normal float32 values."""
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def uneven_rows(seed: int, count: int, cols: int) -> FloatArray:
    """Rows of very different magnitudes."""
    return normal(seed, count, cols) * np.exp2(normal(seed + 1, count, 1, spread=4.0))


def make_weight(seed: int, rows: int, cols: int, kind: ScaleKind | None) -> StoredWeight:
    """A random weight with the scales of a kind, or of bfloat16 without a kind."""
    values = normal(seed, rows, cols) * np.exp2(normal(seed + 1, rows, 1))
    if kind is None:
        return StoredWeight(numpy_ops.bf16_bits(values))
    scale = weight_scale(values, kind)
    fp8 = numpy_ops.encode_e4m3(values / numpy_ops.expand_scale(scale, kind, rows, cols))
    return StoredWeight(fp8, scale, kind)


def weight_values(weight: StoredWeight) -> np.ndarray:
    """The numbers a weight stands for, in float64."""
    if weight.kind is None or weight.scale is None:
        return (weight.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return numpy_ops.decode_e4m3(weight.data) * numpy_ops.expand_scale(weight.scale, weight.kind, *weight.data.shape)


def reference_gemm(rows: FloatArray, weight: StoredWeight, bias: FloatArray | None) -> tuple[FloatArray, np.ndarray]:
    """The GEMM in NumPy, and the sum of magnitudes behind each of its results."""
    size = 0 if bias is None else np.abs(bias.astype(np.float64))
    magnitudes = np.abs(weight_values(weight)).T
    if weight.kind is None or weight.scale is None:
        result = numpy_ops.gemm_bf16(rows, weight_values(weight), bias)
        return result, np.abs(rows.astype(np.float64)) @ magnitudes + size
    quantised = numpy_ops.quantise(rows)
    result = numpy_ops.gemm_fp8(quantised, weight.data, weight.scale, weight.kind, bias)
    return result, np.abs(quantised.values()) @ magnitudes + size


def assert_near(operations: Operations, got: FloatArray, want: FloatArray, magnitude: np.ndarray | float) -> None:
    """Hold a result to the bound of its kernel set."""
    wide = want.astype(np.float64)
    allowed = np.spacing(np.abs(want)) if operations.kernels == "exact" else FAST_BOUND * np.asarray(magnitude) + 1e-30
    excess = np.abs(got.astype(np.float64) - wide) - allowed
    assert (excess <= 0).all(), f"{operations.kernels}: off by {np.abs(got - wide).max()} near {np.abs(wide).max()}"


def assert_within_one_step(got: FloatArray, want: FloatArray) -> None:
    """Equal but for the last place of float32: for operations that are the same in every kernel set."""
    assert (np.abs(got.astype(np.float64) - want) <= np.spacing(np.abs(want))).all()


def interesting_floats() -> FloatArray:
    """Every bfloat16 number, every E4M3 number, their middles and all their neighbours, and random bits."""
    bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    fp8 = numpy_ops.E4M3_VALUES[:127].astype(np.float32)
    middles = ((fp8[1:] + fp8[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([fp8, middles, bf16[np.isfinite(bf16)]])
    with np.errstate(over="ignore"):
        around = np.concatenate([edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, -edges)])
    halves = ((np.arange(1 << 16, dtype=np.uint32) << 16) + 0x8000).view(np.float32)
    noise = np.random.default_rng(3).integers(0, 1 << 32, 500_000, dtype=np.uint32).view(np.float32)
    everything = np.concatenate([around, -around, halves, noise])
    return everything[np.isfinite(everything)]


def test_e4m3_is_nearest_even_and_saturates() -> None:
    values = interesting_floats()
    np.testing.assert_array_equal(e4m3_from_float(values), numpy_ops.encode_e4m3(values))
    fp8 = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(float_from_e4m3(fp8), numpy_ops.decode_e4m3(fp8).astype(np.float32))


def test_bf16_is_nearest_even() -> None:
    values = interesting_floats()
    np.testing.assert_array_equal(bf16_from_float(values), numpy_ops.bf16_bits(values))
    bits = np.arange(1 << 16, dtype=np.uint32)
    np.testing.assert_array_equal(float_from_bf16(bits.astype(np.uint16)).view(np.uint32), bits << 16)


def test_conversions_of_nan_and_infinity() -> None:
    odd = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert (e4m3_from_float(odd) & 127 == 127).all()
    assert np.isnan(float_from_bf16(bf16_from_float(odd))).all()
    infinite = np.array([np.inf, -np.inf], np.float32)
    assert float_from_e4m3(e4m3_from_float(infinite)).tolist() == [448.0, -448.0]
    assert float_from_bf16(bf16_from_float(infinite)).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("width", [1, 5, 33, 130, 192, 5120])
def test_rms_norm(operations: Operations, width: int) -> None:
    rows = uneven_rows(width, 9, width)
    rows[3] = 0
    weight = normal(width + 2, width)
    assert_within_one_step(operations.rms_norm(rows, weight, 1e-5), numpy_ops.rms_norm(rows, weight, 1e-5))
    rows[5, width // 2] = np.nan
    got = operations.rms_norm(rows, weight, 1e-5)
    assert np.isnan(got[5]).all() and np.isfinite(np.delete(got, 5, axis=0)).all()


@pytest.mark.parametrize(("width", "slices"), [(1, 1), (5, 1), (130, 1), (192, 2), (5120, 8), (24, 3)])
def test_prepare_fp8(operations: Operations, width: int, slices: int) -> None:
    rows = uneven_rows(width, 12, width)
    rows[4] = 0
    rows[5] = np.float32(1e-40)
    values, scales = operations.prepare(rows, slices, has_fp8=True)
    expected = numpy_ops.quantise(rows, slices)
    part = width // slices
    np.testing.assert_array_equal(scales, expected.scales)
    fp8 = numpy_ops.decode_e4m3(expected.fp8).reshape(12, slices, part)
    np.testing.assert_array_equal(values[:, :, :part], fp8.astype(np.float32))
    assert (values[:, :, part:] == 0).all()


@pytest.mark.parametrize(("width", "slices"), [(1, 1), (128, 1), (130, 1), (320, 1), (1536, 2), (5120, 8)])
def test_prepare_groups(operations: Operations, width: int, slices: int) -> None:
    rows = uneven_rows(width, 9, width) * np.exp2(normal(1, 1, width, spread=3.0))
    rows[4] = 0
    rows[5, :128] = np.float32(1e-40)
    values, scales = operations.prepare_groups(rows, slices)
    expected = numpy_ops.quantise_groups(rows)
    part = width // slices
    np.testing.assert_array_equal(scales.reshape(9, -1), expected.scales)
    fp8 = numpy_ops.decode_e4m3(expected.fp8).reshape(9, slices, part)
    np.testing.assert_array_equal(values[:, :, :part], fp8.astype(np.float32))
    assert (values[:, :, part:] == 0).all()


def test_a_row_too_small_for_a_scale_stays_finite(operations: Operations) -> None:
    rows = np.zeros((2, 40), np.float32)
    rows[:, 3] = (1e-43, -1e-45)
    got = operations.gemm(GemmCase(rows, make_weight(0, 9, 40, "channel")))
    assert (np.abs(got) < 1e-40).all()


@pytest.mark.parametrize(("width", "slices"), [(1, 1), (33, 1), (192, 2)])
def test_prepare_floats(operations: Operations, width: int, slices: int) -> None:
    rows = uneven_rows(width, 7, width)
    values, _ = operations.prepare(rows, slices, has_fp8=False)
    part = width // slices
    np.testing.assert_array_equal(values[:, :, :part], rows.reshape(7, slices, part))
    assert (values[:, :, part:] == 0).all()


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_gemm(operations: Operations, rows: int, cols: int, kind: ScaleKind | None) -> None:
    weight = make_weight(rows + cols, rows, cols, kind)
    bias = normal(7, rows)
    for count in (1, 6, 21):
        inputs = uneven_rows(count, count, cols)
        want, magnitude = reference_gemm(inputs, weight, bias)
        assert_near(operations, operations.gemm(GemmCase(inputs, weight, bias)), want, magnitude)


@pytest.mark.parametrize("kind", KINDS)
def test_every_fp8_value_is_read_as_its_number(operations: Operations, kind: ScaleKind) -> None:
    fp8 = np.delete(np.arange(256, dtype=np.uint8), [127, 255])
    for cols in (1, 40):
        weight = StoredWeight(np.repeat(fp8[:, None], cols, axis=1), np.ones((256, 1), np.float32), kind)
        inputs = np.zeros((2, cols), np.float32)
        inputs[:, -1] = (448, -448)
        got = operations.gemm(GemmCase(inputs, weight))
        np.testing.assert_array_equal(got, np.outer([448, -448], numpy_ops.decode_e4m3(fp8)).astype(np.float32))


@pytest.mark.parametrize(("rows", "cols"), [(3, 5), (33, 129), (40, 130), (150, 320), (300, 1536), (9, 8192)])
def test_gemm_of_groups(operations: Operations, rows: int, cols: int) -> None:
    weight, bias = make_weight(rows + cols, rows, cols, "tile"), normal(7, rows)
    for count in (1, 6, 150):
        inputs = uneven_rows(count, count, cols) * np.exp2(normal(1, 1, cols, spread=3.0))
        quantised = numpy_ops.quantise_groups(inputs)
        want = numpy_ops.gemm_groups(quantised, weight.data, weight.scale, "tile", bias)
        magnitude = np.abs(quantised.values()) @ np.abs(weight_values(weight)).T + np.abs(bias)
        assert_near(operations, operations.gemm(GemmCase(inputs, weight, bias, has_groups=True)), want, magnitude)


def test_groups_of_gathered_rows_and_slices(operations: Operations) -> None:
    weight = make_weight(1, 260, 640, "tile")
    inputs = uneven_rows(2, 90, 320) * np.exp2(normal(1, 1, 320, spread=3.0))
    chosen = np.random.default_rng(0).integers(0, 90, 140, dtype=np.int32)
    got = operations.gemm(
        GemmCase(inputs, weight, None, chosen, row_slice=(100, 77), col_slice=(256, 320), has_groups=True)
    )
    rows = numpy_ops.quantise_groups(inputs).values()[chosen]
    part = weight_values(weight)[100:177, 256:576]
    assert_near(operations, got, (rows @ part.T).astype(np.float32), np.abs(rows) @ np.abs(part).T)
    alone = GemmCase(inputs, weight, None, chosen[100:101], row_slice=(100, 77), col_slice=(256, 320), has_groups=True)
    np.testing.assert_array_equal(operations.gemm(alone)[0], got[100])


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_scales_lose_nothing(operations: Operations, kind: ScaleKind) -> None:
    weight = make_weight(19, 40, 200, kind)
    weight = StoredWeight(weight.data, (weight.scale * np.float32(1e-10)).astype(np.float32), kind)
    for count in (1, 5):
        inputs = uneven_rows(20, count, 200)
        want, magnitude = reference_gemm(inputs, weight, None)
        assert_near(operations, operations.gemm(GemmCase(inputs, weight)), want, magnitude)


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_slices_gathered_rows_and_company(operations: Operations, kind: ScaleKind | None) -> None:
    weight = make_weight(1, 260, 330, kind)
    values = weight_values(weight)
    inputs, bias = uneven_rows(2, 11, 100), normal(3, 77)
    chosen = np.array([7, 0, 7, 10, 3], np.int32)
    sliced = GemmCase(inputs, weight, bias, chosen, row_slice=(131, 77), col_slice=(90, 100))
    other = GemmCase(uneven_rows(4, 3, 330), weight)
    empty = GemmCase(inputs, weight, bias, chosen[:0], row_slice=(131, 77), col_slice=(90, 100))
    got, got_other, got_empty = operations.gemms([sliced, other, empty])
    rows = inputs if kind is None else numpy_ops.quantise(inputs).values()
    part = values[131 : 131 + 77, 90:190]
    want = rows[chosen].astype(np.float64) @ part.T + bias.astype(np.float64)
    magnitude = np.abs(rows[chosen]).astype(np.float64) @ np.abs(part).T + np.abs(bias)
    assert_near(operations, got, want.astype(np.float32), magnitude)
    np.testing.assert_array_equal(got_other, operations.gemm(other))
    assert got_empty.shape == (0, 77)


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_a_slice_is_the_same_at_every_row_count(operations: Operations, kind: ScaleKind | None) -> None:
    weight, inputs = make_weight(7, 60, 330, kind), uneven_rows(8, 21, 200)
    whole = operations.gemm(GemmCase(inputs, weight, col_slice=(90, 200)))
    for count in (1, 3, 4, 5, 8):
        got = operations.gemm(GemmCase(inputs[:count], weight, col_slice=(90, 200)))
        np.testing.assert_array_equal(got, whole[:count], err_msg=f"{count} rows")


@pytest.mark.parametrize("kind", KINDS)
def test_gemm_in_slices_of_the_row(operations: Operations, kind: ScaleKind) -> None:
    weight = make_weight(5, 50, 384, kind)
    inputs = uneven_rows(6, 5, 384)
    parts = [
        operations.gemm(GemmCase(np.ascontiguousarray(part), weight, col_slice=(index * 96, 96)))
        for index, part in enumerate(np.split(inputs, 4, axis=1))
    ]
    quantised = numpy_ops.quantise(inputs, 4)
    want = numpy_ops.gemm_fp8(quantised, weight.data, weight.scale, kind)
    magnitude = np.abs(quantised.values()) @ np.abs(weight_values(weight)).T
    got = operations.reduce_slices(np.stack(parts).reshape(4, -1)).reshape(want.shape)
    assert (np.abs(got.astype(np.float64) - want) <= 2 * FAST_BOUND * magnitude).all()


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_a_weight_may_lie_anywhere_in_its_file(operations: Operations, kind: ScaleKind | None) -> None:
    weight = make_weight(8, 40, 130, kind)
    case = GemmCase(uneven_rows(9, 5, 130), weight)
    start = 1 if weight.is_fp8 else 2
    memory = np.zeros(weight.data.nbytes + start, np.uint8)
    moved = memory[start:].view(weight.data.dtype).reshape(weight.data.shape)
    moved[:] = weight.data
    shifted = GemmCase(case.rows, StoredWeight(moved, weight.scale, weight.kind))
    np.testing.assert_array_equal(operations.gemm(shifted), operations.gemm(case))


@pytest.mark.parametrize("kind", ["channel", "tile", None])
def test_nan_stays_in_its_row(operations: Operations, kind: ScaleKind | None) -> None:
    weight = make_weight(10, 45, 130, kind)
    inputs = uneven_rows(11, 9, 130)
    clean = operations.gemm(GemmCase(inputs, weight))
    for value in (np.nan, np.inf, -np.inf):
        bad = inputs.copy()
        bad[4, 129] = value
        got = operations.gemm(GemmCase(bad, weight))
        assert not np.isfinite(got[4]).any()
        np.testing.assert_array_equal(np.delete(got, 4, axis=0), np.delete(clean, 4, axis=0))


@pytest.mark.parametrize("cols", [130, 192])
@pytest.mark.parametrize(("kind", "has_groups"), [*((kind, False) for kind in (*KINDS, None)), ("tile", True)])
def test_a_row_is_the_same_at_every_row_count(
    operations: Operations, kind: ScaleKind | None, has_groups: bool, cols: int
) -> None:
    weight, bias = make_weight(12, 37, cols, kind), normal(14, 37)
    inputs = uneven_rows(13, 4096, cols)
    whole = operations.gemm(GemmCase(inputs, weight, bias, has_groups=has_groups))
    for count in ROW_COUNTS:
        first = (count * 37) % (4096 - count)
        part = GemmCase(inputs[first : first + count], weight, bias, has_groups=has_groups)
        np.testing.assert_array_equal(operations.gemm(part), whole[first : first + count], err_msg=f"{count} rows")
    backwards = np.arange(4095, -1, -1, dtype=np.int32)
    gathered = operations.gemm(GemmCase(inputs, weight, bias, backwards, has_groups=has_groups))
    np.testing.assert_array_equal(gathered, whole[::-1])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_threads_change_nothing(kernels: str, kind: ScaleKind | None) -> None:
    cases = [GemmCase(uneven_rows(15, count, 520), make_weight(16, 300, 520, kind)) for count in (1, 2, 40)]
    results = []
    for threads in (1, 2, 3, 5):
        with open_operations(kernels, threads) as operations:
            results.append(operations.gemms(cases))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("count", [1, 3, 4, 7, 15, 33, 4096, 10001])
def test_swiglu(operations: Operations, count: int) -> None:
    gate, up = normal(count, count, spread=4.0), uneven_rows(count, count, 1).ravel()
    gate[: min(count, 6)] = np.array([0.0, 60.0, -60.0, 300.0, -300.0, -87.5], np.float32)[: min(count, 6)]
    wide = gate.astype(np.float64)
    got, want = operations.swiglu(gate, up), numpy_ops.swiglu(gate, up)
    assert_near(operations, got, want, np.abs(want) + 1e-20 * np.abs(wide * up))
    gate[count // 2] = np.nan
    got = operations.swiglu(gate, up)
    assert np.isnan(got[count // 2]) and np.isfinite(np.delete(got, count // 2)).all()


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 5, 8])
def test_reduce_slices_and_residual(operations: Operations, num_parts: int) -> None:
    parts = normal(num_parts, num_parts, 9001)
    np.testing.assert_array_equal(operations.reduce_slices(parts), numpy_ops.reduce_slices(list(parts)))
    update = normal(20, 9001)
    np.testing.assert_array_equal(operations.add_rows(parts[0], update), numpy_ops.add_residual(parts[0], update))


def test_embedding_and_gathered_rows(operations: Operations) -> None:
    table = numpy_ops.bf16_bits(normal(21, 50, 33))
    tokens = np.array([49, 0, 7, 7], np.int32)
    rows = operations.embed(table, tokens)
    np.testing.assert_array_equal(rows.view(np.uint32), table[tokens].astype(np.uint32) << 16)
    np.testing.assert_array_equal(operations.gather_rows(rows, np.array([3, 1], np.int32)), rows[[3, 1]])


@pytest.mark.parametrize(
    ("num_experts", "rule"),
    [
        (160, RouterRule(8, True, 2.5)),
        (128, RouterRule(8, True, 1.0)),
        (16, RouterRule(3, True, 1.5)),
        (8, RouterRule(4, False, 0.5)),
        (7, RouterRule(7, True, 7.0)),
    ],
)
def test_route(operations: Operations, num_experts: int, rule: RouterRule) -> None:
    logits = normal(22, 200, num_experts, spread=2.0)
    logits[50:60] = np.round(logits[50:60])
    logits[60] = 0
    logits[61] = -200
    bias = np.round(normal(23, num_experts, spread=0.3), 1).astype(np.float32)
    for selection in (bias, np.zeros_like(bias)):
        experts, weights = operations.route(logits, selection, rule)
        want = numpy_ops.route(logits, np.eye(num_experts, dtype=np.float32), selection, rule)
        order = np.argsort(want.experts, axis=1)
        np.testing.assert_array_equal(experts, np.take_along_axis(want.experts, order, axis=1))
        assert_within_one_step(weights, np.take_along_axis(want.weights, order, axis=1))


def test_route_of_nan_gives_distinct_experts(operations: Operations) -> None:
    logits = normal(24, 3, 16)
    logits[1] = np.nan
    logits[2, 5] = np.nan
    experts, weights = operations.route(logits, np.zeros(16, np.float32), RouterRule(3, True, 1.5))
    assert all(len(set(row)) == 3 and 0 <= min(row) and max(row) < 16 for row in experts.tolist())
    assert np.isnan(weights[1]).all() and 5 not in experts[2]


@pytest.mark.parametrize("hidden", [1, 33, 192])
def test_combine(operations: Operations, hidden: int) -> None:
    source = np.random.default_rng(25)
    count, kept, num_experts = 13, 4, 10
    experts = np.stack([np.sort(source.permutation(num_experts)[:kept]) for _ in range(count)]).astype(np.int32)
    rows = source.permutation(count * kept).astype(np.int32).reshape(count, kept)
    routed, shared = normal(26, count * kept, hidden), normal(27, count, hidden)
    weights = np.abs(normal(28, count, kept))
    got = operations.combine(routed, rows, weights, experts, shared, (0, num_experts))
    assert_within_one_step(got, numpy_ops.combine(routed[rows], weights, shared))
    part = operations.combine(routed, rows, weights, experts, shared, (3, 7))
    is_inside = (experts >= 3) & (experts < 7)
    assert_within_one_step(part, numpy_ops.combine(routed[rows], np.where(is_inside, weights, 0), shared))
