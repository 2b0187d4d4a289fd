"""Rotation, the page cache and attention over it, against NumPy and bitwise against themselves.

Every page starts as NaN, so that a read behind the end of a request or in a page it does not hold shows.

Bounds and what was seen: exact 1e-7 (0); fast over float32 pages 2e-6 (4e-7), over bfloat16 pages 2e-3 (4e-5), since a
weight between two bfloat16 numbers may be rounded to the other one; the median of any 1e-7 (1.5e-8).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from tests.cpu.kernel_sets import KERNELS, open_operations
from tests.cpu.operations import Operations, PageCache, PagedRequest
from tests.reference import numpy_ops
from tests.reference.numpy_ops import FloatArray

pytestmark = pytest.mark.sanitize

SPLIT = 1024
EPSILON = 1e-5
EXACT_BOUND = 1e-7
FAST_BOUND = {"f32": 2e-6, "bf16": 2e-3}
MEDIAN_BOUND = 1e-7


@dataclass(frozen=True)
class Heads:
    """Shape of the heads and of the pages that hold them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    page_tokens: int
    theta: float = 1e6


HEADS = {
    "glm47": Heads(24, 2, 128, 64, 16),
    "small": Heads(6, 2, 64, 32, 8),
    "whole": Heads(6, 3, 32, 32, 16, 1e5),
    "alone": Heads(2, 2, 36, 18, 5),
}
MIXED = ((0, 37), (64, 5), (129, 1), (0, 1), (15, 18), (200, 1), (0, 16))


@dataclass(frozen=True)
class Scene:
    """A filled cache, the rows a step computes, and what keys, values and queries were before they went in."""

    heads: Heads
    cache: PageCache
    requests: tuple[PagedRequest, ...]
    raw_heads: tuple[FloatArray, FloatArray, FloatArray]
    norms: tuple[FloatArray, FloatArray] | None
    positions: np.ndarray
    query: FloatArray

    def step_query(self) -> FloatArray:
        """Queries of the rows of the step, those of all requests one after another."""
        return np.ascontiguousarray(self.query[self.step_rows()])

    def step_rows(self) -> list[int]:
        """Which of all rows the step computes."""
        ends = np.cumsum([request.first_position + request.row_count for request in self.requests])
        return [row for end, r in zip(ends, self.requests, strict=True) for row in range(end - r.row_count, end)]

    def context(self, request: PagedRequest, layer: int = 1) -> tuple[FloatArray, FloatArray]:
        """Keys and values [positions, kv_heads, head_dim] of a request as the pages hold them."""
        count = request.first_position + request.row_count
        kept = self.cache.data[layer][:, request.pages]
        if kept.dtype == np.uint16:
            kept = (kept.astype(np.uint32) << 16).view(np.float32)
        shape = (-1, self.heads.num_kv_heads, self.heads.head_dim)
        by_dimension = kept[0].reshape(*kept[0].shape[:2], self.heads.head_dim, self.heads.page_tokens)
        keys = by_dimension.transpose(0, 3, 1, 2).reshape(shape)
        values = kept[1].transpose(0, 2, 1, 3).reshape(shape)
        return keys[:count], values[:count]


@pytest.fixture(scope="module", params=KERNELS)
def operations(request: pytest.FixtureRequest) -> Iterator[Operations]:
    """The operations of each kernel set of this machine, with two threads."""
    with open_operations(request.param, 2) as opened:
        yield opened


def poisoned_cache(heads: Heads, dtype: str, num_pages: int) -> PageCache:
    """Pages of two layers, all NaN."""
    shape = (2, 2, num_pages, heads.num_kv_heads, heads.page_tokens, heads.head_dim)
    data = np.full(shape, np.nan, np.float32) if dtype == "f32" else np.full(shape, 0xFFFF, np.uint16)
    return PageCache(data, heads.num_heads, heads.rotary_dim)


