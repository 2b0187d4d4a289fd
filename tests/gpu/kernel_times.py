"""Times every CUDA operation at the shapes of one of eight ranks of GLM-4.7; `glint bench kernels` runs this module.

A figure is the median of 21 launches between two CUDA events, each after a read of 1 GiB that leaves nothing of the
operation in the L2 cache. The share is that of the read bandwidth measured first in the same run. An operation of
several kernels is timed as a whole; a kernel that does nothing shows what a launch alone takes.

GEMMs and experts stand side by side with both multiplies. Where an H200 needs longer for the products than for the
bytes they show TFLOP/s, and the share is that of PRODUCT_PEAKS, an H200's rates by its data sheet: E4M3 products for
wgmma, FP16 products for mma.sync. The factor at the end is the portable time over the Hopper time.

`python -m tests.gpu.kernel_times PART` runs the named parts alone.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import POINTER, c_double, c_int32, c_void_p
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glint.engine.args import Kernels
from tests.cpu.operations import GemmCase, PageCache, PagedRequest
from tests.cpu.sampling_rows import Row
from tests.cpu.testing_library import declare
from tests.gpu.operations_cases import HEADS, RULES, STEP_HEADS
from tests.gpu.operations_cuda import CudaOperations, Family, NormCase, RouteCase
from tests.gpu.operations_experts import make_case, make_choices, make_weights, new_grouping, run_experts
from tests.gpu.operations_inputs import PAGE_TOKENS, Heads, normal_rows
from tests.gpu.product_cases import GEMMS, TILED_LAYOUTS
from tests.reference.numpy_ops import FloatArray, bf16_bits, round_bf16

MOST_TIMES = 8
BLOCK_PAGES = 256
VOCAB_SIZE = 151552
PRODUCT_COUNTS = (1, 8, 64, 256, 4096)
GEMM_COUNTS = {"qkv": PRODUCT_COUNTS, "o": PRODUCT_COUNTS, "dense gate and up": PRODUCT_COUNTS, "lm_head": (1, 64)}
LAYOUT_NAMES = ("glm-4.7 tp8", "glm-4.7 ep8")
LEAST_MICROSECONDS = 0.01
PRODUCT_PEAKS: dict[tuple[str, Kernels], float] = {
    ("E4M3", "hopper"): 1979e12,
    ("E4M3", "portable"): 989e12,
    ("BF16", "hopper"): 989e12,
    ("BF16", "portable"): 989e12,
}
ROW_COUNTS = (1, 8, 64, 256, 4096)
ROUTED_COUNTS = (1, 4, 8, 16, 32, 33, 64, 4096)
DECODE = ((1, 128), (1, 512), (1, 1024), (1, 8192), (64, 512), (1, 32768), (64, 4096), (8, 32768), (256, 4096))
DECODE_E4M3 = ((1, 4096), (64, 512), (64, 4096))
DECODE_STEP = ((1, 512), (64, 512), (64, 4096))
DECODE_STEP_AIR = ((1, 512), (16, 512), (64, 512))
PREFILL = ((0, 4096), (28672, 4096))
SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.95, 20 logprobs": {"top_p": 0.95, "has_logprobs": 1, "num_logprobs": 20},
}


@dataclass(frozen=True)
class Timing:
    """What an operation took, and the bytes it must read and write and the operations it must do, where that counts."""

    name: str
    microseconds: float
    byte_count: float = 0.0
    flops: float = 0.0

    def line(self, peak: float) -> str:
        """The figures beside the measured peak bandwidth in bytes a second."""
        text = f"{self.name:48} {self.microseconds:9.2f} us"
        if self.byte_count:
            rate = self.byte_count / self.microseconds * 1e6
            text += f" {rate / 1e9:7.0f} GB/s {100 * rate / peak:5.1f}% of the peak"
        if self.flops:
            text += f" {self.flops / self.microseconds / 1e6:7.1f} TFLOP/s"
        return text


@dataclass(frozen=True)
class ProductTiming:
    """What a product took with each kernel set that runs here, and its bytes and operations."""

    name: str
    element: Literal["E4M3", "BF16"]
    times: dict[Kernels, float]
    byte_count: float
    flops: float

    def line(self, peak: float) -> str:
        """All times with the share of what limits them, and how many times as long the portable one takes."""
        sides = [self._side(kernels, peak) for kernels in self.times]
        if len(self.times) == 2:
            sides.append(f"{self.times['portable'] / self.times['hopper']:5.2f}x")
        return f"{self.name:42} {' | '.join(sides)}"

    def _side(self, kernels: Kernels, peak: float) -> str:
        microseconds, product_peak = self.times[kernels], PRODUCT_PEAKS[self.element, kernels]
        text = f"{kernels} {microseconds:9.2f} us"
        if self.flops / PRODUCT_PEAKS[self.element, "portable"] < self.byte_count / peak:
            rate = self.byte_count / microseconds * 1e6
            return f"{text} {rate / 1e9:6.0f} GB/s    {100 * rate / peak:5.1f}%"
        rate = self.flops / microseconds * 1e6
        return f"{text} {rate / 1e12:6.1f} TFLOP/s {100 * rate / product_peak:5.1f}%"


class TimedOperations(CudaOperations):
    """The operations with one set of kernels, which take times instead of comparing runs."""

    def __init__(self, kernels: Family) -> None:
        super().__init__(kernels, 1)
        self._check(declare("glint_testing_start_timing", c_int32, c_void_p, device="cuda")(self._backend), "a timer")

    def times(self) -> list[float]:
        """Microseconds of everything that ran since the last call."""
        taken = (c_double * MOST_TIMES)()
        take = declare("glint_testing_take_microseconds", c_int32, c_void_p, POINTER(c_double), c_int32, device="cuda")
        return list(taken[: take(self._backend, taken, MOST_TIMES)])

    def time(self) -> float:
        """Microseconds of the last operation."""
        return self.times()[-1]

    def time_nothing(self) -> float:
        """Microseconds of a kernel that does nothing."""
        self._check(declare("glint_testing_run_nothing", c_int32, c_void_p, device="cuda")(self._backend), "a kernel")
        return self.time()

    def peak(self) -> float:
        """Bytes a second of the fastest of five reads of 1 GiB."""
        rate = c_double()
        read = declare("glint_testing_peak_read", c_int32, c_void_p, POINTER(c_double), device="cuda")
        self._check(read(self._backend, rate), "a read")
        return rate.value


KernelSets = dict[Kernels, TimedOperations]


def numbers() -> np.random.Generator:
    """The same random numbers in every run."""
    return np.random.default_rng(1)


def time_gemms(sets: KernelSets) -> Iterator[ProductTiming]:
    """Dense GEMMs; the bytes are those of the weight."""
    for name, counts in GEMM_COUNTS.items():
        shape = GEMMS[name]
        whole = shape.case(max(counts))
        for count in counts:
            case = GemmCase(np.ascontiguousarray(whole.rows[:count]), whole.weight, whole.bias)
            times: dict[Kernels, float] = {}
            for kernels, cuda in sets.items():
                cuda.gemm(case, 0)
                times[kernels] = cuda.time()
            flops = 2.0 * count * shape.rows * shape.cols
            element = "BF16" if shape.kind is None else "E4M3"
            yield ProductTiming(f"{name}, {count} tokens", element, times, whole.weight.data.nbytes, flops)


def time_experts(sets: KernelSets) -> Iterator[ProductTiming]:
    """Routed experts with the shared one; the bytes are those of the weights of the experts that tokens chose.

    Tokens are grouped first each time. Down is the difference between all and gate and up, which it overlaps.
    """
    for name in LAYOUT_NAMES:
        layout = TILED_LAYOUTS[name]
        weights = make_weights(layout)
        for count in PRODUCT_COUNTS:
            case = make_case(layout, weights, count, count)
            grouped = case.choices.grouped(layout)
            matrix_bytes = layout.width * layout.hidden_size * len(np.unique(grouped.experts))
            flops = 2.0 * len(grouped.tokens) * layout.width * layout.hidden_size
            gate_up: dict[Kernels, float] = {}
            down, whole = gate_up.copy(), gate_up.copy()
            for kernels, cuda in sets.items():
                run_experts(cuda, case)
                gate_up[kernels], whole[kernels] = cuda.times()
                down[kernels] = max(whole[kernels] - gate_up[kernels], LEAST_MICROSECONDS)
            for part, times, matrices in (("gate_up", gate_up, 2), ("down", down, 1), ("gate_up and down", whole, 3)):
                label = f"{part} {name}, {count} tokens"
                yield ProductTiming(label, "E4M3", times, matrices * matrix_bytes, matrices * flops)


def time_grouping(cuda: TimedOperations) -> Iterator[Timing]:
    """The grouping of tokens by expert, alone and behind the router of GLM-4.5-Air."""
    for name in LAYOUT_NAMES:
        layout = TILED_LAYOUTS[name]
        for count in PRODUCT_COUNTS:
            choices = make_choices(layout, count, count)
            grouping = new_grouping(layout, choices)
            cuda.call("glint_testing_group_tokens", grouping.native)
            yield Timing(f"group tokens {name}, {count} tokens", cuda.time())
    num_experts, width, rule = RULES["air"]
    layout = TILED_LAYOUTS["glm-4.5-air tp8"]
    weight = bf16_bits(numbers().standard_normal((num_experts, width)) * width**-0.5)
    for count in ROUTED_COUNTS:
        case = RouteCase(normal_rows(numbers(), count, width), weight, np.zeros(num_experts, np.float32), rule)
        choices = make_choices(layout, count, count)
        grouping = new_grouping(layout, choices)
        cuda.route_and_group(case, grouping.native)
        yield Timing(f"router and grouping, air, {count} tokens", cuda.time())


def time_rows(cuda: TimedOperations) -> Iterator[Timing]:
    """Add, norm and quantise; the router."""
    num_experts, width, rule = RULES["glm47"]
    weight = bf16_bits(numbers().standard_normal((num_experts, width)) * width**-0.5)
    bias = np.zeros(num_experts, np.float32)
    for count in ROW_COUNTS:
        rows = normal_rows(numbers(), count, width)
        cuda.norm(NormCase(rows, rows[None], np.ones(width, np.float32)))
        yield Timing(f"add, norm and quantise, {count} rows", cuda.time(), rows.size * 17.0)
    for count in ROW_COUNTS:
        rows = normal_rows(numbers(), count, width)
        cuda.route(RouteCase(rows, weight, bias, rule))
        flops = 2.0 * rows.size * num_experts
        yield Timing(f"router, {count} rows", cuda.time(), rows.nbytes + weight.nbytes, flops)


def full_pages(spans: list[tuple[int, int]], heads: Heads = HEADS["glm47"]) -> tuple[PageCache, list[PagedRequest]]:
    """Pages of random numbers and a step whose requests compute (first position, count)."""
    page_counts = [-(-(first + count) // PAGE_TOKENS) for first, count in spans]
    data = np.zeros((2, 2, sum(page_counts), heads.num_kv_heads, PAGE_TOKENS, heads.head_dim), np.uint16)
    block = bf16_bits(numbers().standard_normal((BLOCK_PAGES, PAGE_TOKENS, heads.head_dim), np.float32))
    for part in data[1]:
        part[:] = np.resize(block, part.shape)
    held = np.split(numbers().permutation(sum(page_counts)).astype(np.int32), np.cumsum(page_counts))
    firsts = np.cumsum([0, *(count for _, count in spans)]).tolist()
    step = [PagedRequest(firsts[i], count, first, held[i]) for i, (first, count) in enumerate(spans)]
    return PageCache(data, heads.num_heads, heads.rotary_dim), step


def head_rows(num_rows: int, heads: Heads = HEADS["glm47"]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Query, key and value rows [rows, heads, head_dim]."""
    shapes = [(num_rows, count, heads.head_dim) for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
    query, key, value = (numbers().standard_normal(shape, np.float32) for shape in shapes)
    return round_bf16(query), key, value


def norms_and_table(
    cuda: TimedOperations, positions: NDArray[np.int32]
) -> tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]:
    """Norm weights of query and key, and cosines and sines of the positions."""
    heads = HEADS["glm47"]
    ones = np.ones(heads.head_dim, np.float32)
    table = cuda.fill_rotary(positions, heads.rotary_dim, heads.theta)
    cuda.times()
    return (ones, ones), table


