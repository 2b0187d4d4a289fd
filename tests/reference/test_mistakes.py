"""What the tests of the engine's exact path would see of each deliberate mistake, with torch at hand."""

import numpy as np
import pytest

from tests.cpu.case_store import CaseStore
from tests.cpu.test_divergence import ALLOWED_RATIO, Case, make_case
from tests.reference import transformers_reference as reference
from tests.reference.checkpoints import Family
from tests.reference.expected import mean_kl

FAMILIES: tuple[Family, ...] = ("glm47", "air")
TOO_SMALL_FOR_ANY_BOUND = {("glm47", "bias_in_weights")}
ABSENT_PARTS = {
    ("air", "qk_norm_skipped"),
    ("air", "scaling_twice"),
    *((family, "groups_ignored") for family in FAMILIES),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> CaseStore[Case]:
    """The exact path over the sequences of the divergence tests."""
    return CaseStore(tmp_path_factory.mktemp("mistakes"), make_case)


@pytest.mark.parametrize(
    ("family", "break_"),
    [
        (family, break_)
        for family in FAMILIES
        for break_ in reference.BREAKAGES
        if (family, break_) not in TOO_SMALL_FOR_ANY_BOUND | ABSENT_PARTS
    ],
)
def test_a_mistake_goes_over_the_bound(cases: CaseStore[Case], family: Family, break_: str) -> None:
    """Every mistake of a part that the family has shows, but one that costs less than a correct fast path does.

    Parity tests see that one.
    """
    case = cases[family, "fp8_channel"]
    broken = reference.Reference(case.folder, break_=break_)
    rows = np.concatenate([broken.logits(sequence) for sequence in case.sequences])
    assert mean_kl(case.exact, rows) > ALLOWED_RATIO * case.between_orders
