"""The exact path layer by layer against transformers, over a longer prompt than the recorded one."""

from pathlib import Path

import pytest

from tests.cpu.test_layers import EXACT_WHOLE_BOUND, layer_errors, make_case
from tests.reference.checkpoints import Family, Weights, make_checkpoint
from tests.reference.recorded_cases import MODEL_CASES
from tests.reference.transformers_reference import Reference


@pytest.mark.parametrize(("family", "weights"), MODEL_CASES)
def test_each_layer_of_the_exact_path_is_the_references(tmp_path: Path, family: Family, weights: Weights) -> None:
    case = make_case(make_checkpoint(tmp_path, family, weights))
    errors = layer_errors(case.states, Reference(case.folder).hidden_states(case.tokens))
    print(*errors, sep="\n")
    assert max(error.whole for error in errors) < EXACT_WHOLE_BOUND