@cache
def make_scene(name: str, dtype: str, has_norms: bool, spans: tuple[tuple[int, int], ...] = MIXED) -> Scene:
    """Store the whole context of every span's request, in pages taken in random order from a poisoned cache."""
    heads = HEADS[name]
    source = np.random.default_rng(len(name))
    totals = [first + count for first, count in spans]
    page_counts = [-(-total // heads.page_tokens) for total in totals]
    page_cache = poisoned_cache(heads, dtype, sum(page_counts) + 7)
    pages = source.permutation(sum(page_counts) + 7).astype(np.int32)
    held = np.split(pages, np.cumsum(page_counts))[:-1]
    row_firsts = np.cumsum([0, *totals]).tolist()
    step_firsts = np.cumsum([0, *(count for _, count in spans)]).tolist()
    whole = [PagedRequest(row_firsts[i], total, 0, held[i]) for i, total in enumerate(totals)]
    step = tuple(PagedRequest(step_firsts[i], count, first, held[i]) for i, (first, count) in enumerate(spans))
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    raw = tuple(source.standard_normal((sum(totals), c, heads.head_dim)).astype(np.float32) * 2 for c in counts)
    norms = tuple(source.standard_normal((2, heads.head_dim)).astype(np.float32) + 1) if has_norms else None
    positions = np.concatenate([np.arange(total) for total in totals])
    with Operations("plain", 2) as writer:
        table = writer.fill_rotary(positions, heads.rotary_dim, heads.theta)
        query = writer.rope_and_cache(raw, norms, table, page_cache, 1, whole, EPSILON)
    return Scene(heads, page_cache, step, raw, norms, positions, query)


def attention_in_splits(scene: Scene, request: PagedRequest, row: int, query: FloatArray, is_bf16: bool) -> FloatArray:
    """One row's attention in float64, its context cut in splits with their own power of two above the weights."""
    keys, values = scene.context(request)
    allowed = request.first_position + row + 1
    group = scene.heads.num_heads // scene.heads.num_kv_heads
    result = np.empty((scene.heads.num_heads, scene.heads.head_dim), np.float32)
    for head in range(scene.heads.num_heads):
        own_keys, own_values = (part[:allowed, head // group].astype(np.float64) for part in (keys, values))
        scores = (own_keys @ query[head].astype(np.float64) * scene.heads.head_dim**-0.5).astype(np.float32)
        above, below = np.zeros(scene.heads.head_dim), 0.0
        for first in range(0, allowed, SPLIT):
            part = scores[first : first + SPLIT]
            raw = numpy_ops.softmax_weights(part)
            share = 2.0 ** (covering_exponent(part) - covering_exponent(scores))
            weights = numpy_ops.round_bf16(raw) if is_bf16 else raw
            above += share * (weights.astype(np.float64) @ own_values[first : first + SPLIT])
            below += share * raw.astype(np.float64).sum()
        result[head] = above / below
    return result


def covering_exponent(scores: FloatArray) -> int:
    """The least whole k with exp(score) of at most 2^k for all scores."""
    return math.ceil(float(scores.max()) / math.log(2.0))


def assert_attention(operations: Operations, scene: Scene, dtype: str) -> None:
    """Hold every row of the step to the bounds of the kernel set, relative to the largest value of its context."""
    query = scene.step_query()
    got = operations.attend(query, scene.cache, 1, list(scene.requests))
    assert np.isfinite(got).all()
    errors = []
    for request in scene.requests:
        largest = np.abs(scene.context(request)[1]).max()
        for row in range(request.row_count):
            index = request.row_first + row
            want = attention_in_splits(scene, request, row, query[index], dtype == "bf16")
            errors.append(np.abs(got[index].astype(np.float64) - want) / largest)
    error = np.concatenate(errors)
    assert error.max() <= (EXACT_BOUND if operations.kernels == "exact" else FAST_BOUND[dtype]), error.max()
    assert np.median(error) <= MEDIAN_BOUND, np.median(error)


@pytest.mark.parametrize("rotary_dim", [2, 18, 64, 128])
def test_rotary_table(operations: Operations, rotary_dim: int) -> None:
    positions = np.array([0, 1, 2, 17, 1023, 65535, 202751])
    for theta in (1e4, 1e6):
        got = operations.fill_rotary(positions, rotary_dim, theta)
        want = numpy_ops.rotary_table(positions, rotary_dim, theta)
        for part, expected in zip(got, want, strict=True):
            np.testing.assert_allclose(part, expected, rtol=2e-7, atol=1e-11)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", HEADS)
def test_what_is_stored_is_normed_rotated_and_rounded(name: str, dtype: str, has_norms: bool) -> None:
    scene = make_scene(name, dtype, has_norms)
    query, key, value = scene.raw_heads
    if scene.norms is not None:
        query, key = (numpy_ops.rms_norm(p, w, EPSILON) for p, w in zip((query, key), scene.norms, strict=True))
    query, key = (
        numpy_ops.rotary(part, scene.positions, scene.heads.rotary_dim, scene.heads.theta) for part in (query, key)
    )
    stored = [scene.context(request) for request in scene.requests]
    for got, want, raw_is_kept in (
        (scene.query, query, False),
        (np.concatenate([keys for keys, _ in stored]), key, False),
        (np.concatenate([values for _, values in stored]), value, True),
    ):
        rounded = numpy_ops.round_bf16(want) if dtype == "bf16" else want
        if raw_is_kept:
            np.testing.assert_array_equal(got, rounded)
            continue
        differs = got != rounded
        assert differs.mean() < (1e-3 if dtype == "bf16" else 0.1)
        np.testing.assert_allclose(got, rounded, rtol=2**-7 if dtype == "bf16" else 3e-7, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_nothing_else_is_written(dtype: str) -> None:
    scene = make_scene("small", dtype, True)
    data = scene.cache.data
    is_untouched = np.isnan(data) if dtype == "f32" else data == 0xFFFF
    assert is_untouched[0].all()
    keys, values = is_untouched[1]
    keys = keys.reshape(*keys.shape[:2], scene.heads.head_dim, scene.heads.page_tokens)
    slots = keys.all(axis=(1, 2)) & values.all(axis=(1, 3))
    for request in scene.requests:
        used = np.arange(len(request.pages) * scene.heads.page_tokens) < request.first_position + request.row_count
        np.testing.assert_array_equal(slots[request.pages].ravel(), ~used)
        slots[request.pages] = True
    assert slots.all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", HEADS)
def test_attention_of_mixed_requests(operations: Operations, name: str, dtype: str) -> None:
    assert_attention(operations, make_scene(name, dtype, True), dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_attention_over_several_splits(operations: Operations, dtype: str) -> None:
    scene = make_scene("small", dtype, False, ((1015, 20), (2100, 1), (1023, 1), (1024, 1)))
    assert_attention(operations, scene, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", HEADS)
def test_a_row_alone_is_the_row_in_company(operations: Operations, name: str, dtype: str) -> None:
    scene = make_scene(name, dtype, True)
    query = scene.step_query()
    together = operations.attend(query, scene.cache, 1, list(scene.requests))
    for request in scene.requests:
        for row in range(request.row_count):
            index = request.row_first + row
            alone = PagedRequest(0, 1, request.first_position + row, request.pages)
            got = operations.attend(query[index : index + 1], scene.cache, 1, [alone])
            np.testing.assert_array_equal(got[0], together[index])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_threads_and_pages_change_nothing(kernels: str, dtype: str) -> None:
    scene = make_scene("glm47", dtype, True)
    query = scene.step_query()
    results = []
    for threads in (1, 2, 3):
        with open_operations(kernels, threads) as operations:
            results.append(operations.attend(query, scene.cache, 1, list(scene.requests)))
    order = np.random.default_rng(0).permutation(scene.cache.data.shape[2])
    moved = PageCache(scene.cache.data[:, :, order].copy(), scene.heads.num_heads, scene.heads.rotary_dim)
    places = np.argsort(order).astype(np.int32)
    requests = [PagedRequest(r.row_first, r.row_count, r.first_position, places[r.pages]) for r in scene.requests]
    with open_operations(kernels, 2) as operations:
        results.append(operations.attend(query, moved, 1, requests))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_nan_in_the_context_or_the_query_shows(operations: Operations) -> None:
    scene = make_scene("small", "f32", True)
    query = scene.step_query()
    clean = operations.attend(query, scene.cache, 1, list(scene.requests))
    last = scene.requests[1]
    poisoned = scene.cache.data.copy()
    poisoned[1, 0, last.pages[0], 0, 2] = np.nan
    got = operations.attend(query, PageCache(poisoned, 6, 32), 1, list(scene.requests))
    rows = slice(last.row_first, last.row_first + last.row_count)
    assert np.isnan(got[rows, :3]).all()
    got[rows, :3] = clean[rows, :3]
    np.testing.assert_array_equal(got, clean)
    query[3, 4] = np.nan
    got = operations.attend(query, scene.cache, 1, list(scene.requests))
    assert np.isnan(got[3, 4]).all() and np.isnan(got).sum() == scene.heads.head_dim
