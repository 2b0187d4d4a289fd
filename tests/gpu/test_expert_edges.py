"""Experts at their edges, of both multiplies of the tiled family: every row count, padded steps, rows of zeros and NaN.

The fallback's rows are compared over row counts too.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.cpu.operations import Operations
from tests.gpu.operations_cases import REPEATS, open_for
from tests.gpu.operations_cuda import CudaOperations, Family
from tests.gpu.operations_experts import (
    UNUSABLE_EXPERTS,
    Choices,
    ExpertCase,
    make_case,
    make_choices,
    make_weights,
    run_experts,
)
from tests.gpu.operations_inputs import same_bits, source
from tests.gpu.product_cases import EIGHTHS, LAYOUTS, MANY_ROWS, ROWS_PAST_ALL_SWITCHES, TILED, TILED_LAYOUTS

FEW_REPEATS = min(REPEATS, 3)
MOST_TOKENS = 1024
PADDED_STEPS = ((1, 0), (1, 1), (8, 5), (64, 0), (64, 1), (64, 40), (64, 1000), (64, -5), (256, 0), (256, 100))
every_family = pytest.mark.parametrize("family", TILED)
every_eighth = pytest.mark.parametrize("name", EIGHTHS)


@every_family
@every_eighth
def test_experts_of_rows_that_are_zero(name: str, family: Family) -> None:
    """Gate+up tells down by values other than zero that a row is there; a row of zeros arrives too."""
    layout = LAYOUTS[name]
    for count in (1, 17, 64):
        case = make_case(layout, make_weights(layout), count, count)
        case.rows[::3] = 0.0
        with open_for(count, family) as cuda:
            seen = run_experts(cuda, case)
        assert (seen.out[::3] == 0.0).all()
        assert np.isfinite(seen.out).all()


@every_family
@every_eighth
def test_rows_of_nan_spoil_no_others(name: str, family: Family) -> None:
    layout = LAYOUTS[name]
    for count in (2, 64, 200, 300):
        case = make_case(layout, make_weights(layout), count, count)
        is_spoiled = np.arange(count) % 3 == 1
        spoiled = replace(case, rows=np.where(is_spoiled[:, None], np.float32(np.nan), case.rows))
        with CudaOperations(family, FEW_REPEATS) as cuda:
            expected, seen = (run_experts(cuda, each).out for each in (case, spoiled))
        assert same_bits(seen[~is_spoiled], expected[~is_spoiled]), count
        assert np.isnan(seen[is_spoiled]).all(), count


@every_family
@every_eighth
def test_order_of_the_tiles_changes_no_bit(name: str, family: Family) -> None:
    """Tiles by falling size and tiles by expert both reach every row once, at any number of tiles."""
    layout = LAYOUTS[name]
    for count in (257, 300, 641, MOST_TOKENS):
        case = make_case(layout, make_weights(layout), count, count)
        with CudaOperations(family, FEW_REPEATS) as cuda:
            by_size, by_expert = (run_experts(cuda, case, is_in_expert_order=order) for order in (False, True))
        assert same_bits(by_size.out, by_expert.out), count


@every_family
@pytest.mark.parametrize("name", TILED_LAYOUTS)
def test_row_of_the_experts_is_the_same_for_every_row_count(name: str, family: Family) -> None:
    count = MANY_ROWS if name in ("glm-4.7 tp8", "glm-4.7 ep8") else ROWS_PAST_ALL_SWITCHES
    layout = LAYOUTS[name]
    with CudaOperations(family, 1) as cuda:
        run_experts(cuda, make_case(layout, make_weights(layout), count, count), row_counts=True)


@pytest.mark.parametrize(("name", "count"), [("odd", MANY_ROWS), ("tp8 fallback", ROWS_PAST_ALL_SWITCHES)])
def test_row_of_the_fallback_is_the_same_for_every_row_count(name: str, count: int) -> None:
    layout = LAYOUTS[name]
    with CudaOperations("fallback", 1) as cuda:
        run_experts(cuda, make_case(layout, make_weights(layout), count, count), row_counts=True)


def padded(case: ExpertCase, count: int, num_real: int, is_counted: bool) -> ExpertCase:
    """The first tokens of a case; no expert of those behind the real ones is usable, counted as padding or not."""
    numbers = source(count, abs(num_real))
    real = min(max(num_real, 0), count)
    experts, weights = case.choices.experts[:count].copy(), case.choices.weights[:count].copy()
    unusable = np.array([*UNUSABLE_EXPERTS, case.layout.num_experts], np.int32)
    experts[real:] = numbers.choice(unusable, experts[real:].shape)
    weights[real:] = np.nan
    choices = Choices(experts, weights, num_real if is_counted else count)
    return replace(case, rows=case.rows[:count].copy(), shared=case.shared[:count].copy(), choices=choices)


@every_family
@every_eighth
def test_padded_steps_of_the_experts(name: str, family: Family) -> None:
    """Real rows have the bits that they have among others, the rest is finite, and only experts of real rows count."""
    layout = LAYOUTS[name]
    case = make_case(layout, make_weights(layout), MOST_TOKENS, MOST_TOKENS)
    with CudaOperations(family, FEW_REPEATS) as cuda:
        whole = run_experts(cuda, case).out
        for count, num_real in PADDED_STEPS:
            real = min(max(num_real, 0), count)
            used = case.choices.experts[:real]
            num_touched = len(np.unique(used[(used >= layout.first) & (used < layout.last)]))
            for is_counted in (True, False):
                seen = run_experts(cuda, padded(case, count, num_real, is_counted))
                assert same_bits(seen.out[:real], whole[:real]), (count, num_real, is_counted)
                assert np.isfinite(seen.out).all(), (count, num_real, is_counted)
                assert seen.touched == num_touched, (count, num_real, is_counted)


@every_family
@pytest.mark.parametrize("name", TILED_LAYOUTS)
@pytest.mark.parametrize("count", [17, 64, 200, 700])
def test_fp8_of_the_experts(cpu: Operations, name: str, count: int, family: Family) -> None:
    """Down takes exactly the FP8 values and scales of what gate and up gave."""
    layout = LAYOUTS[name]
    with CudaOperations(family, FEW_REPEATS) as cuda:
        seen = run_experts(cuda, make_case(layout, make_weights(layout), count, count))
    num_rows = len(make_choices(layout, count, count).grouped(layout).tokens)
    fp8, scales = cpu.prepare(seen.inputs[:num_rows], 1, True)
    assert same_bits(seen.fp8_scales[:num_rows], scales[:, 0])
    assert same_bits(seen.fp8[:num_rows], fp8[:, 0, : layout.width])
