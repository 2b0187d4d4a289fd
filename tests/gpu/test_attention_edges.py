"""Attention where it may go wrong: every size of a group, long contexts, NaN that must stay where it is, E4M3 pages.

Decode, prefill of both kernel sets and a row alone give the same bits, so that each is checked against the others.
"""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from glint.engine.args import Kernels
from tests.cpu.operations import Operations, PageCache, PagedRequest, Rounding
from tests.gpu.operations_cases import HEADS, STEP_HEADS
from tests.gpu.operations_cuda import CudaOperations
from tests.gpu.operations_inputs import PAGE_TOKENS, Heads, make_scene, poisoned_cache, row_errors, source
from tests.reference.numpy_ops import E4M3_VALUES, FloatArray, bf16_bits, round_bf16

REPEATS = 3
KERNEL_SETS: tuple[Kernels, ...] = ("hopper", "portable")
WEIGHT_ERROR = 2.0**-7
POISON = 0xFFFF
GROUP_DIMS = (128, 64, 32, 96, 16, 48, 126, 2)
FP8_HEADS = (
    HEADS["glm47"],
    HEADS["two"],
    Heads(9, 3, 48, 24, has_norms=False),
    Heads(8, 2, 96, 48, has_norms=False),
    Heads(16, 1, 128, 64, has_norms=False),
)
FP8_SPANS = ((0, 1), (63, 2), (64, 65), (900, 150), (2047, 17), (1023, 1), (5000, 3), (130, 33))
LONG_SPANS = ((28672, 300), (5000, 700), (0, 1500), (1023, 129), (8190, 2))
NAN_HEADS = ("glm47", "two", "whole")


def row_by_row(step: list[PagedRequest]) -> list[PagedRequest]:
    """Every row of a step as a request of its own, which decodes."""
    return [
        replace(request, row_first=request.row_first + row, row_count=1, first_position=request.first_position + row)
        for request in step
        for row in range(request.row_count)
    ]


def attend_in_all_ways(query: FloatArray, cache: PageCache, step: list[PagedRequest]) -> dict[str, FloatArray]:
    """The step as it is with both kernel sets, and with every row decoded."""
    with CudaOperations("hopper", REPEATS) as hopper, CudaOperations("portable", REPEATS) as portable:
        return {
            "hopper": hopper.attend(query, cache, step),
            "portable": portable.attend(query, cache, step),
            "decode": portable.attend(query, cache, row_by_row(step)),
        }


def same_bits(left: FloatArray, right: FloatArray) -> bool:
    """Whether two arrays hold the same numbers; one NaN is as good as another."""
    is_same = (left.view(np.uint32) == right.view(np.uint32)) | (np.isnan(left) & np.isnan(right))
    return bool(is_same.all())


def spoil(cache: PageCache, request: PagedRequest, positions: range, spoils_values: bool) -> None:
    """Make the keys of some positions NaN, and their values too or zero."""
    keys, values = cache.data[1]
    by_dim = keys.reshape(*keys.shape[:2], keys.shape[3], keys.shape[2])
    for position in positions:
        page, slot = request.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
        by_dim[page, :, :, slot] = POISON
        values[page, :, slot] = POISON if spoils_values else 0


