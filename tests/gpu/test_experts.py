"""Routed experts of every family against the CPU's, stage by stage, and the grouping of tokens by expert.

The tiled family, with both multiplies, also computes the shared expert, and gives gate and up only behind SwiGLU, whose
error then counts too. What is printed at the end and what the environment changes: `test_operations.py`.
"""

from itertools import product

import numpy as np
import pytest

from tests.cpu.operations import Operations
from tests.gpu.operations_cases import RULES, open_for
from tests.gpu.operations_cuda import CudaOperations, Family, RouteCase
from tests.gpu.operations_experts import (
    FEW_TOKENS,
    Choices,
    ExpertCase,
    ExpertLayout,
    ExpertResult,
    IntArray,
    expect_experts,
    make_case,
    make_choices,
    make_weights,
    new_grouping,
    run_experts,
)
from tests.gpu.operations_inputs import ErrorRecord, same_bits, source
from tests.gpu.product_cases import EIGHTHS, FALLBACK_LAYOUTS, LAYOUTS, TILED, expert_runs
from tests.reference.numpy_ops import bf16_bits

BOUNDS = {
    "experts gate, up, hopper": 1e-3,
    "experts gate, up, portable": 1e-6,
    "experts gate, up, fallback": 1e-6,
    "experts down, combine, hopper": 1e-3,
    "experts down, combine, portable": 1e-6,
    "experts down, combine, fallback": 1e-6,
}
SPLIT_K_TOKENS = 256
TILE_SIZES = np.array([32, 64, 96, 112, 128])
FEW_COUNTS = {"glm-4.7": (1, 2, 16, 17, 31, 32, 33, 63), "glm-4.5-air": (1, 17, 33)}
RUNS = {f"{name}, {family}": (name, family, counts) for name, family, counts in expert_runs()}


