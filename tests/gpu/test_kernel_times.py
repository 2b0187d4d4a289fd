"""The timer of `glint bench kernels`: its figures are plausible beside each other."""

from itertools import islice

import numpy as np
import pytest

from tests.gpu.kernel_times import TimedOperations, Timing, time_all, time_prefill, time_rows
from tests.gpu.operations_cuda import NormCase

LEAST_PEAK = 1e11
MOST_LAUNCH_MICROSECONDS = 50.0


def test_times_beside_the_peak() -> None:
    """Many rows take longer than a launch alone, and move no faster than memory and what the L2 cache keeps allow."""
    with TimedOperations("portable") as cuda:
        peak, nothing = cuda.peak(), cuda.time_nothing()
        timings = list(time_rows(cuda))
        assert cuda.times() == []
    assert peak > LEAST_PEAK
    assert 0 < nothing < MOST_LAUNCH_MICROSECONDS
    many = [timing for timing in timings if timing.name.endswith(" 4096 rows")]
    assert len(many) == 2
    for timing in many:
        assert timing.microseconds > nothing
        assert timing.byte_count / timing.microseconds * 1e6 < 1.5 * peak


def test_every_part_begins() -> None:
    """The first three figures of each part; the bench itself takes a minute."""
    with TimedOperations("hopper") as hopper, TimedOperations("portable") as portable:
        for part in time_all(hopper, portable):
            timings = list(islice(part, 3))
            assert timings and all(timing.microseconds > 0 for timing in timings)


def test_each_kernel_set_attends_prompts_with_its_own_kernel() -> None:
    """Both give the same bits, so that only their times tell them apart; wgmma is the faster multiply."""
    taken = {}
    with TimedOperations("hopper") as hopper, TimedOperations("portable") as portable:
        for timing in (*time_prefill(hopper, "hopper"), *time_prefill(portable, "portable")):
            taken[timing.name] = timing.microseconds
    long = "attention prefill, 4096 behind 28672"
    assert taken[f"{long}, portable"] > 1.1 * taken[f"{long}, hopper"]


def test_what_is_timed_is_computed() -> None:
    """The last launch leaves the operation's result."""
    hidden = np.ones((3, 200), np.float32)
    with TimedOperations("portable") as cuda:
        result = cuda.norm(NormCase(hidden, np.empty((0, 3, 200), np.float32), np.ones(200, np.float32)))
        assert len(cuda.times()) == 1
    assert np.allclose(result.normed, 1.0, atol=1e-4)


@pytest.mark.parametrize(("byte_count", "flops"), [(0.0, 0.0), (2e6, 4e6)])
def test_a_line_has_the_figures_that_count(byte_count: float, flops: float) -> None:
    line = Timing("a kernel", 2.0, byte_count, flops).line(4e12)
    assert line.split()[:4] == ["a", "kernel", "2.00", "us"]
    assert ("1000 GB/s  25.0% of the peak" in line) == (byte_count > 0)
    assert ("2.0 TFLOP/s" in line) == (flops > 0)
