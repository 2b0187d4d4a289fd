"""Every operation of the CUDA library but GEMMs and experts against that of the CPU library, on fresh random inputs.

The exact CPU kernels compute in FP64. Shapes are those of one of eight ranks of GLM-4.7, and odd ones. An error is the
largest difference over the largest number of a row; BOUNDS has what is allowed per operation, and the largest error
seen is printed at the end with the seed that makes the inputs again. REPEATS runs of an operation give the same bits;
GLINT_TEST_REPEATS changes their number, for compute-sanitizer. GEMMs and experts: `test_gemms.py`, `test_experts.py`.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from glint.engine.args import Kernels
from tests.cpu.operations import GemmCase, Operations, PageCache, StoredWeight
from tests.gpu.operations_cases import (
    COUNTS,
    DECODE,
    FEW_COUNTS,
    HEADS,
    MIXED,
    PREFILL,
    REPEATS,
    RULES,
    STEP_CASES,
    STEP_HEADS,
    is_close_call,
    open_for,
    sampler_rows,
)
from tests.gpu.operations_cuda import CudaOperations, NormCase, RouteCase
from tests.gpu.operations_inputs import (
    ErrorRecord,
    Scene,
    make_scene,
    normal_rows,
    poisoned_cache,
    row_errors,
    source,
)
from tests.reference.numpy_ops import FloatArray, bf16_bits

BOUNDS = {
    "embed": 0.0,
    "gather rows": 0.0,
    "add rows": 0.0,
    "reduce parts": 0.0,
    "norm": 3e-7,
    "quantise": 0.0,
    "swiglu": 5e-7,
    "rotary table": 1e-7,
    "rotate: query, key": 2.0**-7,
    "rotate: share rounded otherwise": 1e-3,
    "rotate: value": 0.0,
    "attend": 2.0**-7 + 1e-5,
    "attend: median row": 1e-5,
    "attention step: scale": 2.0**-7,
    "attention step: FP8": 16 / 448 + 2.0**-6,
    "router weights": 2e-6,
    "sampler log-probabilities": 2e-6,
}
ROW_COUNTS = 4096


@pytest.fixture
def cuda(kernels: Kernels) -> Iterator[CudaOperations]:
    """The operations on the GPU, each run REPEATS times."""
    with CudaOperations(kernels, REPEATS) as operations:
        yield operations


@pytest.mark.parametrize("width", [5120, 576, 37])
def test_rows_by_index(record: ErrorRecord, cpu: Operations, width: int) -> None:
    numbers = source(width)
    table = bf16_bits(numbers.standard_normal((1003, width), np.float32))
    for count in FEW_COUNTS:
        tokens, sampled = numbers.integers(0, 1003, count, np.int32), numbers.integers(0, 1003, 5, np.int32)
        sampled_rows = np.where(numbers.random(count) < 0.3, numbers.integers(0, 5, count), -1).astype(np.int32)
        meant = np.where(sampled_rows < 0, tokens, sampled[sampled_rows]).astype(np.int32)
        rows, update = normal_rows(numbers, 2 * count, width), normal_rows(numbers, 2 * count, width)
        chosen = numbers.permutation(2 * count)[:count].astype(np.int32)
        added = cpu.add_rows(rows.ravel(), update.ravel()).reshape(rows.shape)
        with open_for(count) as cuda:
            what = f"{count} rows of {width}"
            record.compare("embed", cuda.embed(table, tokens, sampled_rows, sampled), cpu.embed(table, meant), what)
            record.compare("gather rows", cuda.gather_rows(rows, chosen, None), cpu.gather_rows(rows, chosen), what)
            gathered = cuda.gather_rows(rows, chosen, update)
            record.compare("gather rows", gathered, cpu.gather_rows(added, chosen), f"{what}, with update")
            record.compare("add rows", cuda.add_rows(rows.ravel(), update.ravel()), added.ravel(), what)


@pytest.mark.parametrize("width", [5120, 1536, 576, 200, 37, 1001, 8192])
@pytest.mark.parametrize("num_parts", [0, 1, 2, 4, 8])
def test_norm(record: ErrorRecord, cpu: Operations, width: int, num_parts: int) -> None:
    numbers = source(width, num_parts)
    for count in FEW_COUNTS:
        hidden = normal_rows(numbers, count, width)
        parts = np.stack([normal_rows(numbers, count, width) for _ in range(num_parts)]) if num_parts else None
        weight = (1 + numbers.standard_normal(width) / 4).astype(np.float32)
        empty = np.empty((0, count, width), np.float32)
        with open_for(count) as cuda:
            seen = cuda.norm(NormCase(hidden, empty if parts is None else parts, weight))
        reduced = hidden
        if parts is not None:
            update = cpu.reduce_slices(parts.reshape(num_parts, -1)) if num_parts > 1 else parts.reshape(-1)
            reduced = cpu.add_rows(hidden.ravel(), np.ascontiguousarray(update)).reshape(hidden.shape)
        record.compare("reduce parts", seen.hidden, reduced, f"{num_parts} parts, {count} rows of {width}")
        record.compare("norm", seen.normed, cpu.rms_norm(reduced, weight, 1e-5), f"{count} rows of {width}")
        fp8, scales = cpu.prepare(seen.normed, 1, True)
        record.compare("quantise", seen.fp8[:, :width], fp8[:, 0, :width], f"norm, {count} rows of {width}")
        record.compare("quantise", seen.scales[:, None], scales, f"norm, {count} rows of {width}")
        assert (seen.fp8[:, width:] == 0).all()


@pytest.mark.parametrize(
    ("width", "slices"), [(5120, 1), (1536, 8), (1536, 1), (200, 2), (37, 1), (12288, 1), (12288, 8)]
)
def test_quantise_and_swiglu(record: ErrorRecord, cpu: Operations, width: int, slices: int) -> None:
    numbers = source(width, slices)
    part = width // slices
    for count in FEW_COUNTS:
        what = f"{count} rows of {width} in {slices}"
        rows = normal_rows(numbers, count, width)
        rows[-1] = 0
        gate_up = np.full((count, 2 * width + 4), np.nan, np.float32)
        gate_up[:, : 2 * width] = normal_rows(numbers, count, 2 * width)
        with open_for(count) as cuda:
            seen, scales = cuda.prepare(rows, slices, True)
            gated, fp8, gated_scales = cuda.swiglu(gate_up, width, slices)
        expected, expected_scales = cpu.prepare(rows, slices, True)
        record.compare("quantise", seen[:, :, :part], expected[:, :, :part], what)
        record.compare("quantise", scales, expected_scales, what)
        assert (seen[:, :, part:] == 0).all()
        gate, up = (np.ascontiguousarray(gate_up[:, first : first + width]) for first in (0, width))
        record.compare("swiglu", gated, cpu.swiglu(gate, up), what)
        expected, expected_scales = cpu.prepare(gated, slices, True)
        record.compare("quantise", fp8[:, :, :part], expected[:, :, :part], f"swiglu, {what}")
        record.compare("quantise", gated_scales, expected_scales, f"swiglu, {what}")


@pytest.mark.parametrize("name", HEADS)
def test_rope_and_cache(record: ErrorRecord, cpu: Operations, portable: CudaOperations, name: str) -> None:
    heads = HEADS[name]
    for spans in (MIXED, PREFILL[:1]):
        scene = make_scene(cpu, heads, spans)
        positions = np.concatenate([np.arange(request.row_count, dtype=np.int32) for request in scene.whole])
        table = portable.fill_rotary(positions, heads.rotary_dim, heads.theta)
        record.compare("rotary table", np.hstack(table), np.hstack(scene.table), name)
        cache = poisoned_cache(heads, scene.cache.data.shape[2])
        query = portable.rope_and_cache(scene.raw, scene.norms, scene.table, cache, scene.whole)
        record.compare("rotate: query, key", query, scene.whole_query, f"{name}, query")
        compare_pages(record, cache, scene.cache, name)


def compare_pages(record: ErrorRecord, seen: PageCache, expected: PageCache, name: str) -> None:
    """Keys and values of all pages; what nothing was stored in is still poisoned."""
    (keys, values), (expected_keys, expected_values) = (
        (cache.data[1, 0], cache.data[1, 1]) for cache in (seen, expected)
    )
    assert (seen.data[0] == 0xFFFF).all()
    assert ((keys == 0xFFFF) == (expected_keys == 0xFFFF)).all()
    record.add("rotate: value", float(np.mean(values != expected_values)), name)
    record.add("rotate: share rounded otherwise", float(np.mean(keys != expected_keys)), name)
    record.compare("rotate: query, key", stored_keys(keys), stored_keys(expected_keys), f"{name}, key")


def stored_keys(pages: NDArray[np.uint16]) -> FloatArray:
    """The keys in pages that lie by dimension, [stored, head_dim]."""
    num_pages, kv_heads, page_tokens, head_dim = pages.shape
    by_token = pages.reshape(num_pages, kv_heads, head_dim, page_tokens).transpose(0, 1, 3, 2)
    stored = by_token[by_token[:, :, :, 0] != 0xFFFF]
    return (stored.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("spans", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_attend(
    record: ErrorRecord, cpu: Operations, cuda: CudaOperations, name: str, spans: tuple[tuple[int, int], ...]
) -> None:
    compare_attention(record, cpu, cuda, make_scene(cpu, HEADS[name], spans), f"{name}, {len(spans)} requests")


def test_attend_64_requests(record: ErrorRecord, cpu: Operations, portable: CudaOperations) -> None:
    spans = tuple((int(first), 1) for first in source(64).integers(0, 1200, 64))
    compare_attention(record, cpu, portable, make_scene(cpu, HEADS["glm47"], spans), "64 requests")


def compare_attention(record: ErrorRecord, cpu: Operations, cuda: CudaOperations, scene: Scene, what: str) -> None:
    """Heads of all rows; a weight between two bfloat16 numbers may be rounded to the other one, which few rows show.

    Each such weight moves a number by at most 2^-7 of its own product, so the error is measured against the sum of the
    magnitudes of all products.
    """
    seen = cuda.attend(scene.query, scene.cache, scene.step)
    expected = cpu.attend(scene.query, scene.cache, 1, scene.step)
    data = scene.cache.data.copy()
    data[:, 1] &= 0x7FFF
    magnitudes = cpu.attend(scene.query, replace(scene.cache, data=data), 1, scene.step)
    errors = np.abs(seen.astype(np.float64) - expected) / magnitudes
    record.add("attend", float(np.where(np.isfinite(errors), errors, np.inf).max()), what)
    record.add("attend: median row", float(np.median(row_errors(seen, expected))), what)


def step_positions(count: int) -> list[int]:
    """Positions of a decode step. 300 requests are more tasks than an H200 has warp groups, 264: some have two."""
    if count == len(DECODE):
        return [first for first, _ in DECODE]
    if count < 300:
        return [int(first) for first in source(count).integers(0, 1200, count)]
    positions = [int(first) for first in source(count).integers(0, 200, count)]
    positions[7::50] = (1024, 1500, 2047, 2048, 2400, 1100)
    return positions


@pytest.mark.parametrize(("name", "count"), STEP_CASES)
def test_attention_step(record: ErrorRecord, cpu: Operations, portable: CudaOperations, name: str, count: int) -> None:
    """One kernel and the separate ones give the same bits, in the pages too; both are near the CPU."""
    scene = make_scene(cpu, STEP_HEADS[name], tuple((first, 1) for first in step_positions(count)))
    step = scene.newest()
    fp8, scales = portable.attention_step(step.heads, scene.norms, step.table, step.cache, scene.step)
    apart = scene.newest()
    query = portable.rope_and_cache(apart.heads, scene.norms, apart.table, apart.cache, scene.step)
    attended = portable.attend(query, apart.cache, scene.step).reshape(fp8.shape)
    expected_fp8, expected_scales = portable.prepare(attended, 1, True)
    assert (fp8 == expected_fp8[:, 0, : fp8.shape[1]]).all()
    assert (scales == expected_scales[:, 0]).all()
    assert (step.cache.data == apart.cache.data).all()
    expected = cpu.attend(scene.query, scene.cache, 1, scene.step).reshape(fp8.shape)
    largest = np.abs(expected).max(axis=1) / np.float32(448)
    record.compare("attention step: scale", scales[:, None], largest[:, None], f"{name}, {count} requests")
    record.compare("attention step: FP8", fp8 * scales[:, None], expected, f"{name}, {count} requests")


@pytest.mark.parametrize("name", RULES)
def test_router(record: ErrorRecord, cpu: Operations, name: str) -> None:
    num_experts, width, rule = RULES[name]
    numbers = source(num_experts, width)
    weight = bf16_bits(numbers.standard_normal((num_experts, width)) * width**-0.5)
    bias = (numbers.standard_normal(num_experts) / 10).astype(np.float32)
    for count in (*COUNTS, 513):
        case = RouteCase(numbers.standard_normal((count, width)).astype(np.float32), weight, bias, rule)
        with open_for(count) as cuda:
            experts, weights = cuda.route(case)
        logits = cpu.gemm(GemmCase(case.rows, StoredWeight(weight)))
        expected, expected_weights = cpu.route(logits, bias, rule)
        is_same = (experts == expected).all(axis=1)
        selection = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
        assert all(is_close_call(selection[row], rule) for row in np.flatnonzero(~is_same))
        record.compare("router weights", weights[is_same], expected_weights[is_same], f"{name}, {count} rows")


@pytest.mark.parametrize("name", RULES)
def test_router_ties(cpu: Operations, portable: CudaOperations, name: str) -> None:
    """Logits that both sides compute exactly, many of them equal: the choice is the CPU's, the lower expert first."""
    num_experts, width, rule = RULES[name]
    numbers = source(num_experts, width, 1)
    weight = bf16_bits(numbers.integers(-1, 2, (num_experts, width)) * (numbers.random((1, width)) < 12 / width))
    for count in (1, 64, 65, 600):
        rows = numbers.integers(-1, 2, (count, width)).astype(np.float32) / 4
        case = RouteCase(rows, weight, np.zeros(num_experts, np.float32), rule)
        logits = cpu.gemm(GemmCase(rows, StoredWeight(weight)))
        expected, _ = cpu.route(logits, case.bias, rule)
        assert (portable.route(case)[0] == expected).all()
        assert len(np.unique(logits[0])) < num_experts