@pytest.mark.parametrize("name", [*EIGHTHS, *FALLBACK_LAYOUTS])
@pytest.mark.parametrize("count", [1, 3, 64, 65, 256, 257, 1000, 1793, 2049, 4096])
def test_grouping(portable: CudaOperations, name: str, count: int) -> None:
    layout = LAYOUTS[name]
    for num_real, is_in_expert_order in product(sorted({0, count // 3, count}), (False, True)):
        choices = make_choices(layout, count, num_real)
        expected = choices.grouped(layout)
        room = new_grouping(layout, choices, is_in_expert_order)
        portable.call("glint_testing_group_tokens", room.native)
        num_tiles, num_rows, touched = room.counts.tolist()
        assert num_rows == len(expected.tokens)
        assert (room.row_tokens[:num_rows] == expected.tokens).all()
        assert (room.row_weights[:num_rows] == expected.weights).all()
        assert touched == len(np.unique(expected.experts[expected.experts < layout.num_local]))
        for tiles in (room.gate_up_tiles[:num_tiles], room.down_tiles[room.down_tiles[:, 2] > 0]):
            rows = [np.arange(first, first + size) for _, first, size, _ in tiles.tolist()]
            experts = np.repeat(tiles[:, 0], tiles[:, 2])
            order = np.concatenate(rows) if rows else np.empty(0, np.int64)
            assert (np.sort(order) == np.arange(num_rows)).all()
            assert (expected.experts[order] == experts).all()
        if count > SPLIT_K_TOKENS:
            assert_shared_evenly(room.gate_up_tiles[:num_tiles], is_in_expert_order)
        if count <= FEW_TOKENS:
            places = [(tile << 16) + (slot << 8) + size for _, _, size, tile in tiles.tolist() for slot in range(size)]
            assert room.row_places[:num_rows].tolist() == places


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 16, 17, 24, 25, 32, 33])
def test_grouping_beside_the_choice(name: str, count: int) -> None:
    """The router that also groups gives the bits of the router and of the grouping alone, in rows of NaN too."""
    num_experts, width, rule = RULES[name]
    numbers = source(count, num_experts, width)
    weight = bf16_bits(numbers.standard_normal((num_experts, width)) * width**-0.5)
    bias = (numbers.standard_normal(num_experts) / 10).astype(np.float32)
    rows = numbers.standard_normal((count, width)).astype(np.float32)
    rows[1::5] = np.nan
    case = RouteCase(rows, weight, bias, rule)
    parts = [(0, min(num_experts, 255), True), (num_experts // 4, num_experts // 2, False)]
    with open_for(count) as cuda:
        experts, weights = cuda.route(case)
        for (first, last, has_shared), num_real in product(parts, sorted({0, count // 2, count})):
            layout = ExpertLayout(num_experts, first, last, width, 0, rule.experts_per_token, has_shared)
            choices = Choices(experts, weights, num_real)
            alone, beside = new_grouping(layout, choices), new_grouping(layout, choices)
            cuda.call("glint_testing_group_tokens", alone.native)
            seen, seen_weights = cuda.route_and_group(case, beside.native)
            assert (seen == experts).all()
            assert same_bits(seen_weights, weights)
            assert (beside.counts == alone.counts).all()
            num_tiles, num_rows, _ = alone.counts.tolist()
            for field, used in (("gate_up_tiles", num_tiles), ("down_tiles", num_tiles), ("row_places", num_rows)):
                assert (getattr(beside, field)[:used] == getattr(alone, field)[:used]).all(), field
            assert (beside.row_tokens[:num_rows] == alone.row_tokens[:num_rows]).all()
            assert same_bits(beside.row_weights[:num_rows], alone.row_weights[:num_rows])


def assert_shared_evenly(tiles: IntArray, is_in_expert_order: bool) -> None:
    """Tiles go by falling padded size, or by expert; the last two of an expert share its tokens in multiples of 16."""
    sizes = TILE_SIZES[np.searchsorted(TILE_SIZES, tiles[:, 2])]
    assert (np.diff(tiles[:, 0]) >= 0).all() if is_in_expert_order else (np.diff(sizes) <= 0).all()
    assert (tiles[:, 3] == np.arange(len(tiles))).all()
    for expert in np.unique(tiles[:, 0]):
        counts = [size for _, _, size, _ in sorted(tiles[tiles[:, 0] == expert].tolist(), key=lambda tile: tile[1])]
        assert counts[:-2] == [TILE_SIZES[-1]] * len(counts[:-2])
        assert all(size % 16 == 0 for size in counts[:-1])
        assert all(0 <= first - second < 32 for first, second in zip(counts[-2:], counts[-1:], strict=False))


@pytest.mark.parametrize("run", RUNS)
def test_experts(record: ErrorRecord, cpu: Operations, run: str) -> None:
    name, family, counts = RUNS[run]
    layout = LAYOUTS[name]
    weights = make_weights(layout)
    for count, num_real in counts:
        case = make_case(layout, weights, count, num_real)
        with open_for(count, family) as cuda:
            seen = run_experts(cuda, case)
        compare_results(record, cpu, case, seen, family, f"{run}, {num_real} of {count} tokens")


def compare_results(
    record: ErrorRecord, cpu: Operations, case: ExpertCase, seen: ExpertResult, family: Family, what: str
) -> None:
    """Every stage of some tokens with the CPU's; the sums of all real tokens are finite."""
    layout, num_real = case.layout, case.choices.num_real
    first, second = f"experts gate, up, {family}", f"experts down, combine, {family}"
    tokens = np.unique(np.append(source(num_real).integers(0, num_real, 10), num_real - 1)).astype(np.int32)
    expected = expect_experts(cpu, case, tokens, seen.inputs)
    if layout.is_tiled or layout.kind is None:
        record.compare(first, seen.inputs[expected.places], expected.gated, what)
    else:
        record.compare(first, seen.gate[expected.places], expected.gate, f"{what}, gate")
        record.compare(first, seen.up[expected.places], expected.up, f"{what}, up")
    if not layout.is_tiled:
        record.compare(second, seen.routed[expected.places], expected.routed, f"{what}, down")
    record.compare(second, seen.out[tokens], expected.out, what)
    assert np.isfinite(seen.out[:num_real]).all()


@pytest.mark.parametrize("family", TILED)
@pytest.mark.parametrize(
    ("name", "count"), [(name, count) for name in EIGHTHS for count in FEW_COUNTS[name.split()[0]]]
)
def test_experts_of_few_tokens(record: ErrorRecord, cpu: Operations, name: str, count: int, family: Family) -> None:
    layout = LAYOUTS[name]
    for num_real in {count // 3 or 1, count}:
        case = make_case(layout, make_weights(layout), count, num_real)
        with open_for(count, family) as cuda:
            seen = run_experts(cuda, case)
        grouped = case.choices.grouped(layout)
        assert seen.touched == len(np.unique(grouped.experts[grouped.experts < layout.num_local]))
        compare_results(record, cpu, case, seen, family, f"{name}, {num_real} of {count} tokens")
