"""Operations at the edges of what they take: ties of E4M3 values, odd sizes, rows that are not finite.

Those of GEMMs and experts: `test_gemms.py`, `test_expert_edges.py`.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.cpu.operations import Operations
from tests.cpu.sampling_rows import Row, random_row
from tests.gpu.operations_cases import REPEATS, RULES
from tests.gpu.operations_cuda import CudaOperations, NormCase, RouteCase
from tests.gpu.operations_inputs import normal_rows, same_bits, source
from tests.reference.numpy_ops import E4M3_MAX, E4M3_VALUES, FloatArray, bf16_bits, round_bf16

FEW_REPEATS = min(REPEATS, 3)
LOGPROB_ERROR = 2e-6
BAD_NUMBERS = np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)


def rows_near_ties(width: int) -> FloatArray:
    """Rows of every size that float32 has, of numbers on, just below and just above the middle of two values."""
    numbers = source(width)
    exponents = np.arange(-140, 127, 2)
    highest = np.ldexp(1 + numbers.random(len(exponents)), exponents).astype(np.float32)[:, None]
    fp8 = numbers.integers(0, 126, (len(exponents), width))
    middles = ((E4M3_VALUES[fp8] + E4M3_VALUES[fp8 + 1]) / 2).astype(np.float32)
    rows = highest / np.float32(E4M3_MAX) * middles
    steps = numbers.integers(0, 3, rows.shape)
    rows = np.where(steps == 1, np.nextafter(rows, np.float32(0)), rows)
    rows = np.where(steps == 2, np.nextafter(rows, highest), rows)
    rows = np.minimum(rows, highest) * np.where(np.arange(width) % 2, -1, 1).astype(np.float32)
    rows[:, :1] = highest
    rows[:, 1] = -0.0
    rows[:, 2] = np.finfo(np.float32).smallest_subnormal
    return rows


def test_fp8_near_ties(cpu: Operations, portable: CudaOperations) -> None:
    rows = rows_near_ties(1536)
    seen, scales = portable.prepare(rows, 1, True)
    expected, expected_scales = cpu.prepare(rows, 1, True)
    assert same_bits(scales, expected_scales)
    assert same_bits(seen[:, :, :1536], expected[:, :, :1536])


@pytest.mark.parametrize("width", [1, 16, 63, 64, 161, 5120])
def test_rows_to_bf16(portable: CudaOperations, width: int) -> None:
    rows = normal_rows(source(width), 5, width)
    seen, _ = portable.prepare(rows, 1, False)
    assert same_bits(seen[:, 0, :width], round_bf16(rows))
    assert (seen[:, :, width:] == 0).all()


@pytest.mark.parametrize("width", [5120, 1003])
def test_a_sampled_token_outside_the_vocabulary_reads_the_nearest_row(portable: CudaOperations, width: int) -> None:
    table = bf16_bits(source(width).standard_normal((1000, width), np.float32))
    tokens, sampled_rows = np.array([0, 5, 5, 5, 5, 999], np.int32), np.array([-1, 0, 1, 2, 3, -1], np.int32)
    seen = portable.embed(table, tokens, sampled_rows, np.array([44, -7, 998, 100000], np.int32))
    rows = table[[0, 44, 0, 998, 999, 999]]
    assert same_bits(seen, (rows.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize("width", [5120, 1003])
def test_norm_of_a_row_alone(portable: CudaOperations, width: int) -> None:
    numbers = source(width, 3)
    hidden = normal_rows(numbers, 64, width)
    parts = np.stack([normal_rows(numbers, 64, width) for _ in range(2)])
    weight = numbers.standard_normal(width).astype(np.float32)
    whole = portable.norm(NormCase(hidden, parts, weight))
    for row in (0, 21, 42, 63):
        one = slice(row, row + 1)
        alone = portable.norm(NormCase(hidden[one], np.ascontiguousarray(parts[:, one]), weight))
        for name in ("hidden", "normed", "fp8", "scales"):
            assert same_bits(getattr(alone, name), getattr(whole, name)[one]), name


@pytest.mark.parametrize("count", [32, 700])
def test_routed_rows_that_are_not_finite(count: int) -> None:
    """Their experts are there and ascend; the rows between them keep theirs."""
    num_experts, width, rule = RULES["glm47"]
    numbers = source(count, width)
    weight = bf16_bits(numbers.standard_normal((num_experts, width)) * width**-0.5)
    bias = (numbers.standard_normal(num_experts) / 10).astype(np.float32)
    rows = numbers.standard_normal((count, width)).astype(np.float32)
    spoiled = rows.copy()
    for row in range(0, count, 2):
        spoiled[row] = BAD_NUMBERS[(row // 2 + row // 8 * np.arange(width)) % 4]
    with CudaOperations("portable", FEW_REPEATS) as cuda:
        experts, weights = cuda.route(RouteCase(rows, weight, bias, rule))
        seen, seen_weights = cuda.route(RouteCase(spoiled, weight, bias, rule))
    assert (seen >= 0).all() and (seen < num_experts).all()
    assert (np.diff(seen, axis=1) > 0).all()
    assert (seen[1::2] == experts[1::2]).all()
    assert same_bits(seen_weights[1::2], weights[1::2])


def edge_rows(vocab_size: int) -> list[Row]:
    """Rows whose logits are equal, tied, NaN or all forbidden, and settings that leave one token."""
    plain = random_row(2, vocab_size)
    tied = (np.round(plain.logits * 2) / 2).astype(np.float32)
    nan = plain.logits.copy()
    nan[vocab_size // 2] = np.nan
    nothing = np.zeros(vocab_size, np.bool_)
    settings = [
        {"temperature": 0.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 0.9, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.5, "min_p": 0.05},
    ]
    rows = []
    for index, setting in enumerate(settings):
        asked = {"seed": 77 + index, "has_logprobs": 1, "num_logprobs": 4 * index} | setting
        for logits in (np.zeros(vocab_size, np.float32), tied, nan):
            rows.append(replace(plain, logits=logits, settings=asked, bias={}, history=(), prompt_count=0))
        rows.append(replace(plain, settings=asked, allowed=nothing))
        penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.7}
        rows.append(replace(plain, logits=tied, settings=asked | penalties))
    return rows


@pytest.mark.parametrize("vocab_size", [49152, 1003])
def test_sampler_of_ties_and_failures(portable: CudaOperations, vocab_size: int) -> None:
    rows = edge_rows(vocab_size)
    results = portable.sample(rows)
    assert {result.failure for result in results} == {0, 1, 2}
    for row, seen in zip(rows, results, strict=True):
        expected = row.sample()
        assert seen.failure == expected.failure
        if expected.failure:
            continue
        assert (seen.token, seen.tops()[0]) == (expected.token, expected.tops()[0])
        values = [np.array([result.logprob, *result.tops()[1]]) for result in (seen, expected)]
        assert np.max(np.abs(values[0] - values[1]) / (1 + np.abs(values[1]))) <= LOGPROB_ERROR