def copy_of(cache: PageCache) -> PageCache:
    """The same pages in memory of their own."""
    return replace(cache, data=cache.data.copy())


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size(cpu: Operations, group: int) -> None:
    kv_heads, head_dim = 1 + group % 3, GROUP_DIMS[group % len(GROUP_DIMS)]
    heads = Heads(group * kv_heads, kv_heads, head_dim, max(2, head_dim // 4 * 2), has_norms=group % 2 == 0)
    spans = ((0, 1), (0, group + 20), (37 * group, 40), (63, 2), (64, 65), (2047, 17))
    scene = make_scene(cpu, heads, spans)
    seen = attend_in_all_ways(scene.query, scene.cache, scene.step)
    expected = cpu.attend(scene.query, scene.cache, 1, scene.step)
    num_rows = len(expected)
    assert row_errors(seen["decode"].reshape(num_rows, -1), expected.reshape(num_rows, -1)).max() <= WEIGHT_ERROR
    assert same_bits(seen["decode"], seen["hopper"])
    assert same_bits(seen["decode"], seen["portable"])


@pytest.mark.parametrize("name", NAN_HEADS)
def test_contexts_of_1_to_5000(cpu: Operations, name: str) -> None:
    spans = tuple((cached, 2) for cached in (*range(0, 5000, 397), 62, 63, 1022, 1023, 1024, 2047, 4095))
    spans += tuple((cached, 9 + cached % 40) for cached in range(0, 200, 13))
    scene = make_scene(cpu, HEADS[name], spans)
    seen = attend_in_all_ways(scene.query, scene.cache, scene.step)
    assert same_bits(seen["decode"], seen["hopper"])
    assert same_bits(seen["decode"], seen["portable"])
    alone = row_by_row(scene.step)[-1]
    with CudaOperations("portable", REPEATS) as cuda:
        last = cuda.attend(scene.query[-1:], scene.cache, [replace(alone, row_first=0)])
    assert same_bits(last, seen["decode"][-1:])


@pytest.mark.parametrize("name", NAN_HEADS)
def test_positions_before_the_context_are_not_seen(cpu: Operations, name: str) -> None:
    """Keys and values there are NaN: a first slot that was never written, whole pages, tiles and splits."""
    firsts = (0, 1, 2, 63, 64, 65, 127, 128, 129, 700, 1023, 1024, 1025, 1100, 2500)
    spans = tuple((first + gap, count) for first in firsts for gap, count in ((0, 1), (0, 3), (40, 1), (1024, 70)))
    scene = make_scene(cpu, HEADS[name], spans)
    step = [replace(request, context_first=firsts[index // 4]) for index, request in enumerate(scene.step)]
    expected = cpu.attend(scene.query, scene.cache, 1, step)
    spoiled = copy_of(scene.cache)
    for request in step:
        spoil(spoiled, request, range(request.context_first), spoils_values=True)
    seen = attend_in_all_ways(scene.query, spoiled, step)
    assert row_errors(seen["decode"].reshape(len(expected), -1), expected.reshape(len(expected), -1)).max() <= (
        WEIGHT_ERROR
    )
    assert same_bits(seen["decode"], seen["hopper"])
    assert same_bits(seen["decode"], seen["portable"])


@pytest.mark.parametrize("name", NAN_HEADS)
def test_nan_in_requests_stays_there(cpu: Operations, name: str) -> None:
    """More requests than the GPU takes at once, every third one of NaN keys and values."""
    scene = make_scene(cpu, HEADS[name], tuple((index * 7 % 90, 1 + index % 2 * 12) for index in range(700)))
    before = attend_in_all_ways(scene.query, scene.cache, scene.step)
    spoiled = copy_of(scene.cache)
    is_spoiled = np.zeros(len(scene.query), np.bool_)
    for request in scene.step[::3]:
        spoil(spoiled, request, range(request.first_position + request.row_count), spoils_values=True)
        is_spoiled[request.row_first : request.row_first + request.row_count] = True
    for way, seen in attend_in_all_ways(scene.query, spoiled, scene.step).items():
        assert np.isnan(seen[is_spoiled]).all(), way
        assert same_bits(seen[~is_spoiled], before[way][~is_spoiled]), way


@pytest.mark.parametrize("name", NAN_HEADS)
def test_nan_at_a_position_stays_out_of_earlier_rows(cpu: Operations, name: str) -> None:
    """A key of NaN with a value of zero is how a page keeps a row that is not finite."""
    first, count, position = 100, 90, 150
    scene = make_scene(cpu, HEADS[name], ((first, count), (0, 1)))
    before = attend_in_all_ways(scene.query, scene.cache, scene.step)
    spoiled = copy_of(scene.cache)
    spoil(spoiled, scene.step[0], range(position, position + 1), spoils_values=False)
    is_spoiled = np.zeros(len(scene.query), np.bool_)
    is_spoiled[position - first : count] = True
    for way, seen in attend_in_all_ways(scene.query, spoiled, scene.step).items():
        assert np.isnan(seen[is_spoiled]).all(), way
        assert same_bits(seen[~is_spoiled], before[way][~is_spoiled]), way


def fp8_pages(heads: Heads, spans: tuple[tuple[int, int], ...]) -> tuple[PageCache, list[PagedRequest]]:
    """Pages of every E4M3 number, in random order; what lies behind a request's end is NaN."""
    numbers = source(heads.num_heads, heads.head_dim, 8)
    totals = [first + count for first, count in spans]
    page_counts = [-(-total // PAGE_TOKENS) for total in totals]
    cache = poisoned_cache(heads, sum(page_counts))
    finite = bf16_bits(E4M3_VALUES[np.isfinite(E4M3_VALUES)])
    held = np.split(numbers.permutation(sum(page_counts)).astype(np.int32), np.cumsum(page_counts))[:-1]
    by_token = finite[numbers.integers(0, len(finite), (2, *cache.data.shape[2:]))]
    for pages, total in zip(held, totals, strict=True):
        if total % PAGE_TOKENS:
            by_token[:, pages[-1], :, total % PAGE_TOKENS :] = POISON
    cache.data[1, 0] = np.ascontiguousarray(by_token[0].swapaxes(2, 3)).reshape(by_token[0].shape)
    cache.data[1, 1] = by_token[1]
    firsts = np.cumsum([0, *(count for _, count in spans)]).tolist()
    step = [PagedRequest(firsts[i], count, first, held[i]) for i, (first, count) in enumerate(spans)]
    return cache, step


@pytest.mark.parametrize("heads", FP8_HEADS, ids=lambda heads: f"{heads.num_heads}x{heads.head_dim}")
@pytest.mark.parametrize(("spans", "position"), [(FP8_SPANS, None), (((100, 90), (0, 1)), 150)], ids=["all", "NaN"])
def test_e4m3_pages_are_bf16_pages_of_the_same_numbers(
    heads: Heads, spans: tuple[tuple[int, int], ...], position: int | None
) -> None:
    """Decode reads FP8, prefill reads pages widened before it; a position whose key is NaN stays so."""
    cache, step = fp8_pages(heads, spans)
    if position is not None:
        spoil(cache, step[0], range(position, position + 1), spoils_values=False)
    num_rows = step[-1].row_first + step[-1].row_count
    query = source(num_rows).standard_normal((num_rows, heads.num_heads, heads.head_dim), np.float32)
    query = round_bf16(query / np.float32(200))
    expected = attend_in_all_ways(query, cache, step)
    seen = attend_in_all_ways(query, replace(cache, rounding="fp8"), step)
    assert np.isnan(expected["decode"]).any() == (position is not None)
    for way, result in seen.items():
        assert same_bits(result, expected[way]), way
        assert same_bits(result, seen["decode"]), way


@pytest.mark.parametrize("rounding", ["none", "fp8"])
def test_long_prompts_have_the_same_bits_with_both_kernel_sets(rounding: Rounding) -> None:
    """More tiles of queries than an H200 has multiprocessors: a thread block goes from one prompt to the next."""
    heads = HEADS["glm47"]
    cache, step = fp8_pages(heads, LONG_SPANS)
    num_rows = step[-1].row_first + step[-1].row_count
    query = source(num_rows, 2).standard_normal((num_rows, heads.num_heads, heads.head_dim), np.float32)
    query = round_bf16(query / np.float32(200))
    seen = []
    for kernels in KERNEL_SETS:
        with CudaOperations(kernels, REPEATS) as cuda:
            seen.append(cuda.attend(query, replace(cache, rounding=rounding), step))
    assert np.isfinite(seen[0]).all()
    assert same_bits(seen[0], seen[1])


def stored_rows(cache: PageCache, num_rows: int) -> tuple[FloatArray, FloatArray]:
    """Keys and values [rows, kv_heads, head_dim] of one request whose pages lie in order."""
    keys, values = (cache.data[1].astype(np.uint32) << 16).view(np.float32)
    by_token = keys.reshape(*keys.shape[:2], keys.shape[3], keys.shape[2]).swapaxes(2, 3)
    rows = [part.swapaxes(1, 2).reshape(-1, keys.shape[1], keys.shape[3])[:num_rows] for part in (by_token, values)]
    return rows[0], rows[1]


@pytest.mark.parametrize("rotary_dim", [0, 18])
def test_a_value_that_bfloat16_cannot_hold_makes_its_key_nan(rotary_dim: int) -> None:
    """Its value is then zero, and no other row or head knows of it."""
    heads, num_rows, spoiled = Heads(2, 2, 36, rotary_dim, has_norms=True), 71, 7
    numbers = source(num_rows, rotary_dim)
    shape = (num_rows, heads.num_kv_heads, heads.head_dim)
    query, key, value = (numbers.standard_normal(shape, np.float32) for _ in range(3))
    expected_values = round_bf16(value)
    expected_values[spoiled, -1] = 0
    value[spoiled, -1, -1] = np.finfo(np.float32).max
    norms = (np.ones(heads.head_dim, np.float32), np.ones(heads.head_dim, np.float32))
    cache = poisoned_cache(heads, 2)
    request = PagedRequest(0, num_rows, 0, np.arange(2, dtype=np.int32))
    with CudaOperations("portable", REPEATS) as cuda:
        table = cuda.fill_rotary(np.arange(num_rows, dtype=np.int32), rotary_dim, 1e6)
        cuda.rope_and_cache((query, key, value), norms, table, cache, [request])
    keys, values = stored_rows(cache, num_rows)
    is_nan = np.zeros(shape[:2], np.bool_)
    is_nan[spoiled, -1] = True
    assert (np.isnan(keys).all(axis=2) == is_nan).all() and (np.isnan(keys).any(axis=2) == is_nan).all()
    assert (values == expected_values).all()


@pytest.mark.parametrize("name", ["glm47", "four of 2", "five of 1"])
def test_a_step_with_values_that_bfloat16_cannot_hold(cpu: Operations, portable: CudaOperations, name: str) -> None:
    """One kernel and the separate ones give the same bits; only the heads of that row and KV head are NaN."""
    heads, count = STEP_HEADS[name], 300
    positions = (index * 7 % 200 + (1000 if index % 50 == 7 else 0) for index in range(count))
    scene = make_scene(cpu, heads, tuple((first, 1) for first in positions))
    step, apart = scene.newest(), scene.newest()
    is_spoiled = np.zeros((count, heads.num_kv_heads), np.bool_)
    is_spoiled[::3, -1] = True
    for rows in (step, apart):
        rows.heads[2][is_spoiled, -1] = np.finfo(np.float32).max
    fp8, scales = portable.attention_step(step.heads, scene.norms, step.table, step.cache, scene.step)
    query = portable.rope_and_cache(apart.heads, scene.norms, apart.table, apart.cache, scene.step)
    attended = portable.attend(query, apart.cache, scene.step)
    expected_fp8, expected_scales = portable.prepare(attended.reshape(fp8.shape), 1, True)
    assert same_bits(fp8, expected_fp8[:, 0, : fp8.shape[1]])
    assert same_bits(scales, expected_scales[:, 0])
    assert (step.cache.data == apart.cache.data).all()
    is_nan = np.isnan(fp8.reshape(attended.shape))
    assert (is_nan == np.repeat(is_spoiled, heads.num_heads // heads.num_kv_heads, axis=1)[:, :, None]).all()


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (Heads(15, 1, 128, 64, has_norms=False), "15 heads over 1 KV heads of 128"),
        (Heads(30, 2, 128, 64, has_norms=False), "30 heads over 2 KV heads of 128"),
        (Heads(7, 2, 128, 64, has_norms=False), "7 heads over 2 KV heads of 128"),
        (Heads(4, 2, 64, 32, has_norms=False), "4 heads over 2 KV heads of 64"),
        (Heads(4, 2, 128, 60, has_norms=False), "60 of them rotated"),
    ],
)
def test_heads_that_the_step_kernel_does_not_take_are_refused(
    portable: CudaOperations, heads: Heads, said: str
) -> None:
    query, key = (np.ones((1, count, heads.head_dim), np.float32) for count in (heads.num_heads, heads.num_kv_heads))
    table = portable.fill_rotary(np.zeros(1, np.int32), heads.rotary_dim, heads.theta)
    with pytest.raises(AssertionError, match=said):
        request = PagedRequest(0, 1, 0, np.zeros(1, np.int32))
        portable.attention_step((query, key, key), None, table, poisoned_cache(heads, 1), [request])


def test_rotary_table_at_far_positions(cpu: Operations, portable: CudaOperations) -> None:
    positions = source(9).integers(0, 202752, 600, np.int32)
    for rotary_dim, theta in ((64, 1e6), (18, 1e5), (126, 1e4)):
        seen = np.hstack(portable.fill_rotary(positions, rotary_dim, theta))
        assert row_errors(seen, np.hstack(cpu.fill_rotary(positions, rotary_dim, theta))).max() <= 1e-7


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (Heads(17, 1, 64, 32, has_norms=False), "17 heads over 1 KV heads"),
        (Heads(5, 2, 64, 32, has_norms=False), "5 heads over 2 KV heads"),
        (Heads(6, 2, 33, 16, has_norms=False), "head_dim is 33"),
    ],
)
@pytest.mark.parametrize("row_count", [1, 2])
def test_heads_that_no_kernel_takes_are_refused(kernels: Kernels, heads: Heads, said: str, row_count: int) -> None:
    pages: NDArray[np.int32] = np.zeros(1, np.int32)
    query = np.ones((row_count, heads.num_heads, heads.head_dim), np.float32)
    with CudaOperations(kernels, 1) as cuda, pytest.raises(AssertionError, match=said):
        cuda.attend(query, poisoned_cache(heads, 1), [PagedRequest(0, row_count, 0, pages)])


def test_a_head_too_wide_is_refused(portable: CudaOperations) -> None:
    heads = Heads(6, 2, 130, 16, has_norms=False)
    query, key = (np.ones((2, count, heads.head_dim), np.float32) for count in (heads.num_heads, heads.num_kv_heads))
    table = portable.fill_rotary(np.arange(2, dtype=np.int32), heads.rotary_dim, heads.theta)
    with pytest.raises(AssertionError, match="head_dim is 130"):
        request = PagedRequest(0, 2, 0, np.zeros(1, np.int32))
        portable.rope_and_cache((query, key, key), None, table, poisoned_cache(heads, 1), [request])
