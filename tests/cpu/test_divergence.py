"""FP8 on the fast paths over teacher-forced positions: the divergence from exact, in nats.

The yardstick is the divergence between summation orders of the reference with all its sums in FP32: those of norms and
attention too, and products of weights that already carry their scale. The fast paths round less often than that, so
this test finds what is badly off; the tests of operations and layers find what is slightly off.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from glint.config import Kernels
from tests.cpu.case_store import CaseStore
from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.tapped_engine import TappedEngine
from tests.reference import transformers_reference as reference
from tests.reference.checkpoints import WEIGHTS, Family, Weights

ALLOWED_RATIO = 1.5
NUM_SEQUENCES = 5
SEQUENCE_TOKENS = 128
FAMILIES: tuple[Family, ...] = ("glm47", "groups")
TOO_SMALL_FOR_ANY_BOUND = ("glm47", "bias_in_weights")
CASES = [(family, weights) for family in FAMILIES for weights in WEIGHTS[1:]]


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


def make_case(folder: Path) -> Case:
    """Run the exact path and the reference over random sequences."""
    sequences = np.random.default_rng(0).integers(0, 950, (NUM_SEQUENCES, SEQUENCE_TOKENS)).tolist()
    yardstick = reference.Reference(folder).kl_between_orders(*sequences)
    return Case(folder, sequences, logits_over(folder, "exact", sequences), yardstick)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> CaseStore[Case]:
    """The cases of this module."""
    return CaseStore(tmp_path_factory.mktemp("divergence"), make_case)


@pytest.mark.parametrize("kernels", FAST_KERNELS)
@pytest.mark.parametrize(("family", "weights"), CASES)
def test_fast_fp8_stays_near_exact(
    cases: CaseStore[Case], family: Family, weights: Weights, kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    require_kernels(kernels)
    case = cases[family, weights]
    assert len(case.exact) >= 500
    divergence = reference.mean_kl(case.exact, logits_over(case.folder, kernels, case.sequences))
    ratio = divergence / case.between_orders
    with capsys.disabled():
        print(f"\n{family} {weights} {kernels}: {divergence:.2e} nats from exact, {ratio:.2f} of the", end=" ")
        print(f"{case.between_orders:.2e} between orders", end=" ")
    assert divergence > 0
    assert divergence <= ALLOWED_RATIO * case.between_orders


@pytest.mark.parametrize(
    ("family", "break_"),
    [
        (family, break_)
        for family in FAMILIES
        for break_ in reference.BREAKAGES
        if (family, break_) != TOO_SMALL_FOR_ANY_BOUND
    ],
)
def test_a_mistake_goes_over_the_bound(cases: CaseStore[Case], family: Family, break_: str) -> None:
    """Every mistake shows but one that costs less than a correct fast path does on that family; parity tests see it."""
    case = cases[family, "fp8_channel"]
    broken = reference.Reference(case.folder, break_=break_)
    rows = np.concatenate([broken.logits(sequence) for sequence in case.sequences])
    assert reference.mean_kl(case.exact, rows) > ALLOWED_RATIO * case.between_orders
