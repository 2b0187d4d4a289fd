"""Fresh random inputs for the operations, and the largest error seen of each."""

import os
import secrets
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tests.cpu.operations import GemmCase, Operations, PageCache, PagedRequest, StoredWeight
from tests.reference.numpy_ops import FloatArray, ScaleKind, bf16_bits, encode_e4m3, round_bf16

PAGE_TOKENS = 64
SEED_VARIABLE = "GLINT_TEST_SEED"
SEED = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
FP8_TABLE = encode_e4m3(np.array([128 * NormalDist().inv_cdf((index + 0.5) / 256) for index in range(256)]))
ELEMENT_SPREAD = 128.0
TILE_BYTES = 128


def source(*key: int) -> np.random.Generator:
    """Random numbers of a case, other ones in every run of the tests."""
    return np.random.default_rng([SEED, *key])


def normal_rows(numbers: np.random.Generator, count: int, width: int) -> FloatArray:
    """Normal rows of very different sizes."""
    sizes = np.exp(numbers.uniform(-3, 3, (count, 1))).astype(np.float32)
    return numbers.standard_normal((count, width), np.float32) * sizes


def random_fp8(numbers: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    """E4M3 values of normal numbers of deviation 128."""
    return FP8_TABLE[numbers.integers(0, 256, shape, np.uint8)]


def row_scales(numbers: np.random.Generator, cols: int, *shape: int) -> FloatArray:
    """Scales with which GEMMs of rows of deviation 1 stay near 1."""
    return (numbers.uniform(0.5, 1.5, shape) / (ELEMENT_SPREAD * cols**0.5)).astype(np.float32)


@dataclass(frozen=True)
class GemmShape:
    """A weight [rows, cols] with scales of a kind, bfloat16 for None; rows of the result stand margin floats apart."""

    name: str
    rows: int
    cols: int
    kind: ScaleKind | None
    has_bias: bool = False
    margin: int = 0

    @property
    def is_tiled(self) -> bool:
        """Whether the tiled family takes it: no scales by tile, and at most a sixteenth of zeros behind its rows."""
        row_bytes = self.cols * (2 if self.kind is None else 1)
        return self.kind != "tile" and row_bytes % 8 == 0 and -row_bytes % TILE_BYTES * 16 <= row_bytes

    def case(self, count: int) -> GemmCase:
        """Fresh rows, weight and bias; rows of a bfloat16 weight are bfloat16 numbers, as CUDA takes them."""
        numbers = source(self.rows, self.cols, count)
        rows = normal_rows(numbers, count, self.cols)
        bias = numbers.standard_normal(self.rows).astype(np.float32) if self.has_bias else None
        if self.kind is None:
            bits = bf16_bits(numbers.standard_normal((self.rows, self.cols), np.float32) * np.float32(self.cols**-0.5))
            return GemmCase(round_bf16(rows), StoredWeight(bits), bias)
        tiles = (-(-self.rows // 128), -(-self.cols // 128))
        shape = {"channel": (self.rows,), "tensor": (1,), "tile": tiles}[self.kind]
        fp8 = random_fp8(numbers, self.rows, self.cols)
        return GemmCase(rows, StoredWeight(fp8, row_scales(numbers, self.cols, *shape), self.kind), bias)


@dataclass(frozen=True)
class Heads:
    """Shape of the heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    has_norms: bool
    theta: float = 1e6


@dataclass(frozen=True)
class NewestRows:
    """Query, key and value of the rows of a step with their cosines and sines, and pages that lack those rows."""

    heads: tuple[FloatArray, FloatArray, FloatArray]
    table: tuple[FloatArray, FloatArray]
    cache: PageCache


@dataclass(frozen=True)
class Scene:
    """Pages that the CPU filled, the rows of a step with their queries, and all that went in."""

    cache: PageCache
    step: list[PagedRequest]
    query: FloatArray
    whole: list[PagedRequest]
    whole_query: FloatArray
    raw: tuple[FloatArray, FloatArray, FloatArray]
    norms: tuple[FloatArray, FloatArray] | None
    table: tuple[FloatArray, FloatArray]

    def newest(self) -> NewestRows:
        """What a step of one row per request starts from; a fresh copy."""
        data = self.cache.data.copy()
        keys = data[1, 0].reshape(*data.shape[2:4], data.shape[5], data.shape[4])
        for request in self.step:
            page, slot = request.pages[request.first_position // PAGE_TOKENS], request.first_position % PAGE_TOKENS
            keys[page, :, :, slot] = data[1, 1, page, :, slot] = 0xFFFF
        pairs = zip(self.whole, self.step, strict=True)
        rows = np.array([whole.row_first + request.first_position for whole, request in pairs])
        query, key, value = (part[rows] for part in self.raw)
        cosines, sines = (part[rows] for part in self.table)
        cache = PageCache(data, self.cache.num_heads, self.cache.rotary_dim)
        return NewestRows((query, key, value), (cosines, sines), cache)


def poisoned_cache(heads: Heads, num_pages: int) -> PageCache:
    """Pages of two layers, all NaN."""
    shape = (2, 2, num_pages, heads.num_kv_heads, PAGE_TOKENS, heads.head_dim)
    return PageCache(np.full(shape, 0xFFFF, np.uint16), heads.num_heads, heads.rotary_dim)


@cache
def make_scene(operations: Operations, heads: Heads, spans: tuple[tuple[int, int], ...]) -> Scene:
    """Requests whose step computes (first position, count); the CPU has stored the whole context of each.

    Pages are taken in random order and everything behind a request's last position is NaN.
    """
    numbers = source(heads.num_heads, heads.head_dim, len(spans))
    totals = [first + count for first, count in spans]
    page_counts = [-(-total // PAGE_TOKENS) for total in totals]
    cache = poisoned_cache(heads, sum(page_counts) + 3)
    held = np.split(numbers.permutation(sum(page_counts) + 3).astype(np.int32), np.cumsum(page_counts))[:-1]
    row_firsts, step_firsts = (np.cumsum([0, *counts]).tolist() for counts in (totals, [count for _, count in spans]))
    whole = [PagedRequest(row_firsts[i], total, 0, held[i]) for i, total in enumerate(totals)]
    step = [PagedRequest(step_firsts[i], count, first, held[i]) for i, (first, count) in enumerate(spans)]
    shapes = [(sum(totals), count, heads.head_dim) for count in (heads.num_heads, *[heads.num_kv_heads] * 2)]
    query, key, value = (2 * numbers.standard_normal(shape, np.float32) for shape in shapes)
    norms = None
    if heads.has_norms:
        first, second = (1 + numbers.standard_normal(heads.head_dim).astype(np.float32) / 4 for _ in range(2))
        norms = (first, second)
    positions = np.concatenate([np.arange(total, dtype=np.int32) for total in totals])
    table = operations.fill_rotary(positions, heads.rotary_dim, heads.theta)
    rotated = operations.rope_and_cache((query, key, value), norms, table, cache, 1, whole)
    step_rows = np.concatenate(
        [np.arange(row_firsts[i] + first, row_firsts[i + 1]) for i, (first, _) in enumerate(spans)]
    )
    return Scene(cache, step, rotated[step_rows], whole, rotated, (query, key, value), norms, table)


def same_bits(left: FloatArray, right: FloatArray) -> bool:
    """Whether two arrays hold the same bits, the sign of a zero among them."""
    return np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()


def row_errors(seen: FloatArray, expected: FloatArray) -> NDArray[np.float64]:
    """Of each row (the last axis) the largest difference over the largest number; infinite for NaN."""
    wide = expected.astype(np.float64).reshape(-1, expected.shape[-1])
    difference = np.abs(seen.astype(np.float64).reshape(wide.shape) - wide).max(axis=1)
    largest = np.abs(wide).max(axis=1)
    errors: NDArray[np.float64] = difference / np.where(largest == 0, 1, largest)
    return np.where(np.isfinite(errors), errors, np.inf)


@dataclass
class ErrorRecord:
    """Bounds per operation, the largest error and the number of comparisons seen of each."""

    bounds: dict[str, float]
    largest: dict[str, float] = field(default_factory=dict)
    comparisons: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, error: float, what: str) -> None:
        """Keep an error; fails where it is over the operation's bound."""
        self.largest[name] = max(error, self.largest.get(name, 0.0))
        self.comparisons[name] = self.comparisons.get(name, 0) + 1
        assert error <= self.bounds[name], f"{name}, {what}: error {error:.2e}; {SEED_VARIABLE}={SEED} makes it again"

    def compare(self, name: str, seen: FloatArray, expected: FloatArray, what: str) -> None:
        """Keep the relative error of a result."""
        assert seen.shape == expected.shape
        self.add(name, float(row_errors(seen, expected).max(initial=0.0)), what)

    def table(self) -> str:
        """All bounds and what was seen, a line each."""
        lines = [f"{'operation':32} {'bound':>9} {'largest':>9} comparisons   ({SEED_VARIABLE}={SEED})"]
        for name, bound in self.bounds.items():
            seen = f"{self.largest[name]:9.1e}" if name in self.largest else "  not run"
            lines.append(f"{name:32} {bound:9.1e} {seen} {self.comparisons.get(name, 0)}")
        return "\n".join(lines)
