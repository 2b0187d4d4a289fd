"""FP8 on the fast paths over teacher-forced positions: the divergence from exact, in nats.

The yardstick is the recorded divergence between summation orders of the reference with all its sums in FP32: those of
norms and attention too, and GEMMs of weights that already carry their scale. The fast paths round less often than
that, so this test finds what is badly off; the tests of operations and layers find what is slightly off.
tests/reference/test_mistakes.py holds the mistakes that transformers' code can be given to the same bound.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from glint.engine.args import Kernels
from tests.cpu.case_store import CaseStore, quick_or_slow
from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.tapped_engine import TappedEngine
from tests.reference.checkpoints import Family, Weights, make_checkpoint
from tests.reference.expected import make_sequences, mean_kl, read_yardstick, recorded_name
from tests.reference.recorded_cases import DIVERGENCE_CASES, DIVERGENCE_TOKEN_LIMIT, QUICK_DIVERGENCE_CASES
from tests.reference.shapes import SHAPES

ALLOWED_RATIO = 1.5
MISTAKES: dict[str, dict[str, Any]] = {
    "scaling_twice": {"routed_scaling_factor": 6.25},
    "qk_norm_skipped": {"use_qk_norm": False},
    "every_dim_rotated": {"partial_rotary_factor": 1.0},
    "wrong_rotary_base": {"rope_theta": 100000.0},
    "one_expert_fewer": {"num_experts_per_tok": 7},
}


@dataclass(frozen=True)
class Case:
    """A checkpoint, token sequences, the exact path's logits over all their positions, and the yardstick."""

    folder: Path
    sequences: list[list[int]]
    exact: NDArray[np.float32]
    between_orders: float


def logits_over(folder: Path, kernels: Kernels, sequences: list[list[int]]) -> NDArray[np.float32]:
    """Logits [positions, vocab] of all positions of all sequences."""
    with TappedEngine(folder, kernels) as engine:
        return np.concatenate([engine.logits(sequence) for sequence in sequences])


def make_case(folder: Path, family: Family, weights: Weights) -> Case:
    """Run the exact path over random sequences."""
    sequences = make_sequences(DIVERGENCE_TOKEN_LIMIT)
    yardstick = read_yardstick(recorded_name(family, weights), folder)
    return Case(folder, sequences, logits_over(folder, "exact", sequences), yardstick)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> CaseStore[Case]:
    """The cases of this module."""
    return CaseStore(tmp_path_factory.mktemp("divergence"), make_case)


@pytest.mark.parametrize("kernels", FAST_KERNELS)
@pytest.mark.parametrize(("family", "weights"), quick_or_slow(DIVERGENCE_CASES, QUICK_DIVERGENCE_CASES))
def test_fast_fp8_stays_near_exact(
    cases: CaseStore[Case], family: Family, weights: Weights, kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    require_kernels(kernels)
    case = cases[family, weights]
    assert len(case.exact) >= 500
    divergence = mean_kl(case.exact, logits_over(case.folder, kernels, case.sequences))
    ratio = divergence / case.between_orders
    with capsys.disabled():
        print(f"\n{family} {weights} {kernels}: {divergence:.2e} nats from exact, {ratio:.2f} of the", end=" ")
        print(f"{case.between_orders:.2e} between orders", end=" ")
    assert divergence > 0
    assert divergence <= ALLOWED_RATIO * case.between_orders


@pytest.mark.parametrize("mistake", quick_or_slow(list(MISTAKES), ["scaling_twice", "wrong_rotary_base"]))
def test_a_mistake_goes_over_the_bound(cases: CaseStore[Case], tmp_path: Path, mistake: str) -> None:
    """The exact path on the same weights with one number of the config misread."""
    case = cases["glm47", "fp8_block"]
    assert all(getattr(SHAPES["glm47"], name) != value for name, value in MISTAKES[mistake].items())
    misread = make_checkpoint(tmp_path, "glm47", "fp8_block", **MISTAKES[mistake])
    assert mean_kl(case.exact, logits_over(misread, "exact", case.sequences)) > ALLOWED_RATIO * case.between_orders
