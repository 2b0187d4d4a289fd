"""A rank that fails while it records a step: the recording ends on its own thread, memory returns, engines go on."""

import os
from pathlib import Path

import pytest

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from glint.native.library import InternalFailure
from tests.cpu.small_engine import answer_all, make_ask
from tests.cpu.testing_library import declare
from tests.gpu.test_life import free_bytes
from tests.gpu.test_ranks import SHAPE, open_ranks, prompt
from tests.reference.checkpoints import make_checkpoint

LEFT_BYTES = 64 * 2**20
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The random checkpoint of the tests of ranks."""
    folder: Path = tmp_path_factory.mktemp("capture")
    return open_checkpoint(make_checkpoint(folder, "glm47", "fp8_channel", **SHAPE))


def use(checkpoint: Checkpoint, num_ranks: int, kernels: int) -> None:
    """An engine made now records its steps and runs them."""
    with open_ranks(checkpoint, num_ranks, "tp", kernels=kernels) as engine:
        answer_all(engine, [make_ask(prompt(1, 40), 6)])
        assert engine.stats().steps_replayed > 0


@pytest.mark.parametrize(
    ("num_ranks", "rank", "kernels"),
    [
        (1, 0, abi.KERNELS_HOPPER),
        (1, 0, abi.KERNELS_PORTABLE),
        (2, 0, abi.KERNELS_PORTABLE),
        (2, 1, abi.KERNELS_PORTABLE),
        (4, 3, abi.KERNELS_PORTABLE),
    ],
)
@pytest.mark.parametrize("passes", [1, 3])
def test_a_rank_that_fails_in_a_recording(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, num_ranks: int, rank: int, kernels: int, passes: int
) -> None:
    use(checkpoint, num_ranks, kernels)
    before = free_bytes()
    monkeypatch.setenv("GLINT_FAULT", f"capture:{rank}:{passes}")
    name = "the fault" if num_ranks == 1 else f"rank {rank} of {num_ranks} failed: the fault"
    for _ in range(3):
        declare("glint_testing_reset_faults", None, device="cuda")()
        with pytest.raises(InternalFailure, match=name):
            open_ranks(checkpoint, num_ranks, "tp", kernels=kernels)
    monkeypatch.delenv("GLINT_FAULT")
    assert abs(free_bytes() - before) < LEFT_BYTES
    use(checkpoint, num_ranks, kernels)
