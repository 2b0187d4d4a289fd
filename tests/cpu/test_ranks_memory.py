"""Memory of ranks: what they count is what they map, and a rank that fails where none is left is still named."""

import subprocess
import sys
from ctypes import c_int32

import pytest

from tests.cpu.rank_engine import LAYOUTS
from tests.cpu.sweeps import slow
from tests.cpu.testing_library import ROOT, declare


def lines_of(module: str, *arguments: object) -> list[str]:
    """What a program of the tests prints."""
    command = [sys.executable, "-m", f"tests.cpu.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout.splitlines()


def test_memory_can_be_refused() -> None:
    """Else the other tests show nothing."""
    assert declare("glint_testing_allocations_can_fail", c_int32)() == 1


@pytest.mark.parametrize("place", ["step", "collective"])
@pytest.mark.parametrize("rank", [3, *slow(1)])
def test_a_starved_rank_is_named(place: str, rank: int) -> None:
    step, later = lines_of("starved_ranks", place, rank)
    name = f"rank {rank} of 4 failed: rank {rank} is one of those asked to fail; the ranks cannot go on without it"
    assert step.startswith(f"RankFailed: glint_collect_step: step 1 failed: {name}")
    assert later.startswith(f"RankFailed: glint_submit_step: {name}")


@pytest.mark.parametrize("place", ["step", "collective"])
def test_the_step_thread_may_starve(place: str) -> None:
    """The first rank runs on the step's own thread, whose words may be cut; the next call has them all."""
    step, later = lines_of("starved_ranks", place, 0)
    assert step.startswith("RankFailed: glint_collect_step: step 1 failed: rank 0 of 4")
    assert later.startswith("RankFailed: glint_submit_step: rank 0 of 4 failed: rank 0 is one of those asked to fail;")


def test_a_rank_that_starves_at_load_is_named() -> None:
    assert lines_of("starved_ranks", "load", 2) == [
        "InternalFailure: glint_init_engine: rank 2 of 4 failed: rank 2 is one of those asked to fail"
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [4, *slow(2, 8)])
def test_workspace_is_what_the_ranks_map(layout: str, num_ranks: int) -> None:
    """Two vocabularies, since logits are what ranks hold unequally; masks and weights grow too, by about a tenth."""
    (few, few_mapped), (many, many_mapped) = (
        map(int, line.split()) for line in lines_of("held_ranks", layout, num_ranks)
    )
    assert many_mapped - few_mapped == pytest.approx(many - few, rel=0.15)