def time_decode(cuda: TimedOperations) -> Iterator[Timing]:
    """Attention of requests of one row each; the bytes are those of the keys and values."""
    for rounding, shapes, position_bytes in (("none", DECODE, 512), ("fp8", DECODE_E4M3, 256)):
        for requests, context in shapes:
            cache, step = full_pages([(context - 1, 1)] * requests)
            cuda.attend(head_rows(requests)[0], replace(cache, rounding=rounding), step)
            pages = "E4M3 pages" if rounding == "fp8" else "BF16 pages"
            name = f"attention decode, {requests} of {context}, {pages}"
            yield Timing(name, cuda.time(), requests * context * position_bytes)
    for requests, context in DECODE_STEP:
        cache, step = full_pages([(context - 1, 1)] * requests)
        norms, table = norms_and_table(cuda, np.full(requests, context - 1, np.int32))
        cuda.attention_step(head_rows(requests), norms, table, cache, step)
        yield Timing(f"attention step, {requests} of {context}", cuda.time(), requests * context * 512)
    yield from time_decode_air(cuda)


def time_decode_air(cuda: TimedOperations) -> Iterator[Timing]:
    """The whole GLM-4.5-Air: the attention of a step with its quantise, and its parts but quantise."""
    heads = STEP_HEADS["air"]
    for requests, context in DECODE_STEP_AIR:
        name, byte_count = f"GLM-4.5-Air, {requests} of {context}", requests * context * 512 * heads.num_kv_heads
        cache, step = full_pages([(context - 1, 1)] * requests, heads)
        _, table = norms_and_table(cuda, np.full(requests, context - 1, np.int32))
        rows = head_rows(requests, heads)
        cuda.attention_step(rows, None, table, cache, step)
        yield Timing(f"attention step, {name}", cuda.time(), byte_count)
        cuda.rope_and_cache(rows, None, table, cache, step)
        yield Timing(f"rotation and page store, {name}", cuda.time())
        cuda.attend(rows[0], cache, step)
        yield Timing(f"attention decode, {name}", cuda.time(), byte_count)


