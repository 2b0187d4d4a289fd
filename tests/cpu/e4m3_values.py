"""Numbers at which rounding to E4M3 may go wrong, what a page keeps of them, and what a page store does.

E4M3 without a scale: nearest, halfway to even, saturating at 448. A number that bfloat16 cannot hold is no
number of a page. tests/reference/test_numbers.py holds the rounding of all these numbers to torch's.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.cpu.operations import PageCache, PagedRequest, Rounding
from tests.reference.numpy_ops import E4M3_VALUES, FloatArray, decode_e4m3, encode_e4m3, round_bf16

LARGEST = 448.0
HEAD_DIM = 128
Store = Callable[[tuple[FloatArray, FloatArray, FloatArray], PageCache, list[PagedRequest]], object]


def all_bf16() -> FloatArray:
    """Every bfloat16 number."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def edge_values() -> FloatArray:
    """E4M3 values, the numbers halfway between two, those beside each, and the ends of both formats; both signs."""
    fp8 = E4M3_VALUES[:0x7F].astype(np.float32)
    halfway = (fp8[:-1] + fp8[1:]) / 2
    float32 = np.finfo(np.float32)
    largest_bf16, smallest_normal_bf16 = 2.0**127 * (2 - 2.0**-7), 2.0**-126
    ends = [LARGEST, 464.0, 480.0, 512.0, largest_bf16, smallest_normal_bf16]
    ends += [float(np.float32(2.0**127 * (2 - 2.0**-8))), float32.max, float32.tiny, float32.smallest_subnormal]
    middles = np.concatenate([fp8, halfway, np.array(ends, np.float32)])
    bits = middles.view(np.uint32)
    beside = [np.maximum(bits, np.uint32(1)) - np.uint32(1), bits + np.uint32(1)]
    odd = np.array([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF], np.uint32)
    positive = np.concatenate([bits, *beside, odd])
    return np.concatenate([positive, positive | np.uint32(1 << 31)]).view(np.float32)


def is_finite_in_bf16(values: FloatArray) -> NDArray[np.bool_]:
    """Whether bfloat16 can hold each number."""
    finite: NDArray[np.bool_] = np.isfinite(values)
    return finite & np.isfinite(round_bf16(np.where(finite, values, np.float32(0))))


def rounded(values: FloatArray) -> FloatArray:
    """What a page keeps of each number, NaN for what bfloat16 cannot hold."""
    is_held = is_finite_in_bf16(values)
    fp8 = encode_e4m3(np.where(is_held, values, np.float32(0)))
    return np.where(is_held, decode_e4m3(fp8).astype(np.float32), np.float32(np.nan))


def rows_of(values: FloatArray) -> FloatArray:
    """Rows of one head each, [rows, 1, HEAD_DIM]; zeros fill the last one."""
    rows = -(-len(values) // HEAD_DIM)
    return np.pad(values, (0, rows * HEAD_DIM - len(values))).reshape(rows, 1, HEAD_DIM)


def stored(
    store: Store, keys: FloatArray, values: FloatArray, page_tokens: int, dtype: type, rounding: Rounding
) -> tuple[FloatArray, FloatArray]:
    """Keys and values [rows, HEAD_DIM] that pages of one head hold after a store without norm and rotary."""
    count = len(keys)
    num_pages = -(-count // page_tokens)
    fill = np.nan if dtype == np.float32 else 0xFFFF
    cache = PageCache(np.full((2, 2, num_pages, 1, page_tokens, HEAD_DIM), fill, dtype), 1, 0, rounding)
    request = PagedRequest(0, count, 0, np.arange(num_pages, dtype=np.int32))
    store((np.zeros_like(keys), keys, values), cache, [request])
    kept = cache.data[1] if dtype == np.float32 else (cache.data[1].astype(np.uint32) << 16).view(np.float32)
    by_token = kept[0].reshape(num_pages, HEAD_DIM, page_tokens).transpose(0, 2, 1).reshape(-1, HEAD_DIM)
    return by_token[:count], kept[1].reshape(-1, HEAD_DIM)[:count]


def same_numbers(seen: FloatArray, expected: FloatArray) -> None:
    """Fail where two arrays differ, in the sign of a zero too; every NaN is as good as another."""
    assert seen.shape == expected.shape
    both_nan = np.isnan(seen) & np.isnan(expected)
    wrong = (seen.view(np.uint32) != expected.view(np.uint32)) & ~both_nan
    shown = list(zip(seen[wrong][:5].tolist(), expected[wrong][:5].tolist(), strict=True))
    assert not wrong.any(), f"{wrong.sum()} numbers differ, (seen, expected): {shown}"
