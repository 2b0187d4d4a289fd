"""A rank that fails where no memory is left: it is still named, and the process lives on."""

import subprocess
import sys
from ctypes import c_int32

import pytest

from tests.cpu.testing_library import ROOT, declare


def lines_of(place: str, rank: int) -> list[str]:
    """What a process says in which the rank fails and gets no memory from then on."""
    command = [sys.executable, "-m", "tests.cpu.starved_ranks", place, str(rank)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout.splitlines()


def test_memory_can_be_refused() -> None:
    """Else the other tests show nothing."""
    assert declare("glint_testing_allocations_can_fail", c_int32)() == 1


@pytest.mark.parametrize("place", ["step", "collective"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_starved_rank_is_named(place: str, rank: int) -> None:
    step, later = lines_of(place, rank)
    name = f"rank {rank} of 4 failed: rank {rank} is one of those asked to fail; the ranks cannot go on without it"
    assert step.startswith(f"RankFailed: glint_collect_step: step 1 failed: {name}")
    assert later.startswith(f"RankFailed: glint_submit_step: {name}")


@pytest.mark.parametrize("place", ["step", "collective"])
def test_the_step_thread_may_starve(place: str) -> None:
    """The first rank runs on the step's own thread, whose words may be cut; the next call has them all."""
    step, later = lines_of(place, 0)
    assert step.startswith("RankFailed: glint_collect_step: step 1 failed: rank 0 of 4")
    assert later.startswith("RankFailed: glint_submit_step: rank 0 of 4 failed: rank 0 is one of those asked to fail;")


def test_a_rank_that_starves_at_load_is_named() -> None:
    assert lines_of("load", 2) == [
        "InternalFailure: glint_init_engine: rank 2 of 4 failed: rank 2 is one of those asked to fail"
    ]
