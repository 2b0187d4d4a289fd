"""Times every CUDA operation at the shapes of one of eight ranks of GLM-4.7; `glint bench kernels` runs this module.

A figure is the median of 21 launches between two CUDA events, each after a read of 1 GiB that leaves nothing of the
operation in the L2 cache. The share is that of the read bandwidth measured first in the same run. An operation of
several kernels is timed as a whole; a kernel that does nothing shows what a launch alone takes.
"""

import sys
from collections.abc import Iterator
from ctypes import POINTER, c_double, c_int32, c_void_p
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glint.engine.args import Kernels
from tests.cpu.operations import GemmCase, PageCache, PagedRequest
from tests.cpu.sampling_rows import Row
from tests.cpu.testing_library import declare
from tests.gpu.operations_cases import GEMMS, HEADS, LAYOUTS, RULES
from tests.gpu.operations_cuda import CudaOperations, NormCase, RouteCase
from tests.gpu.operations_experts import make_case, make_weights, new_grouping, run_experts
from tests.gpu.operations_inputs import PAGE_TOKENS, normal_rows
from tests.reference.numpy_ops import FloatArray, bf16_bits, round_bf16

MOST_TIMES = 8
BLOCK_PAGES = 256
VOCAB_SIZE = 151552
GEMM_NAMES = ("qkv", "o", "dense gate and up", "shared gate and up", "lm_head")
GEMM_COUNTS = (1, 16, 64, 128, 256, 4096)
EXPERT_COUNTS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ROW_COUNTS = (1, 8, 64, 256, 4096)
DECODE = ((1, 128), (1, 512), (1, 1024), (1, 8192), (64, 512), (1, 32768), (64, 4096), (8, 32768), (256, 4096))
DECODE_E4M3 = ((1, 4096), (64, 512), (64, 4096))
DECODE_STEP = ((1, 512), (64, 512), (64, 4096))
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


class TimedOperations(CudaOperations):
    """The operations with one set of kernels, which take times instead of comparing runs."""

    def __init__(self, kernels: Kernels) -> None:
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


def numbers() -> np.random.Generator:
    """The same random numbers in every run."""
    return np.random.default_rng(1)


def time_gemms(cuda: TimedOperations) -> Iterator[Timing]:
    """Dense GEMMs; the bytes are those of the weight."""
    for name in GEMM_NAMES:
        shape = GEMMS[name]
        whole = shape.case(max(GEMM_COUNTS))
        for count in GEMM_COUNTS:
            cuda.gemm(GemmCase(np.ascontiguousarray(whole.rows[:count]), whole.weight, whole.bias), 0)
            flops = 2.0 * count * shape.rows * shape.cols
            yield Timing(f"{name}, {count} tokens", cuda.time(), whole.weight.data.nbytes, flops)


def time_experts(cuda: TimedOperations) -> Iterator[Timing]:
    """Routed experts with the shared one; the bytes are those of the weights of the experts that tokens chose."""
    for name in ("tp8", "ep8"):
        layout = LAYOUTS[name]
        weights = make_weights(layout)
        for count in EXPERT_COUNTS:
            case = make_case(layout, weights, count, count)
            grouped = case.choices.grouped(layout)
            matrix_bytes = layout.width * layout.hidden_size * len(np.unique(grouped.experts))
            flops = 2.0 * len(grouped.tokens) * layout.width * layout.hidden_size
            grouping = new_grouping(layout, case.choices)
            cuda.call("glint_testing_group_tokens", grouping.native)
            yield Timing(f"group tokens {name}, {count} tokens", cuda.time())
            run_experts(cuda, case)
            gate_up, whole = cuda.times()
            yield Timing(f"group, gate and up {name}, {count} tokens", gate_up, 2 * matrix_bytes, 2 * flops)
            yield Timing(f"group, gate, up and down {name}, {count} tokens", whole, 3 * matrix_bytes, 3 * flops)


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


def full_pages(spans: list[tuple[int, int]]) -> tuple[PageCache, list[PagedRequest]]:
    """Pages of random numbers and a step whose requests compute (first position, count)."""
    page_counts = [-(-(first + count) // PAGE_TOKENS) for first, count in spans]
    heads = HEADS["glm47"]
    data = np.zeros((2, 2, sum(page_counts), heads.num_kv_heads, PAGE_TOKENS, heads.head_dim), np.uint16)
    block = bf16_bits(numbers().standard_normal((BLOCK_PAGES, PAGE_TOKENS, heads.head_dim), np.float32))
    for part in data[1]:
        part[:] = np.resize(block, part.shape)
    held = np.split(numbers().permutation(sum(page_counts)).astype(np.int32), np.cumsum(page_counts))
    firsts = np.cumsum([0, *(count for _, count in spans)]).tolist()
    step = [PagedRequest(firsts[i], count, first, held[i]) for i, (first, count) in enumerate(spans)]
    return PageCache(data, heads.num_heads, heads.rotary_dim), step


def head_rows(num_rows: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Query, key and value rows [rows, heads, head_dim]."""
    heads = HEADS["glm47"]
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


def time_all(hopper: TimedOperations, portable: TimedOperations) -> tuple[Iterator[Timing], ...]:
    """Every part of the bench; each is measured as it is iterated."""
    return (
        time_gemms(hopper),
        time_experts(hopper),
        time_rows(hopper),
        time_rotation(hopper),
        time_decode(hopper),
        time_prefill(hopper, "hopper"),
        time_prefill(portable, "portable"),
        time_sampler(hopper),
    )


def run() -> None:
    """Print every figure as it comes."""
    with TimedOperations("hopper") as hopper, TimedOperations("portable") as portable:
        peak = hopper.peak()
        print(f"measured peak read bandwidth {peak / 1e9:.0f} GB/s", flush=True)
        print(Timing("a kernel that does nothing", hopper.time_nothing()).line(peak), flush=True)
        for part in time_all(hopper, portable):
            for timing in part:
                print(timing.line(peak), flush=True)


def main() -> int:
    """Run all; the exit code is 1 where the library or the GPU is not fit for it."""
    try:
        run()
    except (LookupError, OSError) as problem:
        print(f"glint: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