def time_prefill(cuda: TimedOperations, kernels: Kernels) -> Iterator[Timing]:
    """Attention of a long prompt; E4M3 pages are dequantised first."""
    heads = HEADS["glm47"]
    for cached, fresh in PREFILL:
        cache, step = full_pages([(cached, fresh)])
        query = head_rows(fresh)[0]
        flops = 4.0 * (fresh * cached + fresh * (fresh + 1) / 2) * heads.num_heads * heads.head_dim
        cuda.attend(query, cache, step)
        yield Timing(f"attention prefill, {fresh} behind {cached}, {kernels}", cuda.time(), flops=flops)
        if kernels == "hopper":
            cuda.attend(query, replace(cache, rounding="fp8"), step)
            yield Timing(f"attention prefill, {fresh} behind {cached}, E4M3 pages", cuda.time(), flops=flops)


def time_rotation(cuda: TimedOperations) -> Iterator[Timing]:
    """Norm and rotation of query and key, and the store of key and value."""
    for count in (1, 64, 4096):
        cache, step = full_pages([(0, count)])
        norms, table = norms_and_table(cuda, np.arange(count, dtype=np.int32))
        rows = head_rows(count)
        cuda.rope_and_cache(rows, norms, table, cache, step)
        byte_count = 6.0 * sum(part.size for part in rows)
        yield Timing(f"q/k norm, rotation and page store, {count} rows", cuda.time(), byte_count)