@pytest.mark.parametrize("name", ["glm47", "air", "six", "most experts"])
def test_router_row_is_the_same_for_every_row_count(name: str) -> None:
    num_experts, width, rule = RULES[name]
    numbers = source(num_experts, width, 2)
    weight = bf16_bits(numbers.standard_normal((num_experts, width)) * width**-0.5)
    bias = (numbers.standard_normal(num_experts) / 10).astype(np.float32)
    rows = numbers.standard_normal((ROW_COUNTS, width)).astype(np.float32)
    with CudaOperations("portable", 1) as cuda:
        cuda.route_row_counts(RouteCase(rows, weight, bias, rule))


@pytest.mark.parametrize("vocab_size", [151552, 1003, 64])
def test_sampler(record: ErrorRecord, portable: CudaOperations, vocab_size: int) -> None:
    rows = sampler_rows(vocab_size)
    for row, seen in zip(rows, portable.sample(rows), strict=True):
        expected = row.sample()
        assert (seen.token, seen.failure, seen.top_count) == (expected.token, expected.failure, expected.top_count)
        assert seen.tops()[0] == expected.tops()[0]
        values = [np.array([result.logprob, *result.tops()[1]]) for result in (seen, expected)]
        gap = float(np.max(np.abs(values[0] - values[1]) / (1 + np.abs(values[1]))))
        record.add("sampler log-probabilities", gap, f"{vocab_size} tokens, {row.settings}")
