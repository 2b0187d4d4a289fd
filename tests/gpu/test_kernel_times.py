"""The timer of `glint bench kernels`: its figures are plausible beside each other."""

from itertools import islice

import numpy as np
import pytest

from tests.gpu.kernel_times import ProductTiming, TimedOperations, Timing, open_sets, time_all, time_rows
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
    with open_sets() as sets:
        assert list(sets) == ["hopper", "portable"]
        for name, part in time_all(sets).items():
            timings = list(islice(part, 3))
            assert timings, name
            for timing in timings:
                times = timing.times.values() if isinstance(timing, ProductTiming) else [timing.microseconds]
                assert min(times) > 0, timing


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


@pytest.mark.parametrize(
    ("flops", "hopper", "portable"),
    [
        (1e6, "hopper      2.00 us   1000 GB/s     25.0%", "portable      4.00 us    500 GB/s     12.5%"),
        (989e6, "hopper      2.00 us  494.5 TFLOP/s  25.0%", "portable      4.00 us  247.2 TFLOP/s  25.0%"),
    ],
)
def test_a_pair_has_the_share_of_what_limits_it(flops: float, hopper: str, portable: str) -> None:
    line = ProductTiming("a product", "E4M3", {"hopper": 2.0, "portable": 4.0}, 2e6, flops).line(4e12)
    assert line.split(" | ")[0].endswith(hopper)
    assert line.split(" | ")[1:] == [portable, " 2.00x"]
    alone = ProductTiming("a product", "E4M3", {"portable": 4.0}, 2e6, flops).line(4e12)
    assert alone.endswith(portable) and "|" not in alone