def time_sampler(cuda: TimedOperations) -> Iterator[Timing]:
    """The sampler over the whole vocabulary."""
    for count in (1, 64):
        logits = 2.5 * numbers().standard_normal((count, VOCAB_SIZE), np.float32)
        for name, settings in SAMPLERS.items():
            cuda.sample([Row(row, settings | {"seed": index}) for index, row in enumerate(logits)])
            yield Timing(f"sampler {name}, {count} rows", cuda.time(), logits.nbytes)


def time_all(sets: KernelSets) -> dict[str, Iterator[Timing | ProductTiming]]:
    """Every part of the bench by name; each is measured as it is iterated."""
    first = next(iter(sets.values()))
    return {
        "gemms": time_gemms(sets),
        "experts": time_experts(sets),
        "grouping": time_grouping(first),
        "rows": time_rows(first),
        "rotation": time_rotation(first),
        "decode": time_decode(first),
        "prefill": chain.from_iterable(time_prefill(cuda, kernels) for kernels, cuda in sets.items()),
        "sampler": time_sampler(first),
    }


@contextmanager
def open_sets() -> Iterator[KernelSets]:
    """Both kernel sets, or the portable one alone where the GPU is not of the Hopper generation."""
    with ExitStack() as stack:
        sets: KernelSets = {}
        with suppress(LookupError):
            sets["hopper"] = stack.enter_context(TimedOperations("hopper"))
        sets["portable"] = stack.enter_context(TimedOperations("portable"))
        yield sets


def run(names: list[str]) -> None:
    """Print every figure of the named parts as it comes, of all parts where none is named."""
    with open_sets() as sets:
        parts = time_all(sets)
        unknown = [name for name in names if name not in parts]
        if unknown:
            raise LookupError(f"{unknown[0]!r} is no part of the bench; its parts are {', '.join(parts)}")
        peak = sets["portable"].peak()
        print(f"kernel sets {', '.join(sets)}; measured peak read bandwidth {peak / 1e9:.0f} GB/s", flush=True)
        print(Timing("a kernel that does nothing", sets["portable"].time_nothing()).line(peak), flush=True)
        for name in names or parts:
            for timing in parts[name]:
                print(timing.line(peak), flush=True)


def main() -> int:
    """Run what the arguments name; the exit code is 1 where the library or the GPU is not fit for it."""
    try:
        run(sys.argv[1:])
    except (LookupError, OSError) as problem:
        print(f"glint: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
